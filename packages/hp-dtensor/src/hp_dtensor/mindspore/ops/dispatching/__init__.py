"""From a call of a kernel to a plan, and the plan run."""
