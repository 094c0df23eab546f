"""The MindSpore side of hp-optim."""
