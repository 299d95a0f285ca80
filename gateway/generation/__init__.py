"""From a request that is tokens to an answer that is text, over as many attempts as it takes."""
