"""What each section of a plan does to a model, and what it needs of one."""
