"""What a client asks, in the one form that runs: a chat or a completion request."""
