"""Names that other packages of this repository may import, beside the public ones."""

from __future__ import annotations

from hp_styles.base import applied_name, claim, style_of
from hp_styles.context.plan import DegreeError, chunks_of, kv_copies, split_degrees
from hp_styles.inputs import hook
from hp_styles.names import ALIASES, STYLES, canonical, sequence_parallel_plan
from hp_styles.tensor.regions import runs_on_parts

__all__ = [
    "ALIASES",
    "DegreeError",
    "STYLES",
    "applied_name",
    "canonical",
    "chunks_of",
    "claim",
    "hook",
    "kv_copies",
    "runs_on_parts",
    "sequence_parallel_plan",
    "split_degrees",
    "style_of",
]
