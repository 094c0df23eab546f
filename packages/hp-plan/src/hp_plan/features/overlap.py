"""`[communication] async_tensor_parallel`: layers whose reduce-scatter goes on under their product."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from hp_plan.plan import ParallelPlan
from hp_plan.reading.diagnostics import Diagnostic
from hp_plan.structure.outline import ModelOutline
from hp_platform import get_platform
from hp_styles import ParallelStyle
from hp_styles.extend import STYLES

_KEY = "communication.async_tensor_parallel"


def check_overlap(plan: ParallelPlan) -> list[Diagnostic]:
    """Refuse what a plan's numbers leave without effect, or what the layers of an adapter can't have."""
    if plan.communication.async_tensor_parallel == "off":
        return []
    reason = None
    if get_platform().name != "torch":
        reason = "which this version has on PyTorch only"
    elif plan.mesh.tp == 1:
        reason = "but mesh.tp is 1, so no layer is sharded"
    elif plan.adapter.kind is not None:
        reason = "but the layers of an adapter have a product of their own"
    return [] if reason is None else [Diagnostic(_KEY, f"got 'auto', {reason}", "leave it out")]


def check_overlapped(plan: ParallelPlan, styles: Mapping[str, str], model: ModelOutline) -> list[Diagnostic]:
    """Refuse a plan of whose layers none has anything to overlap.

    Args:
        plan: the plan.
        styles: of the model's modules, by name.
        model: its model.
    """
    if plan.communication.async_tensor_parallel == "off" or _chosen(styles, model):
        return []
    message = "got 'auto', but no style scatters the output of a Linear along the sequence"
    return [Diagnostic(_KEY, message, 'leave it out, or write styles = "auto-sequence"')]


def overlapped(plan: ParallelPlan, styles: Mapping[str, str], model: ModelOutline) -> Mapping[str, str | ParallelStyle]:
    """Give the Linear modules whose output is scattered along the sequence the style that overlaps it.

    Args:
        plan: the plan.
        styles: name of a module or parameter -> style.
        model: kinds of modules.
    """
    if plan.communication.async_tensor_parallel == "off":
        return styles
    return {**styles, **{name: make() for name, make in _chosen(styles, model).items()}}


def _chosen(styles: Mapping[str, str], model: ModelOutline) -> dict[str, Callable[[], ParallelStyle]]:
    return {
        name: make
        for name, style in styles.items()
        if style in STYLES
        and (make := STYLES[style].overlapped) is not None
        and name in model.modules
        and model.modules[name].kind == "linear"
        and not model.modules[name].own_forward
    }
