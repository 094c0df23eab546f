"""Values in nests, and sums in a fixed order."""
