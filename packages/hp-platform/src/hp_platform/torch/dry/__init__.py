"""Worlds of ranks of which this process plays one: without memory (`dry_world`), or on its device (`played_world`)."""

from __future__ import annotations

from hp_platform.torch.dry.memoryless import Alike, Peers, dry_world, value_observers
from hp_platform.torch.dry.played import Copies, played_world

__all__ = ["Alike", "Copies", "Peers", "dry_world", "played_world", "value_observers"]
