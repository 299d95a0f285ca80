"""What a worker's steps spend their time on, measured while it serves."""
