"""The PyTorch side of hp-styles."""
