"""Ranks that fail: what all of them raise, and what those that are left save."""
