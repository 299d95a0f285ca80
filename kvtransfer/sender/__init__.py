"""P's half: writes a transfer's blocks into what was granted."""
