"""The tour: see `__main__`."""
