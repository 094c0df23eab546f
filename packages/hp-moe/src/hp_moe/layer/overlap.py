"""Another micro-batch's computation under the exchanges of experts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from hp_moe.port import port
from hp_moe.routes.routes import at_once

Function = Callable[..., Any]


class Overlap(Protocol):
    """The part of ``hp_pipeline.CommComputeOverlap`` that is used here."""

    def wrap_dispatch(self, fn: Function, *, stage: int = 0) -> Function:
        """Return an exchange with a meeting before and after it."""
        ...

    def wrap_combine(self, fn: Function, is_last_layer: bool = False, *, stage: int = 0) -> Function:
        """Return an exchange with a meeting before and after it, for the stage's last layer before it alone."""
        ...


def overlap_experts(model: Any, overlap: Overlap, *, stage: int = 0) -> int:
    """Let a pipeline run another micro-batch's computation under the exchanges of experts.

    To be called once on each stage, after the styles have been applied, before a schedule is built with ``overlap=``::

        overlap = CommComputeOverlap()
        for stage in stages:
            overlap_experts(stage.submodule, overlap, stage=stage.stage_index)
        schedule = ScheduleInterleaved1F1B(stages, 8, overlap_b_f=True, overlap=overlap)

    Args:
        model: of a stage; its modules of experts run once in a forward, in the order of its modules.
        overlap: such as ``hp_pipeline.CommComputeOverlap``.
        stage: its number.

    Returns:
        The number of modules of experts, 0 where the stage has none.

    Raises:
        ValueError: experts whose exchanges are waited for at once, or run in parts already.
    """
    named = ((name, getattr(module, "_expert_layer", None)) for name, module in port().named_modules(model))
    layers = [(name, layer) for name, layer in named if layer is not None and layer.group is not None]
    for name, layer in layers:
        style = layer.style
        if style.token_dispatcher == "all_gather" or style.chunks > 1 or style.async_combine:
            raise ValueError(
                f"overlap_experts: {name} runs by {style!r}, whose exchanges are not one dispatch and one combine that"
                " another micro-batch could run under: use ExpertParallel() or ExpertParallel('deredundency')"
            )
    for place, (_, layer) in enumerate(layers):
        last = place == len(layers) - 1
        layer.launch = (
            overlap.wrap_dispatch(at_once, stage=stage),
            overlap.wrap_combine(at_once, last, stage=stage),
        )
    return len(layers)
