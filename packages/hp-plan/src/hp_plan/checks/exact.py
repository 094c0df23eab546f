"""`[run] generation = "exact"`: which plans and models generate with the numbers of training."""

from __future__ import annotations

from typing import Any

from hp_plan.plan import ParallelPlan
from hp_plan.reading.diagnostics import Diagnostic
from hp_plan.structure.outline import ModelOutline
from hp_platform import get_platform

# Families of transformers that are tested to give a token the same bits in training and in generation.
EXACT = ("gemma2", "llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe")
_KEY = "run.generation"
_LEAVE = "leave run.generation out"
_AXES = {
    "tp": "whose ranks add up parts of a product, in another order than one process",
    "cp": "whose ranks add up parts of attention, in another order than one process",
    "pp": "whose stages are not known to give a token the same bits in training and in generation",
    "ep": "whose ranks compute a token beside those that others send",
}


def check_exact(plan: ParallelPlan) -> list[Diagnostic]:
    """Check that nothing in the plan keeps generation from having the bits of training."""
    if plan.run.generation != "exact":
        return []
    reasons = [
        (f"mesh.{axis} = {getattr(plan.mesh, axis)}, {why}", f"make mesh.{axis} 1")
        for axis, why in _AXES.items()
        if getattr(plan.mesh, axis) > 1
    ]
    if not plan.run.deterministic:
        reasons.append(("run.deterministic = false", "write deterministic = true in [run]"))
    platform = get_platform()
    if platform.name != "torch" or platform.devices.kind != "cpu":
        where = "MindSpore" if platform.name != "torch" else platform.devices.kind
        reasons.append((f"{where}, whose kernels are not tested for it: PyTorch's on CPUs are", ""))
    beside = {
        **{f"precision.{key}": form for key, form in plan.precision.formats.items()},
        "compile.blocks": list(plan.compile.blocks),
        "memory.budget": plan.memory.budget,
        "adapter.kind": plan.adapter.kind,
        "data.packing": plan.data.packing,
    }
    reasons += [(f"{key} = {value!r}", f"leave {key} out") for key, value in beside.items() if value]
    return [_refused(f"with {what}" if other else f"on {what}", other) for what, other in reasons]


def check_exact_dtype(plan: ParallelPlan) -> list[Diagnostic]:
    """Check the dtype of the weights: transformers chooses tokens by logits in float32."""
    if plan.run.generation != "exact" or plan.run.dtype in ("float32", "bfloat16"):
        return []
    return [_refused(f"with run.dtype = {plan.run.dtype!r}", "make run.dtype 'float32' or 'bfloat16'")]


def check_exact_model(plan: ParallelPlan, model: ModelOutline) -> list[Diagnostic]:
    """Check that the model is of a family that is tested, and draws nothing in its forward."""
    if plan.run.generation != "exact":
        return []
    config: Any = model.config
    family = getattr(config, "model_type", None)
    if family not in EXACT or not model.type_name.endswith("ForCausalLM"):
        what = model.type_name if family is None or family in EXACT else repr(family)
        return [_refused(f"but {what} is not tested for it", f"take a causal language model of {', '.join(EXACT)}")]
    drawn = {name: value for name, value in vars(config).items() if "dropout" in name or "jitter" in name}
    found = [
        _refused(f"with {name} = {value:g}, which draws in training", f"write {name} = 0.0 in [model.overrides]")
        for name, value in drawn.items()
        if isinstance(value, float) and value > 0
    ]
    implementation = getattr(config, "_attn_implementation", None)
    if implementation not in ("sdpa", "eager"):
        found.append(
            _refused(
                f"but attention is computed by {implementation!r}",
                "write attn_implementation = 'sdpa' in [model.overrides]",
            )
        )
    return found


def _refused(why: str, fix: str) -> Diagnostic:
    return Diagnostic(_KEY, f"got 'exact' {why}", f"{fix}, or {_LEAVE}" if fix else _LEAVE)
