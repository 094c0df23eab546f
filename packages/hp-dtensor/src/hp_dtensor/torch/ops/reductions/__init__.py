"""Reductions over shards that are not a function of each by itself: norms and losses."""
