"""`[adapter]` and `[model] freeze`: which parameters are trained, and what an adapter calls its own."""

from __future__ import annotations

from collections.abc import Container, Iterable
from dataclasses import fields

from hp_plan.plan import ParallelPlan
from hp_plan.reading.diagnostics import Diagnostic
from hp_plan.sections import AdapterSection
from hp_plan.structure.outline import matches, matches_inside, matches_nothing
from hp_platform import get_platform

ADAPTER = "default"
"""The name under which peft keeps a plan's adapter."""

ALL_LINEAR = "all-linear"
"""The target that stands for all Linear modules but the head, as in peft."""

_WRAPPED = ("base_layer", "original_module")  # parts of names that peft puts in, of what it leaves as it was
_COPIES = "modules_to_save"


def is_of_adapter(name: str) -> bool:
    """Return True for the name of a parameter that an adapter brings.

    >>> is_of_adapter("layers.0.q_proj.lora_A.default.weight"), is_of_adapter("layers.0.q_proj.base_layer.weight")
    (True, False)
    """
    return any(part.startswith("lora_") or part == _COPIES for part in name.split("."))


def base_name(name: str) -> str:
    """Return the name that a parameter has in the model without the adapter.

    >>> base_name("layers.0.q_proj.base_layer.weight")
    'layers.0.q_proj.weight'
    """
    return ".".join(part for part in name.split(".") if part not in _WRAPPED)


def innermost(name: str, modules: Container[str]) -> str:
    """Return the name of the module that adapters wrap; the name itself if there are none.

    >>> innermost("mlp.experts", ["mlp.experts", "mlp.experts.base_layer", "mlp.experts.base_layer.base_layer"])
    'mlp.experts.base_layer.base_layer'

    Args:
        name: of a module.
        modules: names of all.
    """
    while (inner := f"{name}.base_layer") in modules:
        name = inner
    return name


def saved_name(name: str) -> str | None:
    """Return the name that a parameter has in peft's files; None if it is not the adapter's.

    >>> saved_name("layers.0.q_proj.lora_A.default.weight")
    'base_model.model.layers.0.q_proj.lora_A.weight'
    """
    if not is_of_adapter(name):
        return None
    parts = [part for part in name.split(".") if part not in (ADAPTER, _COPIES)]
    return ".".join(["base_model", "model", *parts])


def frozen(plan: ParallelPlan, name: str) -> bool:
    """Return True if `[model] freeze` says that a parameter is not trained."""
    return matches_inside(plan.model.freeze or (), name)


def check_frozen(plan: ParallelPlan, names: Iterable[str]) -> list[Diagnostic]:
    """Check that each pattern of `[model] freeze` matches something, and that something is left to train.

    Args:
        plan: the plan.
        names: of the model's parameters.
    """
    own = list(names)
    above = list(dict.fromkeys(".".join(name.split(".")[: n + 1]) for name in own for n in range(name.count(".") + 1)))
    diagnostics = [
        matches_nothing(f"model.freeze[{number}]", pattern, above, what="parameter or module")
        for number, pattern in enumerate(plan.model.freeze)
        if not any(matches(pattern, name) for name in above)
    ]
    if plan.model.freeze and not diagnostics and all(frozen(plan, name) for name in own):
        diagnostics.append(Diagnostic("model.freeze", "it freezes all parameters", "leave some to train"))
    return diagnostics


def check_adapter(plan: ParallelPlan) -> list[Diagnostic]:
    """Check that an adapter can be trained as the plan says."""
    section, diagnostics = plan.adapter, []
    if section.kind is None:
        given = [item.name for item in fields(section) if getattr(section, item.name) != getattr(_NONE, item.name)]
        if given:
            message = f"{', '.join(given)} would have no effect: there is no adapter"
            diagnostics.append(Diagnostic("adapter", message, 'write kind = "lora", or leave [adapter] out'))
        return diagnostics
    if get_platform().name != "torch":
        message = f"got {section.kind!r}, which this version does not support on MindSpore"
        diagnostics.append(Diagnostic("adapter.kind", message, "leave [adapter] out, or train on PyTorch"))
    if not section.targets:
        message = "got no target, so no module has an adapter"
        diagnostics.append(Diagnostic("adapter.targets", message, f'write targets = ["{ALL_LINEAR}"]'))
    if ALL_LINEAR in section.targets and len(section.targets) > 1:
        message = f"{ALL_LINEAR!r} is all of them, and stands alone"
        diagnostics.append(Diagnostic("adapter.targets", message, f'write targets = ["{ALL_LINEAR}"]'))
    if plan.model.freeze:
        message = "the adapter is trained in place of all of the model's weights"
        diagnostics.append(Diagnostic("model.freeze", message, "leave it out, or [adapter]"))
    return diagnostics


_NONE = AdapterSection()
