"""Context parallelism: its styles, and the arithmetic of who computes and compares what, without a framework."""
