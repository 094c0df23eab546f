"""Loading: each byte read once over all ranks."""
