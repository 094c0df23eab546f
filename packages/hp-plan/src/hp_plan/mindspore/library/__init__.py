"""Models with a plan applied."""
