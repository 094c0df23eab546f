"""Runs that stop, hang, diverge, run out of memory or fail, and what is said of it."""
