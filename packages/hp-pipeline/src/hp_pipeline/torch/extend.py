"""Names on PyTorch that other packages of this repository may import, beside the public ones."""

from __future__ import annotations

from hp_pipeline.torch.outline import count_operations
from hp_pipeline.torch.stages import caching, is_stand_in

__all__ = ["caching", "count_operations", "is_stand_in"]
