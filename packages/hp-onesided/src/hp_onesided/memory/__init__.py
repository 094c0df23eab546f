"""Memory of the same size on each rank, which all ranks of a group read and write, and signals between them."""
