"""The ranks that a group is sharded and replicated over, and what they must agree on."""
