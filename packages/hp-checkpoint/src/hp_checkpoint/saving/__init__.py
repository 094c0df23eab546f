"""Saving: planned by all ranks, written in place, committed once."""
