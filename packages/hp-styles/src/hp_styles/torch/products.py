"""Products of a Linear other than its own: of gathered operands, and with a collective of its sequence under them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F

from hp_dtensor import DeviceMesh, DTensor, Placement, Shard
from hp_dtensor.extend import TensorSpec, normalize
from hp_dtensor.torch.extend import execute
from hp_onesided import choose, gathered_linear, scattered_linear
from hp_styles.port import Gathered
from hp_styles.torch.regions import around

Kind = Literal["kernel", "chunks", "plain"]
Operation = Literal["gather", "scatter"]


class _Specs(NamedTuple):
    """The layouts that the product's operands and results have, and those that they are computed in."""

    x: TensorSpec
    gathered_x: TensorSpec
    weight: TensorSpec
    gathered_weight: TensorSpec
    partial_y: TensorSpec
    y: TensorSpec
    gathered_y: TensorSpec
    partial_x: TensorSpec
    partial_weight: TensorSpec


class _Product(torch.autograd.Function):
    """``F.linear`` on local tensors, of which a rank keeps its own parts for backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, specs: _Specs) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.specs = specs
        y = F.linear(execute(x, specs.x, specs.gathered_x), _whole(weight, specs))
        return execute(y, specs.partial_y, specs.y)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "ThreeDimensionalParallel: a backward that records a graph (create_graph=True) goes through it,"
                " which has no second derivative; TwoDimensionalParallel has one"
            )
        specs: _Specs = ctx.specs
        x, weight = ctx.saved_tensors
        of_x, of_weight, _ = ctx.needs_input_grad
        grad = execute(grad.contiguous(), specs.y, specs.gathered_y)
        if of_x:
            of_x = execute(grad @ _whole(weight, specs), specs.partial_x, specs.x)
        if of_weight:
            whole = execute(x, specs.x, specs.gathered_x)
            product = grad.flatten(0, -2).T @ whole.flatten(0, -2)
            of_weight = execute(product.unsqueeze(0), specs.partial_weight, specs.weight).squeeze(0)
        return of_x if of_x is not False else None, of_weight if of_weight is not False else None, None


def _whole(weight: torch.Tensor, specs: _Specs) -> torch.Tensor:
    return execute(weight.unsqueeze(0), specs.weight, specs.gathered_weight).squeeze(0)


def run_gathered(module: torch.nn.Linear, mesh: DeviceMesh, layouts: Gathered) -> None:
    """Run the module's product as the layouts say, instead of its forward; see `hp_styles.port.Gathered`.

    Raises:
        NotImplementedError: it is an adapter, or its class has a forward of its own.
    """
    _check_forward(module, "a style that gathers weights", "give it TwoDimensionalParallel, which runs it")

    def forward(module: Any, original: Callable[..., Any], x: DTensor) -> torch.Tensor:
        weight: DTensor = module.weight
        rows = weight.shape[0] // layouts.blocks
        specs = _specs(mesh, layouts, tuple(x.shape), (layouts.blocks, rows, weight.shape[1]))
        local, part = x.to_local(), weight.to_local()
        y = DTensor.from_local(
            _Product.apply(*_cast(local, part), specs), mesh, layouts.outputs[1], shape=specs.y.shape
        )
        if module.bias is None:
            return y
        bias = module.bias.unflatten(0, (layouts.blocks, rows)).redistribute(mesh, layouts.bias).flatten()
        return y + bias.to(y.dtype)

    around(module, lambda module, original, args, kwargs: forward(module, original, *args, *kwargs.values()))


def run_overlapped(
    module: torch.nn.Linear, mesh: DeviceMesh, op: Operation, dim: int
) -> Callable[[torch.Tensor], bool]:
    """Run a linear layer with a collective under its product; see `hp_styles.port.Modules.run_overlapped`.

    Raises:
        NotImplementedError: it is an adapter, or its class has a forward of its own.
    """
    _check_forward(module, 'async_tensor_parallel="auto"', 'leave it out, or give it "off"')
    group, ranks = mesh.get_group(), mesh.size()

    def kind(x: torch.Tensor) -> Kind:
        """Choose for an input that is sharded along the sequence, or along the features."""
        along, parts = dim % x.dim(), 1 if isinstance(x, DTensor) else ranks
        local = x.to_local() if isinstance(x, DTensor) else x
        if torch.compiler.is_compiling() or x.shape[along] * parts % ranks or along == x.dim() - 1:
            return "plain"
        if isinstance(x, DTensor) and x.placements != ((Shard(along),) if op == "gather" else (Shard(x.dim() - 1),)):
            return "plain"
        weight: Any = module.weight
        out, into = weight.to_local().shape
        rows = local.numel() // max(local.shape[-1], 1) * (ranks if op == "gather" else 1)
        (local,) = _cast(local[:0])
        return choose(local.device, (rows, into, out), local.dtype, group, op=op)[0]

    def forward(module: Any, original: Callable[..., Any], x: DTensor) -> torch.Tensor:
        chosen = kind(x)
        if chosen == "plain":
            return original(x)
        local, weight = _cast(x.to_local(), module.weight.to_local())
        shape, options = (*x.shape[:-1], module.weight.shape[0]), {"group": group, "dim": dim, "kind": chosen}
        if op == "gather":
            bias = None if module.bias is None else _cast(module.bias.to_local())[0]
            y = gathered_linear(local, weight, bias, **options)
            return DTensor.from_local(y, mesh, [Shard(len(shape) - 1)], shape=shape)
        y = DTensor.from_local(scattered_linear(local, weight, **options), mesh, [Shard(dim % len(shape))], shape=shape)
        return y if module.bias is None else y + module.bias.to(y.dtype)

    around(module, lambda module, original, args, kwargs: forward(module, original, *args, *kwargs.values()))
    return lambda x: kind(x) != "plain"


def _check_forward(module: torch.nn.Module, what: str, advice: str) -> None:
    if type(module).forward is not torch.nn.Linear.forward:
        raise NotImplementedError(
            f"the product of {type(module).__name__} is not that of torch.nn.Linear: it has a forward of its own, which"
            f" {what} would leave out; {advice}"
        )


def _cast(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Convert tensors as autocast would."""
    kind = tensors[0].device.type
    if not torch.is_autocast_enabled(kind):
        return tensors
    return tuple(tensor.to(torch.get_autocast_dtype(kind)) for tensor in tensors)


def _specs(mesh: DeviceMesh, layouts: Gathered, x: tuple[int, ...], weight: tuple[int, ...]) -> _Specs:
    if len(x) < 2:
        raise ValueError(f"ThreeDimensionalParallel: an input of two dims or more is needed, got shape {list(x)}")

    def spec(placements: tuple[Placement, ...], shape: tuple[int, ...]) -> TensorSpec:
        return TensorSpec.of(mesh, normalize(placements, mesh, len(shape), "parallel style"), shape)

    y = (*x[:-1], weight[0] * weight[1])
    return _Specs(
        x=spec(layouts.inputs[0], x),
        gathered_x=spec(layouts.inputs[1], x),
        weight=spec(layouts.weights[0], weight),
        gathered_weight=spec(layouts.weights[1], weight),
        partial_y=spec(layouts.outputs[0], y),
        y=spec(layouts.outputs[1], y),
        gathered_y=spec(layouts.output_gradient, y),
        partial_x=spec(layouts.input_gradient, x),
        partial_weight=spec(layouts.weight_gradient, weight),
    )
