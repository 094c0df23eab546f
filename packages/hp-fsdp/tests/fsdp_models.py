"""Models, data and the comparison with a single process that the tests of `fully_shard` share."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hp_dtensor import DeviceMesh, init_device_mesh
from hp_fsdp import full_state_dict, fully_shard
from hp_testing import device_type

ROWS = 24  # a multiple of 1, 2, 3, 4 and 8


class Block(nn.Module):
    """Sizes that no number of ranks divides."""

    def __init__(self, width: int = 7) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 11)
        self.down = nn.Linear(11, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """Blocks between a first and a last layer, which fall to the root's group."""

    def __init__(self, blocks: int = 3, width: int = 7) -> None:
        super().__init__()
        self.first = nn.Linear(5, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.last = nn.Linear(width, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


class Buffered(Net):
    """It has buffers, one of which is no part of its state, and a tied weight."""

    def __init__(self) -> None:
        super().__init__()
        self.bn = nn.BatchNorm1d(3)
        self.register_buffer("scratch", torch.ones(2), persistent=False)
        self.tied = nn.Linear(7, 3)
        self.tied.weight = self.last.weight


def data_mesh() -> DeviceMesh:
    """All ranks on one axis."""
    return init_device_mesh(device_type(), (dist.get_world_size(),), mesh_dim_names=("dp_shard",))


def seeded(make: Callable[[], nn.Module], dtype: torch.dtype = torch.float64) -> nn.Module:
    """A model with the same values on every rank."""
    torch.manual_seed(1)
    return make().to(device_type(), dtype)


def other_values(make: Callable[[], nn.Module] = Net) -> nn.Module:
    """A model with other values than `seeded`, the same on every rank."""
    torch.manual_seed(5)
    return make().to(device_type(), torch.float64)


def pair(make: Callable[[], nn.Module] = Net, **options: Any) -> tuple[nn.Module, nn.Module]:
    """A model and its sharded copy, a group for each block and one for the rest."""
    reference = seeded(make)
    model = copy.deepcopy(reference)
    mesh = options.pop("mesh", None) or data_mesh()
    for block in getattr(model, "blocks", ()):
        fully_shard(block, mesh, **options)
    return reference, fully_shard(model, mesh, **options)


def batch(step: int = 0, columns: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    """The whole batch of a step and this rank's rows of it."""
    generator = torch.Generator().manual_seed(100 + step)
    whole = torch.randn(ROWS, columns, generator=generator, dtype=torch.float64).to(device_type())
    return whole, rows(whole)


def rows(whole: torch.Tensor) -> torch.Tensor:
    """This rank's rows."""
    return whole.chunk(dist.get_world_size())[dist.get_rank()]


def loss_of(output: torch.Tensor) -> torch.Tensor:
    """A mean, so that the mean over ranks is that of the whole batch."""
    return (output - output.detach().roll(1, -1)).pow(2).mean() + output.sin().mean()


def close(a: torch.Tensor | None, b: torch.Tensor | None, what: str, limit: float = 1e-10) -> None:
    if a is None or b is None:
        assert a is None and b is None, f"{what}: {a} against {b}"
        return
    assert a.shape == b.shape, f"{what}: shape {tuple(a.shape)} against {tuple(b.shape)}"
    if not b.numel():
        return
    error = (a - b).abs().max().item()
    assert error <= limit * (1.0 + b.abs().max().item()), f"{what}: differs by {error}"


def same_gradients(model: nn.Module, reference: nn.Module, limit: float = 1e-10) -> None:
    """Each gradient, gathered, against the single process; None where that has None."""
    expected = dict(reference.named_parameters())
    for name, parameter in model.named_parameters():
        grad = parameter.grad
        if grad is not None:
            assert grad._spec is parameter._spec, name
            grad = grad.full_tensor()
        close(grad, expected[name].grad, f"gradient of {name}", limit)


def same_weights(model: nn.Module, reference: nn.Module, limit: float = 1e-10) -> None:
    """Each weight and buffer, gathered, against the single process."""
    expected = reference.state_dict()
    state = full_state_dict(model)
    assert list(state) == list(expected)
    for name, tensor in state.items():
        close(tensor, expected[name], name, limit)


def train(
    reference: nn.Module,
    model: nn.Module,
    *,
    steps: int = 3,
    run: Callable[[nn.Module, torch.Tensor], torch.Tensor] | None = None,
    make: Callable[[Any], torch.optim.Optimizer] | None = None,
    limit: float = 1e-10,
) -> None:
    """Trains both and compares gradients and weights after each step.

    Args:
        reference: sees the whole batch.
        model: sees this rank's rows.
        steps: number of optimizer steps.
        run: gives the loss of a model on a batch; default ``loss_of(model(x))``.
        make: makes an optimizer of parameters; default SGD with momentum.
        limit: largest relative difference.
    """
    run = run or (lambda net, x: loss_of(net(x)))
    make = make or (lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01))
    optimizers = [make(net.parameters()) for net in (reference, model)]
    for step in range(steps):
        whole, own = batch(step)
        run(reference, whole).backward()
        run(model, own).backward()
        same_gradients(model, reference, limit)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        same_weights(model, reference, limit)


def compared(model: nn.Module) -> None:
    """Runs forward once, which asks whether all ranks have the same groups: a collective of the first one only."""
    with torch.no_grad():
        model(batch()[1])


def groups_of(model: nn.Module) -> list[Any]:
    """The groups of a sharded model, the root's first."""
    return [module._hsdp_group for module in model.modules() if "_hsdp_group" in module.__dict__]
