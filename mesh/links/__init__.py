"""Connections between processes: one side dials, the other listens."""
