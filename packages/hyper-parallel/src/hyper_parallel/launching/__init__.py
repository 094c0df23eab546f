"""Ranks of this machine, started and ended."""
