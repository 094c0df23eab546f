"""A plan played on tensors without memory."""
