"""Linear layers of a model that multiply in eight bits, by torchao.

Note [Scales of parts]
    A scale of activations is of what is multiplied at a time: of one rank's samples, in one micro-batch, and of its
    part of their sequences. So one process that multiplies a whole batch at a time casts to other bits, by as much as
    one element's rounding. The one-process program that a plan is compared with therefore multiplies the same parts one
    by one, and its weights' gradients are the sums over them.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import importlib.util
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from hp_dtensor.extend import gather_as
from hp_plan.checks.precision import low_precision_layers
from hp_plan.features.loss import cut_rows
from hp_plan.features.pipelines import micro_batches
from hp_plan.plan import ParallelPlan, tokens_at
from hp_plan.port import models
from hp_plan.sections import PrecisionSection
from hp_platform import get_platform

_FLOAT8 = (8, 9)
"""The capability from which on NVIDIA's devices multiply float8."""
_MX = (10, 0)
"""The same of blocks with scales of their own."""


def lacks_products(linear: str, kernels: str) -> tuple[str, str] | None:
    """See `hp_plan.port.Models`."""
    if importlib.util.find_spec("torchao") is None:
        return "torchao is not installed", 'pip install "hyper-parallel[fp8]", or leave [precision] out'
    kind = get_platform().devices.kind
    if kind not in ("cpu", "cuda"):
        return f"torchao has no such products on {kind}", "leave [precision] out"
    if kernels == "emulated":
        return None
    emulate = "make precision.kernels 'emulated', to try it out, or leave [precision] out"
    capability = torch.cuda.get_device_capability() if kind == "cuda" else None
    needed = _MX if linear == "mxfp8" else _FLOAT8
    if capability is None and linear == "mxfp8":
        return "a CPU has no product of blocks with scales", emulate
    if capability is not None and capability < needed:
        have, need = (".".join(map(str, each)) for each in (capability, needed))
        return f"this device's capability is {have}, and its products need {need}", emulate
    return None


def lower_precision(model: nn.Module, section: PrecisionSection, names: Sequence[str]) -> None:
    """See `hp_plan.port.Models`."""
    modules = dict(model.named_modules())
    for name in names:
        linear: Any = modules[name]
        like = _layer(linear, section)
        linear.__class__ = type(like)
        for key, value in vars(like).items():
            vars(linear).setdefault(key, value)
        if section.all_gather is not None:
            weights = importlib.import_module("torchao.float8.fsdp_utils")
            none = torch.empty(0, linear.in_features, dtype=linear.weight.dtype)
            dtype = linear.config.cast_config_weight.target_dtype
            gather_as(linear.weight, weights.WeightWithDynamicFloat8CastTensor(none, linear.linear_mm_config, dtype))


def lower_precision_in_parts(plan: ParallelPlan, model: nn.Module) -> None:
    """Let a model in one process multiply in eight bits as the ranks of a plan do: Note [Scales of parts].

    Args:
        plan: the plan.
        model: as it was built.
    """
    names = low_precision_layers(plan, models().outline(model))
    lower_precision(model, plan.precision, names)
    modules = dict(model.named_modules())
    for name in names:
        modules[name].forward = functools.partial(_in_parts, plan, modules[name].forward)


def _in_parts(plan: ParallelPlan, forward: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    samples, tokens = plan.data.batch_size * plan.data.width, plan.data.sequence_length
    own = samples // plan.mesh.data_parallel
    parts = samples // own * (micro_batches(plan) if plan.mesh.pp > 1 else len(cut_rows(plan, own)))
    if x.dim() == 2 and len(x) == samples * tokens:
        return _in_parts(plan, forward, x.unflatten(0, (samples, tokens))).flatten(0, 1)
    if len(x) != samples:
        return forward(x)
    places = [tokens_at(plan, place) for place in range(plan.mesh.cp)]
    if plan.mesh.cp == 1 or x.dim() < 3 or x.shape[1] != tokens:
        return torch.cat([forward(part) for part in x.chunk(parts)])
    order = torch.tensor([place for some in places for place in some], device=x.device)
    rows = (torch.cat([forward(part[:, some]) for some in places], 1) for part in x.chunk(parts))
    return torch.cat(list(rows))[:, order.argsort()]


def emulated(section: PrecisionSection) -> PrecisionSection:
    """Return a section for a model in float64, of which torchao takes no blocks with scales."""
    if section.linear in (None, "mxfp8"):
        return PrecisionSection()
    return dataclasses.replace(section, kernels="emulated")


def what_was_multiplied(section: PrecisionSection) -> str:
    """Say what `emulated` makes of a section."""
    if section.linear == "mxfp8":
        return "mxfp8 was left out, as torchao casts no float64 to it: layers multiplied in float64"
    return f"{section.linear} was emulated: what is cast to eight bits is multiplied in float64"


def _layer(linear: nn.Linear, section: PrecisionSection) -> nn.Module:
    """Make a layer of torchao of the same sizes, without memory."""
    sizes = (linear.in_features, linear.out_features)
    if section.linear == "mxfp8":
        mx = importlib.import_module("torchao.prototype.moe_training.mxfp8_linear")
        preference: Any = importlib.import_module("torchao.quantization.quantize_.common").KernelPreference
        kernels = preference.EMULATED if section.kernels == "emulated" else preference.AUTO
        return mx.MXFP8Linear(*sizes, bias=False, kernel_preference=kernels, device="meta")
    float8 = importlib.import_module("torchao.float8")
    assert section.linear is not None
    config = float8.Float8LinearConfig.from_recipe_name(section.linear.removeprefix("float8-"))
    config = dataclasses.replace(config, emulate=section.kernels == "emulated")
    return float8.convert_to_float8_training(nn.Linear(*sizes, bias=False, device="meta"), config=config)
