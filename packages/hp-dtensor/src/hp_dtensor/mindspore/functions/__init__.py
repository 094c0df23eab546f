"""A user's own functions and rules on MindSpore."""
