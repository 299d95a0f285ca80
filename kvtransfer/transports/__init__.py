"""Ways to bring bytes into another process's pool; ``base`` is what all of them implement."""
