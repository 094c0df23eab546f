"""fully_shard on PyTorch modules."""
