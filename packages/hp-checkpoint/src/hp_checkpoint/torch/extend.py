"""Names on PyTorch that other packages of this repository may import, beside the public ones."""

from __future__ import annotations

from hp_checkpoint.torch.port import DTYPES

__all__ = ["DTYPES"]
