"""The PyTorch side of hp-checkpoint."""
