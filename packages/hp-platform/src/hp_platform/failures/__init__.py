"""Ranks that are lost or hang: how it is noticed, named and told."""
