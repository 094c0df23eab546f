"""Names that other packages of this repository may import, beside the public ones."""

from __future__ import annotations

from hp_pipeline import schedules
from hp_pipeline.orders.pipeline import Shape, compute_parts
from hp_pipeline.orders.simulation import open_forwards, to_svg, to_text
from hp_pipeline.stages.split import Operations, SplitError
from hp_pipeline.stages.stage import shared_weights

__all__ = [
    "Operations",
    "Shape",
    "SplitError",
    "compute_parts",
    "open_forwards",
    "schedules",
    "shared_weights",
    "to_svg",
    "to_text",
]
