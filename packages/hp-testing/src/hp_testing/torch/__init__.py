"""Ranks and tensors of tests on PyTorch."""
