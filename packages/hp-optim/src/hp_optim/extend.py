"""Names that other packages of this repository may import, beside the public ones."""

from __future__ import annotations

from hp_optim.chained import default_patterns, is_hidden_matrix
from hp_optim.lr_schedulers import decayed

__all__ = ["decayed", "default_patterns", "is_hidden_matrix"]
