"""Code of MindSpore that would take a DTensor for its local tensor."""
