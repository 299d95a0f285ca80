"""Compute backends: one interface (``base``), one package per kind of device."""
