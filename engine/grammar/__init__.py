"""Keeps output to a grammar: compiled once, followed by each sequence."""
