"""Names that other packages of this repository may import, beside the public ones."""

from __future__ import annotations

from hp_offload.planning import BudgetError
from hp_offload.saved import parse_size, size

__all__ = ["BudgetError", "parse_size", "size"]
