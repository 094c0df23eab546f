"""The PyTorch side of hp-offload."""
