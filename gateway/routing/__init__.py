"""Which pair of workers serves a request, and the links to all of them."""
