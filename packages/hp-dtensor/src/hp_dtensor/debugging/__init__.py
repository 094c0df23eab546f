"""The communication of a program, and pictures of who has what."""
