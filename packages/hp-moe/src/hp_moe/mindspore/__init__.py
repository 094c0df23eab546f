"""The MindSpore side of hp-moe."""
