"""Names that other packages of this repository may import, beside the public ones."""

from __future__ import annotations

from hp_optim.schedules import decayed
from hp_optim.splitting import default_patterns, is_hidden_matrix

__all__ = ["decayed", "default_patterns", "is_hidden_matrix"]
