"""The PyTorch side of hp-moe."""
