"""States as tensors by name, and the pieces of each that a rank has."""
