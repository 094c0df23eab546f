"""Functions of a user's own on DTensors, and contexts for code next to plain tensors."""
