"""Dry runs: not on MindSpore."""
