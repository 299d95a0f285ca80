"""Which sequences compute in the next step, and how much of each."""
