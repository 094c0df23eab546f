"""What touches tensors on PyTorch."""
