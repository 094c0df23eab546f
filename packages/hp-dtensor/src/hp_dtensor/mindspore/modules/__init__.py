"""Cells of DTensors on MindSpore."""
