"""A run's data model: what is stored, where, and how readers choose."""
