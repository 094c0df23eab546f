"""Layouts: placements, specs, and the arithmetic of which rank holds which part of a tensor."""
