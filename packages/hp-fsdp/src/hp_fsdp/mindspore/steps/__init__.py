"""Steps on MindSpore: the work before and after forward and backward."""
