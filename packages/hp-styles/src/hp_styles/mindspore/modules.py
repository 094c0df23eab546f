"""Distribution of a MindSpore Cell's parameters. Inputs and outputs are in `hp_styles.inputs`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any, Literal, NoReturn

from mindspore import Tensor, mint, nn

from hp_dtensor import DeviceMesh, Placement, Replicate
from hp_dtensor.extend import normalize
from hp_dtensor.mindspore.extend import DTensor, distribute_parameter, distribute_tensor
from hp_dtensor.mindspore.extend import named_modules as named_modules
from hp_dtensor.mindspore.extend import named_parameters as named_parameters
from hp_dtensor.mindspore.extend import redistribute as redistribute
from hp_dtensor.mindspore.extend import redistribute_shared as redistribute_shared
from hp_styles.inputs import begin_call, end_call
from hp_styles.port import Gathered


def kind(module: nn.Cell) -> Literal["linear", "embedding", "other"]:
    """``"linear"``, ``"embedding"`` or ``"other"``.

    An ``nn.Dense`` with an activation, or a Cell whose weight is not ``[out, in]``, is "other". A Cell of another class
    says what it is by an attribute ``parallel_kind``.
    """
    if isinstance(module, mint.nn.Linear) or (isinstance(module, nn.Dense) and module.activation is None):
        return "linear"
    if isinstance(module, (mint.nn.Embedding, nn.Embedding)):
        return "embedding"
    return getattr(module, "parallel_kind", "other")


def input_features(module: nn.Cell) -> int | None:
    return module.weight.shape[1] if kind(module) == "linear" else None


def output_features(module: nn.Cell) -> int:
    return module.weight.shape[0]


def sized_dim(module: nn.Cell) -> tuple[int, int] | None:
    """Return the dim of the input whose size a convolution's, a norm's or a linear layer's weight has, and that size.

    Of a Cell of several it is the first one's; None where that tells nothing.
    """
    first = next((cell for _, cell in named_modules(module).items() if cell._params), module)
    for names, dim in (("in_channels", 1), ("num_features", 1), ("num_channels", 1)):
        size = getattr(first, names, None)
        if isinstance(size, int) and kind(first) != "linear":
            return dim, size
    if isinstance(first, (nn.LayerNorm, mint.nn.LayerNorm)):
        return -1, first.normalized_shape[-1]
    features = input_features(first)
    return None if features is None else (-1, features)


def described(module: nn.Cell) -> str:
    """Describe a Cell for an error, with the reason why it is "other"."""
    if isinstance(module, nn.Dense) and module.activation is not None:
        return f"Dense with an activation ({type(module.activation).__name__}); make that a Cell of its own after it"
    return f"{type(module).__name__}; a Cell that is one says so by an attribute parallel_kind"


def partition(
    module: nn.Cell, mesh: DeviceMesh, layouts: Mapping[str, tuple[Placement, ...]], src_data_rank: int | None
) -> None:
    """Distribute the Cell's own parameters by name, one placement per axis; replicate the others.

    Raises:
        ValueError: a parameter is a DTensor of other placements already (two styles on one Cell, or weights tied to a
            Cell styled otherwise).
    """
    layouts = {**layouts, "embedding_table": layouts["weight"]} if "weight" in layouts else layouts
    for name, parameter in module._params.items():
        if parameter is None:
            continue
        placements = layouts.get(name, (Replicate(),) * mesh.ndim)
        if isinstance(parameter, DTensor):
            target = normalize(placements, mesh, parameter.ndim, "parallelize_module")
            if parameter.device_mesh == mesh and parameter.placements == target:
                continue
            raise ValueError(
                f"{type(module).__name__}.{name} of shape {tuple(parameter.shape)} is placed {parameter.placements} on"
                f" {parameter.device_mesh} already, this style wants {target}: two styles on one Cell, or on two Cells"
                " that share the parameter"
            )
        distribute_parameter(parameter, mesh, placements, src_data_rank=src_data_rank)


def replicate(module: nn.Cell, mesh: DeviceMesh, src_data_rank: int | None) -> None:
    """Replicate the parameters and buffers of the Cell and of all Cells inside it."""
    for _, child in named_modules(module).items():
        partition(child, mesh, {}, src_data_rank)
        for name, buffer in child._buffers.items():
            if buffer is not None and not isinstance(buffer, DTensor):
                replicated = [Replicate()] * mesh.ndim
                child._buffers[name] = distribute_tensor(buffer, mesh, replicated, src_data_rank=src_data_rank)


def replicate_statistics(module: nn.Cell, mesh: DeviceMesh, src_data_rank: int | None) -> None:
    """Do nothing: a batch norm's statistics are parameters."""


def around_calls(module: nn.Cell) -> None:
    """Register, once, hooks that begin and end a call of a Cell that styles are applied to or inside.

    No hook runs after an error inside; a call that begins ends the one that is open.
    """
    if not getattr(module, "_around_calls", False):
        module._around_calls = True
        module.register_forward_pre_hook(_begin)
        module.register_forward_hook(_end)


def _begin(module: nn.Cell, args: Any) -> None:
    begin_call(module, anew=True)


def _end(module: nn.Cell, args: Any, output: Any) -> None:
    end_call(module)


def refuse_foreign(x: Tensor, what: str) -> None:
    """Do nothing: there is no other DTensor on MindSpore."""


def runs_again() -> bool:
    """Return False: what MindSpore's recompute runs again compares again, on all ranks."""
    return False


@contextlib.contextmanager
def sharded_loss(*, z_loss: float) -> Iterator[None]:
    """See ``hp_styles.loss_parallel``: ``ops.cross_entropy`` of sharded classes gathers nothing inside and outside.

    Raises:
        NotImplementedError: a z-loss.
    """
    if z_loss:
        raise NotImplementedError(
            f"loss_parallel(z_loss={z_loss}) is for PyTorch: on MindSpore add it to the loss, z_loss *"
            " (ops.logsumexp(logits, 1) ** 2).mean()"
        )
    yield


def place(module: nn.Cell, name: str, mesh: DeviceMesh, placement: Placement, src_data_rank: int | None) -> None:
    """Distribute one of the Cell's own Parameters."""
    distribute_parameter(module._params[name], mesh, (placement,), src_data_rank=src_data_rank)


def _refuse_region(module: nn.Cell, *mesh: DeviceMesh) -> NoReturn:
    """Refuse: this is for PyTorch only.

    Raises:
        NotImplementedError: always.
    """
    raise NotImplementedError(
        f"experts and plain regions are styles for PyTorch, got the Cell {type(module).__name__}; write its construct"
        " with operations of DTensors, and shard its Parameters by keys that name them"
    )


def run_gathered(module: nn.Cell, mesh: DeviceMesh, layouts: Gathered) -> NoReturn:
    """Refuse: this is for PyTorch only.

    Raises:
        NotImplementedError: always.
    """
    raise NotImplementedError(
        f"ThreeDimensionalParallel is for PyTorch, got the Cell {type(module).__name__}; TwoDimensionalParallel shards"
        " it over two axes, or over three with a depth"
    )


def run_overlapped(module: nn.Cell, mesh: DeviceMesh, op: str, dim: int) -> NoReturn:
    """Refuse: this is for PyTorch only.

    Raises:
        NotImplementedError: always.
    """
    raise NotImplementedError(
        f'async_tensor_parallel="auto" is for PyTorch, got the Cell {type(module).__name__}; leave it out'
    )


run_replicated = run_experts = run_pointwise = divide_inside = _refuse_region
