"""Names on PyTorch that other packages of this repository may import, beside the public ones."""

from __future__ import annotations

from hp_plan.torch.models import forward_loss

__all__ = ["forward_loss"]
