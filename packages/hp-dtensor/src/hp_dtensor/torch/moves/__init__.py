"""Redistribution on PyTorch."""
