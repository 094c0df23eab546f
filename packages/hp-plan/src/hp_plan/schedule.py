"""The learning rate over a run, as numbers."""

from __future__ import annotations

import math

from hp_plan.sections import ScheduleSection


def schedule_factor(section: ScheduleSection, step: int, steps: int) -> float:
    """What part of the learning rate step `step` (from 0) of `steps` uses.

    >>> [schedule_factor(ScheduleSection("linear", warmup_steps=2), step, 6) for step in range(6)]
    [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]
    """
    if step < section.warmup_steps:
        return (step + 1) / section.warmup_steps
    if section.kind == "constant":
        return 1.0
    progress = min(1.0, (step - section.warmup_steps) / max(1, steps - section.warmup_steps))
    falling = 1.0 - progress if section.kind == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return section.final + (1.0 - section.final) * falling
