"""A rank's steps as they run: messages, overlap, micro-batches, failures."""
