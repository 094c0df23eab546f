"""Steps on PyTorch: the work before and after forward and backward."""
