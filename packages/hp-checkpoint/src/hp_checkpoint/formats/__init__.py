"""Formats of checkpoints and of their numbers: read in place, written in bounded memory."""
