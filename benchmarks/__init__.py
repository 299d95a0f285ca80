"""Measurements, run by ``pdmesh bench NAME``; a module with a ``main(argv)`` is one of them."""
