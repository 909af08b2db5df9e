"""Faults at fixed points, and an oracle that reads only the store. `make chaos` runs the whole matrix."""
