"""Regions: functions that run again in backward, and what of them is kept."""
