"""Parallel styles on MindSpore: what they do to a Cell."""
