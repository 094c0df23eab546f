"""Products in low precision of torchao's linear layers, whose weights a style has laid out over ranks.

Note [Scales of whole tensors]
    A layer of torchao multiplies what it has cast to eight bits by scales. A scale is of a whole tensor
    (``tensorwise``), or of each row or column of it (``rowwise``). Where ranks have parts of that tensor, or of the
    row, the largest absolute value is taken over all of them before, so that each element becomes the same eight bits
    as in one process. Such a reduction is of one number a tensor, or one a row. What torchao computes in one autograd
    function is here one on the local parts, with its casts and its products. Blocks of 32 elements along a row, as of
    ``mxfp8``, lie on one rank each, so nothing is reduced for them.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch

from hp_dtensor import DeviceMesh, DTensor, Partial, Placement, Replicate, Shard, StridedShard
from hp_dtensor.extend import TensorSpec, gather_as
from hp_platform import collectives
from hp_styles.torch.eight_bits import BLOCK, EmulatedLinear, emulated_linear
from hp_styles.torch.regions import around

Dim = Literal["tokens", "inputs", "outputs"]
_FLOAT8 = "torchao.float8.float8_linear", "Float8Linear"
_MX = "torchao.prototype.moe_training.mxfp8_linear", "MXFP8Linear"


def is_low_precision(module: torch.nn.Module) -> bool:
    """Tell whether a module is a linear layer whose products are in low precision, torchao's or emulated."""
    return _is(module, *_FLOAT8) or _has_blocks(module)


def _has_blocks(module: torch.nn.Module) -> bool:
    return isinstance(module, EmulatedLinear) or _is(module, *_MX)


def _is(module: torch.nn.Module, where: str, name: str) -> bool:
    owner = sys.modules.get(where)  # no instance without the import
    return owner is not None and isinstance(module, getattr(owner, name))


def make_plain(module: torch.nn.Module) -> None:
    """Make a weight that torchao gave an all-gather extension a plain parameter, which is gathered the same way."""
    weight: Any = module._parameters.get("weight")
    if hasattr(type(weight), "fsdp_pre_all_gather"):
        (inner,), context = weight.__tensor_flatten__()
        plain = torch.nn.Parameter(getattr(weight, inner).detach(), requires_grad=weight.requires_grad)
        none = plain.new_empty(0, weight.shape[1])
        gather_as(plain, type(weight).__tensor_unflatten__({inner: none}, context, none.shape, none.stride()))
        module.weight = plain


@dataclass(frozen=True, slots=True)
class _Parts:
    """Which dims of a product ranks have parts of.

    Attributes:
        input: of the input: its tokens or its features.
        weight: of the weight.
        output: of the output's gradient.
        group: the ranks.
    """

    input: Dim | None
    weight: Dim | None
    output: Dim | None
    group: Any


def run_low_precision(module: torch.nn.Module) -> None:
    """Run the product of a layer of torchao on local parts, by the layout that its weight has now.

    Args:
        module: a layer with a DTensor as weight; of one with an all-gather extension, `hp_fsdp` gathers another tensor.

    Raises:
        NotImplementedError: its weight is on a mesh of several axes.
        ValueError: its shards are no multiples of a block of its scales.
    """
    if "_forward_inside" in vars(module):
        return
    weight: Any = module.weight
    spec: TensorSpec = weight._spec
    if spec.mesh.ndim != 1:
        raise NotImplementedError(
            f"{type(module).__name__} with a weight on {spec.mesh}: products in low precision are for a style on one"
            " axis; leave the layer in the model's own precision, or use ColwiseParallel and RowwiseParallel"
        )
    if _has_blocks(module):
        _check_blocks(module, spec)

    def forward(module: Any, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        (x,) = (*args, *kwargs.values())
        if not isinstance(x, DTensor) and not isinstance(module.weight, DTensor):
            return original(x)  # inside of a region on plain tensors
        return _product(module, x, spec)

    around(module, forward)


def _check_blocks(module: torch.nn.Module, spec: TensorSpec) -> None:
    if any(size % BLOCK for size in spec.local_shape):
        raise ValueError(
            f"{type(module).__name__}: a rank's part {list(spec.local_shape)} of the weight {list(spec.shape)} is no"
            f" multiple of the {BLOCK} elements that share a scale; leave the layer in the model's own precision"
        )


def _product(module: Any, x: Any, spec: TensorSpec) -> Any:
    if not isinstance(x, DTensor):
        raise ValueError(
            f"{type(module).__name__}: a plain tensor of shape {tuple(x.shape)} meets a weight of shape {spec.shape}"
            f" placed {spec.placements}. Distribute it (DTensor.from_local), or give the layer a style that does"
        )
    mesh, (placement,) = spec.mesh, spec.placements
    x, parts, out = _laid_out(x, mesh, placement)
    of_input: list[Placement] | None = [Partial()] if parts.weight == "outputs" else None
    local = x.to_local(grad_placements=of_input)
    if torch.is_autocast_enabled(local.device.type):
        local = local.to(torch.get_autocast_dtype(local.device.type))
    weight = module.weight
    if isinstance(weight, DTensor):
        weight = weight.to_local(grad_placements=[Partial()] if parts.input == "tokens" else None)
    if _has_blocks(module) and (rows := local.shape[:-1].numel()) % BLOCK:
        raise ValueError(
            f"{type(module).__name__}: a rank has {rows} tokens of an input {list(x.shape)} placed {x.placements}, no"
            f" multiple of the {BLOCK} that share a scale; make the sequence longer, or leave the layer in the model's"
            " own precision"
        )
    if isinstance(module, EmulatedLinear):
        y = emulated_linear(local, weight)
    elif _is(module, *_MX):
        run = importlib.import_module(_MX[0])._to_mxfp8_then_scaled_mm
        y = run(
            local,
            weight,
            kernel_preference=module.kernel_preference,
            scale_calculation_mode=module.scale_calculation_mode,
            wgrad_with_hp=module.wgrad_with_hp,
        )
    else:
        y = _Product.apply(local, weight, module.config, module.linear_mm_config, parts)
    y = DTensor.from_local(y, mesh, [out], shape=(*x.shape[:-1], spec.shape[0]))
    return y if module.bias is None else y + module.bias.to(y.dtype)


def _laid_out(x: DTensor, mesh: DeviceMesh, weight: Placement) -> tuple[DTensor, _Parts, Placement]:
    """Bring an input to the layout in which it is multiplied; return the parts, and the output's placement."""
    last = x.dim() - 1
    if isinstance(weight, StridedShard) or isinstance(weight, Shard):
        if weight.dim == 1:
            if isinstance(weight, StridedShard):
                raise NotImplementedError(f"products in low precision don't support a weight that is placed {weight}")
            return x.redistribute(mesh, [Shard(last)]), _Parts("inputs", "inputs", None, mesh.get_group()), Partial()
        out = StridedShard(last, weight.split_factor) if isinstance(weight, StridedShard) else Shard(last)
        return x.redistribute(mesh, [Replicate()]), _Parts(None, "outputs", "outputs", mesh.get_group()), out
    (placement,) = x.placements
    if type(placement) is Shard and placement.dim != last:
        return x, _Parts("tokens", None, "tokens", mesh.get_group()), placement
    return x.redistribute(mesh, [Replicate()]), _Parts(None, None, None, mesh.get_group()), Replicate()


class _Product(torch.autograd.Function):
    """What ``torchao.float8.float8_linear.matmul_with_hp_or_float8_args`` computes, of parts of its operands."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, config: Any, products: Any, parts: _Parts) -> Any:
        ctx.config, ctx.products, ctx.parts, ctx.shape = config, products, parts, x.shape
        rows = x.reshape(-1, x.shape[-1])
        ctx.save_for_backward(rows, weight)
        left = _cast(ctx, rows, "input", False, ("tokens", "inputs"), "inputs", parts.input)
        right = _cast(ctx, weight.t(), "weight", False, ("inputs", "outputs"), "inputs", parts.weight)
        return torch.mm(left, right).reshape(*x.shape[:-1], weight.shape[0])

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        rows, weight = ctx.saved_tensors
        parts: _Parts = ctx.parts
        gradient = gradient.reshape(-1, gradient.shape[-1])
        of_x = of_weight = None
        if ctx.needs_input_grad[0]:
            left = _cast(ctx, gradient, "grad_output", False, ("tokens", "outputs"), "outputs", parts.output)
            right = _cast(ctx, weight.t(), "weight", True, ("inputs", "outputs"), "outputs", parts.weight)
            of_x = torch.mm(left, right.t()).reshape(ctx.shape)
        if ctx.needs_input_grad[1]:
            left = _cast(ctx, gradient, "grad_output", True, ("tokens", "outputs"), "tokens", parts.output)
            right = _cast(ctx, rows, "input", True, ("tokens", "inputs"), "tokens", parts.input)
            of_weight = torch.mm(left.t(), right)
        return of_x, of_weight, None, None, None


_OTHER = {"input": "for_grad_weight", "weight": "for_grad_input", "grad_output": "for_grad_weight"}


def _cast(
    ctx: Any, matrix: torch.Tensor, name: str, other: bool, dims: tuple[Dim, Dim], summed: Dim, part: Dim | None
) -> Any:
    """Cast an operand by a scale of the whole matrix, or of each row or column along the summed dim.

    Args:
        ctx: of `_Product`.
        matrix: this rank's part; or one that was cast already.
        name: what the operand is.
        other: it is one of the second product that it is in.
        dims: of the matrix.
        summed: the dim that the product sums over.
        part: the dim that this rank has a part of.
    """
    tensors = importlib.import_module("torchao.float8.float8_training_tensor")
    if isinstance(matrix, tensors.Float8TrainingTensor):
        return matrix
    utils = importlib.import_module("torchao.float8.float8_utils")
    cast = getattr(ctx.config, f"cast_config_{name}_{_OTHER[name]}" if other else f"cast_config_{name}")
    if cast.scaling_type.name == "DISABLED":
        return matrix
    along = None if cast.scaling_granularity.name == "TENSORWISE" else (0, -1)[dims.index(summed)]
    if matrix.numel():
        amax = utils.tensor_to_amax(matrix, scaling_granularity=cast.scaling_granularity, axiswise_dim=along)
    else:
        amax = matrix.new_zeros(() if along is None else matrix.sum(along, keepdim=True).shape)
    if part is not None and (along is None or part == summed):
        amax = amax.contiguous()
        handle: Any = collectives.all_reduce(amax, op="max", group=ctx.parts.group, async_op=True)
        handle.wait()
    scale = utils.amax_to_scale(amax, cast.target_dtype, ctx.config.round_scales_to_power_of_2)
    role = tensors.GemmInputRole(name)
    return tensors.hp_tensor_and_scale_to_float8(matrix, scale, cast.target_dtype, ctx.products, role, along)
