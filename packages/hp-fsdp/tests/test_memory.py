"""Memory after a step is what it was after the step before: nothing grows, in no mode.

A soak of 1,000 steps is `benchmarks/soak_fsdp.py`.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from fsdp_models import Net, batch, groups_of, loss_of, seeded
from torch import nn
from torch.utils.checkpoint import checkpoint

from hp_dtensor import init_device_mesh
from hp_fsdp import CPUOffloadPolicy, clip_grad_norm_, fully_shard
from hp_testing import device_type, on_ranks

pytestmark = pytest.mark.device

STEPS, FROM, FEW = 16, 5, 5  # fewer than one object in two steps
PATIENCE = 5.0  # seconds for what is in use to come down
Step = Callable[[nn.Module, int], None]
Use = tuple[int, ...]
"""Bytes of all tensors, number of objects, bytes of each group's buffers."""


class CheckpointedNet(Net):
    """Its blocks run forward again in backward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)  # type: ignore[assignment]
        return self.last(x)


def one_pass(model: nn.Module, step: int) -> None:
    loss_of(model(batch(step)[1])).backward()


def three_passes(model: nn.Module, step: int) -> None:
    for number in range(3):
        model.set_requires_gradient_sync(number == 2)
        one_pass(model, 3 * step + number)


def shifting_passes(model: nn.Module, step: int) -> None:
    """Reductions over the replicas wait for the last pass."""
    for number in range(2):
        model.set_requires_all_reduce(number == 1)
        one_pass(model, 2 * step + number)


def failing_passes(model: nn.Module, step: int) -> None:
    """Now and then an error in forward or in backward, on all ranks, and then the step."""
    if step % 5 == 3:
        with raising_in(model.blocks[1].up, step % 2 == 0), contextlib.suppress(ArithmeticError):
            one_pass(model, step)
    one_pass(model, step)


@contextlib.contextmanager
def raising_in(module: nn.Module, backward: bool) -> Iterator[None]:
    def fail(*_: Any) -> None:
        raise ArithmeticError

    def watch(module: nn.Module, args: Any, output: torch.Tensor) -> None:
        if not backward:
            fail()
        output.register_hook(fail)

    handle = module.register_forward_hook(watch)
    try:
        yield
    finally:
        handle.remove()


MODES: dict[str, tuple[int, Callable[[], nn.Module], Step, dict[str, Any]]] = {
    "plain": (1, Net, one_pass, {}),
    "accumulation": (1, Net, three_passes, {}),
    "hsdp": (2, Net, one_pass, {}),
    "hsdp, accumulation over replicas": (2, Net, shifting_passes, {}),
    "deterministic": (1, Net, one_pass, {"deterministic": True}),
    "deterministic, accumulation": (2, Net, three_passes, {"deterministic": True}),
    "on the host": (1, Net, one_pass, {"offload_policy": CPUOffloadPolicy()}),
    "each parameter by itself": (1, Net, one_pass, {"comm_fusion": False}),
    "kept after forward": (1, Net, one_pass, {"reshard_after_forward": False}),
    "errors": (1, Net, failing_passes, {}),
    "errors, deterministic": (2, Net, failing_passes, {"deterministic": True}),
    "checkpointing": (1, CheckpointedNet, one_pass, {}),
}
COMBINED = (
    "plain",
    "hsdp, accumulation over replicas",
    "deterministic, accumulation",
    "on the host",
    "errors, deterministic",
    "checkpointing",
)
"""Modes that have the others in them."""


@on_ranks(2)
@pytest.mark.parametrize(
    "mode", [pytest.param(mode, marks=() if mode in COMBINED else pytest.mark.thorough) for mode in MODES]
)
def test_memory_returns_to_the_same_value(mode: str, ranks: int):
    replicas, make, step, options = MODES[mode]
    check(replicas, ranks, make, step, options)


@on_ranks(4)
def test_with_smaller_groups_between_forward_and_backward(ranks: int):
    check(1, ranks, Net, one_pass, {"reshard_after_forward": 2})


def check(
    replicas: int,
    ranks: int,
    make: Callable[[], nn.Module],
    step: Step,
    options: dict[str, Any],
    patience: float = PATIENCE,
) -> None:
    torch.optim.AdamW([torch.zeros(1)])  # the first one imports 100,000 objects
    gc.collect()
    gc.freeze()  # what was there before is not looked at, here and in later tests
    first: Use = ()
    for number, use in enumerate(trained(replicas, ranks, make, step, options, patience), FROM):
        first = first or use
        assert not more(use, first), f"after step {FROM}: {shown(first)}, but after step {number}: {shown(use)}"


def trained(
    replicas: int, ranks: int, make: Callable[[], nn.Module], step: Step, options: dict[str, Any], patience: float
) -> Iterator[Use]:
    """What is in use after each step from FROM on."""
    names = ("replicate", "shard")[replicas == 1 :]
    mesh = init_device_mesh(device_type(), (replicas, ranks // replicas)[replicas == 1 :], mesh_dim_names=names)
    model = seeded(make)
    for block in model.blocks:
        fully_shard(block, mesh, **options)
    fully_shard(model, mesh, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    last: Use = ()
    for number in range(STEPS):
        step(model, number)
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if number >= FROM - 2:
            last = settled(model, last, patience)
        if number >= FROM:
            yield last


def settled(model: nn.Module, before: Use, patience: float) -> Use:
    """What is in use; gloo's threads let go of a collective's tensors a moment after it is over, on a busy host later.

    Args:
        model: whose buffers to look at.
        before: wait until no more is in use than this; where there is none to compare with, wait a moment.
        patience: seconds to wait at most.
    """
    gc.collect()
    if not before:
        time.sleep(0.05)
        in_use(model)  # the first look creates what it looks at: the modules' dictionaries, the tensors' storages
    found = in_use(model)
    deadline = time.monotonic() + patience
    while before and more(found, before) and time.monotonic() < deadline:
        time.sleep(0.005)
        found = ()  # or it would be counted
        found = in_use(model)
    return found


def in_use(model: nn.Module) -> Use:
    """Numbers alone, which are not counted as objects themselves."""
    objects = gc.get_objects()
    tensors = [each for each in objects if issubclass(type(each), torch.Tensor)]
    return (bytes_of(tensors), len(objects), *buffers(model))


def more(use: Use, before: Use) -> bool:
    """Whether bytes have grown at all, or objects by more than the interpreter's own few in a whole run of steps."""
    (now, objects, *own), (then, objects_then, *own_then) = use, before
    return now > then or any(a > b for a, b in zip(own, own_then, strict=True)) or objects > objects_then + FEW


def shown(use: Use) -> str:
    return f"{use[0]} bytes of tensors, {use[1]} objects, buffers of {use[2:]}"


def bytes_of(tensors: list[torch.Tensor]) -> int:
    """Of their storages, each once."""
    with torch._C.DisableTorchFunctionSubclass():
        storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


def buffers(model: nn.Module) -> tuple[int, ...]:
    """Bytes of each group's tensors: shards, and what is gathered or collected."""
    holders = [each for group in groups_of(model) for bucket in group.buckets for each in (bucket, bucket.gradients)]
    return tuple(bytes_of([v for v in vars(each).values() if isinstance(v, torch.Tensor)]) for each in holders)


@on_ranks(2)
def test_that_it_would_be_seen(ranks: int):
    kept: list[torch.Tensor] = []

    def leaking(model: nn.Module, step: int) -> None:
        one_pass(model, step)
        if step == STEPS // 2:
            kept.append(torch.ones(1000, dtype=torch.float64))

    with pytest.raises(AssertionError, match=r"after step 5: \d+ bytes .*, but after step 8: \d+ bytes"):
        check(1, ranks, Net, leaking, {}, patience=2.0)
    first = functools.reduce(lambda total, tensor: total + tensor.numel(), kept, 0)
    assert first == 1000
