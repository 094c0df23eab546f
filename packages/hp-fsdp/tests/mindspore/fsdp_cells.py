"""Cells, data and the comparison with a single process that the tests of `fully_shard` on MindSpore share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mindspore
import mindspore.mint.nn.functional as F
import numpy as np
from mindspore import Parameter, Tensor, mint, nn, ops

from hp_dtensor import DeviceMesh, DTensor, SkipDTensorDispatch, init_device_mesh, parallelize_value_and_grad
from hp_dtensor.mindspore.dtensor import local_view
from hp_fsdp import full_state_dict, fully_shard
from hp_platform import get_platform
from hp_testing import device_type

ROWS = 24  # a multiple of 1, 2, 3 and 4


class Block(nn.Cell):
    """Sizes that no number of ranks divides."""

    def __init__(self, width: int = 7) -> None:
        super().__init__()
        self.up = mint.nn.Linear(width, 11)
        self.down = mint.nn.Linear(11, width, bias=False)

    def construct(self, x):
        return x + self.down(F.silu(self.up(x)))


class Net(nn.Cell):
    """Blocks between a first and a last layer, which fall to the root's group."""

    def __init__(self, blocks: int = 3, width: int = 7) -> None:
        super().__init__()
        self.first = mint.nn.Linear(5, width)
        self.blocks = nn.CellList([Block(width) for _ in range(blocks)])
        self.last = mint.nn.Linear(width, 3)

    def construct(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def world() -> tuple[int, int]:
    groups = get_platform().groups
    return groups.rank(), groups.size()


def data_mesh() -> DeviceMesh:
    """All ranks on one axis."""
    return init_device_mesh(device_type(), (world()[1],), mesh_dim_names=("dp_shard",))


def seeded(make: Callable[[], nn.Cell]) -> nn.Cell:
    """A Cell with the same values on every rank."""
    cell = make()
    random = np.random.RandomState(1)
    for parameter in cell.get_parameters():
        values = random.randn(*parameter.shape) * 0.4
        parameter.set_data(Tensor(values.astype(mindspore.dtype_to_nptype(parameter.dtype))))
    return cell


def double(make: Callable[[], nn.Cell]) -> Callable[[], nn.Cell]:
    """Makes Cells as ``make`` does, with parameters in float64."""

    def made() -> nn.Cell:
        cell, replaced = make(), {}
        for _, each in cell.cells_and_names():
            for name, parameter in each._params.items():
                if id(parameter) not in replaced:
                    zeros = Tensor(np.zeros(parameter.shape))
                    replaced[id(parameter)] = Parameter(zeros, parameter.name, parameter.requires_grad)
                each._params[name] = replaced[id(parameter)]
        return cell

    return made


def pair(make: Callable[[], nn.Cell] = Net, **options: Any) -> tuple[nn.Cell, Any]:
    """A Cell and its sharded twin, a group for each block and one for the rest."""
    reference, model = seeded(make), seeded(make)
    mesh = options.pop("mesh", None) or data_mesh()
    for block in getattr(model, "blocks", ()):
        fully_shard(block, mesh, **options)
    return reference, fully_shard(model, mesh, **options)


def batch(step: int = 0, columns: int = 5, dtype: Any = np.float32) -> tuple[Tensor, Tensor]:
    """The whole batch of a step and this rank's rows of it."""
    whole = np.random.RandomState(100 + step).randn(ROWS, columns).astype(dtype)
    rank, ranks = world()
    return Tensor(whole), Tensor(np.split(whole, ranks)[rank])


def loss_of(output: Any) -> Any:
    """A mean, so that the mean over ranks is that of the whole batch."""
    return (output * output).mean() + mint.sin(output).mean()


def differentiated(cell: nn.Cell, run: Callable[..., Any] | None = None, *, dtensors: bool = True) -> Any:
    """``step(x) -> (loss, gradients)`` by the Cell's trainable parameters."""
    parameters = cell.trainable_params()
    run = run or (lambda x: loss_of(cell(x)))
    if dtensors:
        return parallelize_value_and_grad(run, None, parameters)
    return mindspore.value_and_grad(run, None, parameters)


def whole(tensor: Any) -> np.ndarray:
    return tensor.full_tensor().asnumpy() if isinstance(tensor, DTensor) else tensor.asnumpy()


def close(a: Any, b: Any, what: str, limit: float = 1e-5) -> None:
    a, b = np.asarray(a), np.asarray(b)
    assert a.shape == b.shape, f"{what}: shape {a.shape} against {b.shape}"
    if b.size:
        error = np.abs(a - b).max()
        assert error <= limit * (1.0 + np.abs(b).max()), f"{what}: differs by {error}"


def same_gradients(model: nn.Cell, gradients: Any, reference: nn.Cell, expected: Any, limit: float = 1e-5) -> None:
    """Each gradient, gathered, against the single process."""
    names = [parameter.name for parameter in model.trainable_params()]
    assert names == [parameter.name for parameter in reference.trainable_params()]
    assert len(names) == len(gradients) == len(expected)
    for name, parameter, gradient, other in zip(names, model.trainable_params(), gradients, expected):
        if isinstance(parameter, DTensor):
            assert isinstance(gradient, DTensor) and gradient._spec is parameter._spec, name
        close(whole(gradient), other.asnumpy(), f"gradient of {name}", limit)


def same_weights(model: nn.Cell, reference: nn.Cell, limit: float = 1e-5) -> None:
    """Each weight, gathered, against the single process."""
    expected, state = reference.state_dict(), full_state_dict(model)
    assert list(state) == list(expected)
    for name, tensor in state.items():
        close(tensor.asnumpy(), expected[name].asnumpy(), name, limit)


def sgd(cell: nn.Cell, lr: float = 0.02) -> Callable[[Any], None]:
    """Plain gradient descent, on local parts."""

    def step(gradients: Any) -> None:
        with SkipDTensorDispatch():
            for parameter, gradient in zip(cell.trainable_params(), gradients):
                if 0 not in parameter.shape:
                    ops.assign(parameter, local_view(parameter) - lr * local_view(gradient))

    return step


def train(
    reference: nn.Cell,
    model: nn.Cell,
    *,
    steps: int = 3,
    run: Callable[..., Any] | None = None,
    make: Any = sgd,
    limit: float | None = None,
) -> None:
    """Trains both and compares losses' gradients and weights after each step, in float64 to 1e-12."""
    dtype = mindspore.dtype_to_nptype(reference.trainable_params()[0].dtype)
    limit = limit or (1e-12 if dtype is np.float64 else 1e-5)
    run = run or (lambda cell, x: loss_of(cell(x)))
    one, many = (
        differentiated(reference, lambda x: run(reference, x), dtensors=False),
        differentiated(model, lambda x: run(model, x)),
    )
    updates = [make(reference), make(model)]
    for step in range(steps):
        all_rows, own = batch(step, dtype=dtype)
        _, expected = one(all_rows)
        _, gradients = many(own)
        same_gradients(model, gradients, reference, expected, limit)
        updates[0](expected)
        updates[1](gradients)
        same_weights(model, reference, limit)


def groups_of(model: Any) -> list[Any]:
    """The groups of a sharded Cell, the root's first."""
    return list(model._groups(True))


def gathered(model: Any) -> list[int]:
    """Bytes of gathered parameters, by group."""
    return [sum(bucket.gathered_bytes for bucket in group.buckets) for group in groups_of(model)]
