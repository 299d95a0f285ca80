"""From logits to tokens, and from tokens to the next step's."""
