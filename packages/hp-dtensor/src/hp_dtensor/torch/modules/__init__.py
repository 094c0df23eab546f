"""Modules of DTensors on PyTorch."""
