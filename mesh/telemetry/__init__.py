"""Metrics, traces and logs of every process."""
