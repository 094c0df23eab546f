"""Redistribution on MindSpore."""
