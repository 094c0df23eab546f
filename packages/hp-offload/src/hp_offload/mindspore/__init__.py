"""The MindSpore side of hp-offload."""
