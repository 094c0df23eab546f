"""Tensor and sequence parallel styles: over one mesh axis, and over several."""
