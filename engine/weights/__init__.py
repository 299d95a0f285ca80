"""Model files in a neutral form: a ModelConfig and named float32 tensors."""
