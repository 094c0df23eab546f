"""A user's own functions and rules, and random numbers, on PyTorch."""
