"""`[metrics]`: what a run shows of itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class MetricsSection:
    """Where a run's metrics go, beside the display and `metrics.jsonl`.

    Attributes:
        sinks: `tensorboard` writes event files into the run's folder; `wandb` sends them to Weights & Biases, as its
            own environment variables say (`WANDB_PROJECT`, `WANDB_MODE`).
    """

    sinks: tuple[Literal["tensorboard", "wandb"], ...] = ()
