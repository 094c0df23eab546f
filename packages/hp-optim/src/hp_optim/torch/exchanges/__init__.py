"""Muon's pieces on their way to the owners of matrices and back."""
