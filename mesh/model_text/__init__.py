"""What gateway and workers read of a model besides its weights: tokenizer and grammar."""
