"""The PyTorch side of hp-onesided."""
