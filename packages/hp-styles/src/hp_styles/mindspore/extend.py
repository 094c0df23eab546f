"""Names on MindSpore that other packages of this repository may import, beside the public ones."""

from __future__ import annotations

from hp_styles.mindspore.modules import kind

__all__ = ["kind"]
