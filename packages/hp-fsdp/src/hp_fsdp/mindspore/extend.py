"""Names on MindSpore that other packages of this repository may import, beside the public ones."""

from __future__ import annotations

from hp_fsdp.mindspore.optimizers import watch_optimizers

__all__ = ["watch_optimizers"]
