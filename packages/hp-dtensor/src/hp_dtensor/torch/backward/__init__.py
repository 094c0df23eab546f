"""Autograd through DTensors on PyTorch."""
