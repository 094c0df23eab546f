"""Muon's matrices: which rank orthogonalizes which, and what ranks send each other for it."""
