"""Names that other packages of this repository may import, beside the public ones."""

from __future__ import annotations

from hp_fsdp.joining import Roster

__all__ = ["Roster"]
