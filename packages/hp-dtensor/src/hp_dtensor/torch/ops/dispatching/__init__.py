"""From a call of a torch function to a plan, and the plan run."""
