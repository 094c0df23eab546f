"""Parts of a training run."""
