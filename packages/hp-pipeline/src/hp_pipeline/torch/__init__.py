"""The PyTorch side of hp-pipeline."""
