"""Groups on PyTorch: buckets, parameters, gradients and their communication."""
