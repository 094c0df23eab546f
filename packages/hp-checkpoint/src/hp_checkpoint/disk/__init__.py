"""A checkpoint on disk: its files, its manifest, and which are kept."""
