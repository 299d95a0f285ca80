"""Model files in a neutral form: a ModelConfig and named float32 tensors."""

from engine.weights.expected_tensors import expected_tensors
from engine.weights.open import open_model
from engine.weights.source import WeightSource

__all__ = ["WeightSource", "expected_tensors", "open_model"]
