"""Memory that ranks share, and the two cores that run the steps of a collective over it: compiled, and in Python."""
