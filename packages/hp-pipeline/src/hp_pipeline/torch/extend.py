"""Names on PyTorch that other packages of this repository may import, beside the public ones."""

from __future__ import annotations

from hp_pipeline.torch.outline import count_operations

__all__ = ["count_operations"]
