"""Ranks for tests: pools of processes, and what runs on them."""
