"""Generation under a plan: not on MindSpore."""
