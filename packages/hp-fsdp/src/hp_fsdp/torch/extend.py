"""Names on PyTorch that other packages of this repository may import, beside the public ones."""

from __future__ import annotations

from hp_fsdp.torch.groups.bucket import watching_gathers
from hp_fsdp.torch.steps.context import drop_reductions

__all__ = ["drop_reductions", "watching_gathers"]
