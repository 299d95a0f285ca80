"""What both kinds of worker are around their loop: a process, its threads and ranks."""
