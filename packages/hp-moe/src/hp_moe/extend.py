"""Names that other packages of this repository may import, beside the public ones."""

from __future__ import annotations

from hp_moe.routes.forced import Counts, balanced, forced_routes, skewed

__all__ = ["Counts", "balanced", "forced_routes", "skewed"]
