"""Checks and measures the GPU path on one card; see ``benchmarks/gpu_check.sh``."""
