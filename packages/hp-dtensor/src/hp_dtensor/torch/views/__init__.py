"""Views of DTensors on PyTorch: shared memory, strides, views that had to be moved."""
