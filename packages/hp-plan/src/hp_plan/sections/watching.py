"""`[metrics]`, `[validation]` and `[profile]`: what a run shows of itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hp_plan.sections.bounds import at_least, more_than


@dataclass(frozen=True)
class MetricsSection:
    """Where a run's metrics go, beside the display and `metrics.jsonl`.

    Attributes:
        sinks: `tensorboard` writes event files into the run's folder; `wandb` sends them to Weights & Biases, as its
            own environment variables say (`WANDB_PROJECT`, `WANDB_MODE`).
        peak_flops: operations a second that one device can do in the dtype that the model computes in; MFU is the part
            of them that the model takes. None is that of a known device; of any other, MFU is left out.
    """

    sinks: tuple[Literal["tensorboard", "wandb"], ...] = ()
    peak_flops: float | None = more_than(0.0, None)


@dataclass(frozen=True)
class ValidationSection:
    """Loss on data that is not trained on, with the sequence length, packing and batch size of `[data]`; and texts.

    Attributes:
        paths: as `data.paths`; none validates nothing.
        every: so many steps, and at the end of the run.
        batches: how many of `data.batch_size` samples; the same samples each time, and in each run.
        prompts: texts that the model goes on with as often; none writes nothing.
        prompt_tokens: how many tokens it writes after each.
    """

    paths: tuple[str, ...] = ()
    every: int = at_least(1, 100)
    batches: int = at_least(1, 8)
    prompts: tuple[str, ...] = ()
    prompt_tokens: int = at_least(1, 64)


@dataclass(frozen=True)
class ProfileSection:
    """Steps that are profiled, as a trace for Chrome or Perfetto: `profile/rank-0.json` in the run's folder.

    Attributes:
        start: the first of them, from 1; none profiles nothing.
        steps: how many.
        ranks: which ranks write one.
    """

    start: int | None = at_least(1, None)
    steps: int = at_least(1, 3)
    ranks: tuple[int, ...] = at_least(0, (0,))
