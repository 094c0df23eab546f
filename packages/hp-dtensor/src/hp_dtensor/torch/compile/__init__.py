"""DTensors under torch.compile."""
