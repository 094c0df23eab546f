"""The PyTorch side of hp-optim."""
