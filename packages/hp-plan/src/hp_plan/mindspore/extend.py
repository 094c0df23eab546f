"""Names on MindSpore that other packages of this repository may import, beside the public ones."""

from __future__ import annotations

from hp_plan.mindspore.models import named_parameters
from hp_plan.mindspore.samples import forward_loss

__all__ = ["forward_loss", "named_parameters"]
