"""Models on parts of sequences."""
