"""A group: the parameters that one call of `fully_shard` manages, in one flat buffer."""
