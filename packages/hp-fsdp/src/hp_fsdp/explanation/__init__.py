"""``explain``: the groups of a sharded model, a step in time, and memory by kind."""
