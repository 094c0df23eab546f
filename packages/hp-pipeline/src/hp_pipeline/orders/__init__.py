"""The order of a pipeline's computing steps: written, searched for, checked and simulated."""
