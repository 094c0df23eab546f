"""Names on MindSpore that other packages of this repository may import, beside the public ones."""

from __future__ import annotations

from hp_plan.mindspore.models import forward_loss, named_parameters

__all__ = ["forward_loss", "named_parameters"]
