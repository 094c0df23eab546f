"""A plan beside one process, and what backward needs."""
