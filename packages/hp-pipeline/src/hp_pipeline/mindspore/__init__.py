"""The MindSpore side of hp-pipeline."""
