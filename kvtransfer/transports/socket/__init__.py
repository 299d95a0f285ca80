"""Over sockets: ``tcp`` carries the bytes, ``shm`` only the word that they are there."""
