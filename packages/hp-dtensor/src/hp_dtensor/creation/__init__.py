"""DTensors and modules of them, made from local parts, whole tensors and nothing."""
