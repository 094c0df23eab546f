"""The MindSpore side of hp-checkpoint."""
