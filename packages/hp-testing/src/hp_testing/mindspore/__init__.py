"""Ranks and tensors of tests on MindSpore."""
