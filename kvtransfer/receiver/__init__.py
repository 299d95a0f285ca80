"""D's half: grants blocks, and commits what arrived whole."""
