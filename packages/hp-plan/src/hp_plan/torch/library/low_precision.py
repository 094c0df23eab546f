"""Linear layers and experts of a model that multiply in eight bits, by torchao.

Note [Scales of parts]
    A scale of activations is of what is multiplied at a time: of one rank's samples, in one micro-batch, and of its
    part of their sequences; in experts over `ep`, of all ranks that send an expert tokens. So one process that
    multiplies a whole batch at a time casts to other bits, by as much as one element's rounding. The one-process
    program that a plan is compared with therefore multiplies the same parts one by one, and its weights' gradients are
    the sums over them.

    Ranks whose gradients become a mean have as many times larger ones than one process, where they are cast. A scale
    that is a power of two takes three times a number to other bits, so that program's gradients are as large.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import importlib.util
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from hp_dtensor.extend import gather_as
from hp_moe import GroupedExperts, register_experts
from hp_plan.checks.precision import low_precision_experts, low_precision_layers
from hp_plan.features.experts import expert_sources
from hp_plan.features.loss import cut_rows
from hp_plan.features.pipelines import micro_batches
from hp_plan.plan import ParallelPlan, tokens_at
from hp_plan.port import models
from hp_plan.sections import PrecisionSection
from hp_platform import get_platform
from hp_styles.torch.extend import EmulatedLinear, grouped_product

TORCHAO = "torchao>=0.18,<0.19"
"""What the extra `fp8` installs."""
_FLOAT8 = (8, 9)
"""The capability from which on NVIDIA's devices multiply float8."""
_GROUPED = (9, 0)
"""The same in groups."""
_MX = (10, 0)
"""The same of blocks with scales of their own."""


def lacks_products(key: str, form: str, kernels: str) -> tuple[str, str] | None:
    """See `hp_plan.port.Models`."""
    kind = get_platform().devices.kind
    if kind == "npu":
        blocks = form == "mxfp8" or key == "experts"
        tried = "torchao's casts to it are kernels for CUDA" if blocks else "torchao is untested there"
        own = "Ascend 910 (A2, A3) multiplies int8, for inference: torch_npu has no gradients of such products"
        return f"of NPUs Ascend 950 alone multiplies float8, and {tried}; {own}", "leave [precision] out"
    if importlib.util.find_spec("torchao") is None:
        return "torchao is not installed", f"pip install '{TORCHAO}', or leave [precision] out"
    if kind not in ("cpu", "cuda"):
        return f"torchao has no such products on {kind}", "leave [precision] out"
    if kernels == "emulated":
        return None
    emulate = "make precision.kernels 'emulated', to try it out, or leave [precision] out"
    capability = torch.cuda.get_device_capability() if kind == "cuda" else None
    needed = _MX if form == "mxfp8" else _GROUPED if key == "experts" else _FLOAT8
    if capability is None and key == "experts":
        return "a CPU has no grouped product in eight bits", emulate
    if capability is None and form == "mxfp8":
        return "a CPU has no product of blocks with scales", emulate
    if capability is not None and capability < needed:
        have, need = (".".join(map(str, each)) for each in (capability, needed))
        return f"this device's capability is {have}, and its products need {need}", emulate
    return None


def lower_precision(model: nn.Module, section: PrecisionSection, names: Sequence[str]) -> None:
    """See `hp_plan.port.Models`."""
    modules = dict(model.named_modules())
    for name in names:
        lower = _lower_linear if isinstance(modules[name], nn.Linear) else _lower_experts
        lower(modules[name], section)


def _lower_linear(linear: Any, section: PrecisionSection) -> None:
    like = _layer(linear, section)
    linear.__class__ = type(like)
    for key, value in vars(like).items():
        vars(linear).setdefault(key, value)
    if section.all_gather is not None:
        weights = importlib.import_module("torchao.float8.fsdp_utils")
        none = torch.empty(0, linear.in_features, dtype=linear.weight.dtype)
        dtype = linear.config.cast_config_weight.target_dtype
        gather_as(linear.weight, weights.WeightWithDynamicFloat8CastTensor(none, linear.linear_mm_config, dtype))


def _lower_experts(module: Any, section: PrecisionSection) -> None:
    assert section.experts is not None
    emulated = section.kernels == "emulated"
    module.grouped_product = functools.partial(grouped_product, form=section.experts, emulated=emulated)
    if not isinstance(module, GroupedExperts):  # which transformers computes in its own way
        module.config._experts_implementation = register_experts()


def lower_precision_in_parts(plan: ParallelPlan, model: nn.Module) -> None:
    """Let a model in one process multiply in eight bits as the ranks of a plan do: Note [Scales of parts].

    Args:
        plan: the plan.
        model: as it was built.
    """
    outline = models().outline(model)
    layers, experts = low_precision_layers(plan, outline), low_precision_experts(plan, outline)
    lower_precision(model, plan.precision, [*layers, *experts])
    modules = dict(model.named_modules())
    for names, sources in ((layers, (1, 1)), (experts, expert_sources(plan) if experts else (1, 1))):
        shares = _shares(plan, *sources)
        for name in names:
            modules[name].forward = functools.partial(_in_parts, plan, shares, modules[name].forward)


def _shares(plan: ParallelPlan, ranks: int, places: int) -> list[torch.Tensor]:
    """List, for each product under a plan, the numbers of its tokens in the whole batch.

    Args:
        plan: the plan.
        ranks: of data parallelism whose samples are multiplied together.
        places: on `cp`, whose tokens are.
    """
    own, length = plan.data.batch_size * plan.data.width // plan.mesh.data_parallel, plan.data.sequence_length
    each = own // (micro_batches(plan) if plan.mesh.pp > 1 else len(cut_rows(plan, own)))
    tokens = [torch.tensor(tokens_at(plan, place)) for place in range(plan.mesh.cp)]
    shares = []
    for first, begin, place in itertools.product(
        range(0, plan.mesh.data_parallel, ranks), range(0, own, each), range(0, plan.mesh.cp, places)
    ):
        starts = [(rank * own + begin) * length for rank in range(first, first + ranks)]
        samples = [start + torch.arange(each)[:, None] * length for start in starts]
        shares.append(torch.cat([(some + at).flatten() for some in samples for at in tokens[place : place + places]]))
    return shares


def _in_parts(
    plan: ParallelPlan,
    shares: Sequence[torch.Tensor],
    forward: Callable[..., torch.Tensor],
    x: torch.Tensor,
    *beside: torch.Tensor,
) -> torch.Tensor:
    samples, tokens = plan.data.batch_size * plan.data.width, plan.data.sequence_length
    if x.dim() > 2 and x.shape[:2] == (samples, tokens):
        return _in_parts(plan, shares, forward, x.flatten(0, 1), *beside).unflatten(0, (samples, tokens))
    if len(x) == samples * tokens:
        rows = [forward(*(each[share] for each in (x, *beside))) for share in shares]
        return torch.cat(rows)[torch.cat(list(shares)).argsort()]
    if len(x) != samples:
        return forward(x, *beside)
    return torch.cat([forward(part) for part in x.chunk(len(shares) // plan.mesh.cp)])


def factor_of_gradients(plan: ParallelPlan) -> int:
    """Return by how much gradients are larger where they are cast than in one process: Note [Scales of parts]."""
    return plan.mesh.data_parallel if plan.precision.formats and not plan.run.deterministic else 1


def emulated(section: PrecisionSection) -> PrecisionSection:
    """Return a section for a model in float64."""
    return dataclasses.replace(section, kernels="emulated") if section.formats else section


def what_was_multiplied(section: PrecisionSection) -> str:
    """Say what `emulated` makes of a section."""
    formats = " and ".join(dict.fromkeys(section.formats.values()))
    return f"{formats} was emulated: what is cast to eight bits is multiplied in float64"


def _layer(linear: nn.Linear, section: PrecisionSection) -> nn.Module:
    """Make a layer of torchao of the same sizes, without memory."""
    sizes = (linear.in_features, linear.out_features)
    if section.linear == "mxfp8" and section.kernels == "emulated":
        return EmulatedLinear(*sizes, bias=False, device="meta")
    if section.linear == "mxfp8":
        mx = importlib.import_module("torchao.prototype.moe_training.mxfp8_linear")
        return mx.MXFP8Linear(*sizes, bias=False, device="meta")
    float8 = importlib.import_module("torchao.float8")
    assert section.linear is not None
    config = float8.Float8LinearConfig.from_recipe_name(section.linear.removeprefix("float8-"))
    config = dataclasses.replace(config, emulate=section.kernels == "emulated")
    return float8.convert_to_float8_training(nn.Linear(*sizes, bias=False, device="meta"), config=config)
