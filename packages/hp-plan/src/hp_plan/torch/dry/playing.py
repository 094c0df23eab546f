"""One rank's training steps on tensors without memory, read by a ledger."""

from __future__ import annotations

import dataclasses
import gc
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from hp_moe.extend import Counts, balanced, forced_routes
from hp_offload import SwapManager
from hp_plan.application import apply
from hp_plan.plan import ParallelPlan, data_parallel_rows
from hp_plan.structure.model_source import vocabulary
from hp_plan.torch.build import build_model, build_objective, build_optimizer
from hp_plan.torch.dry.ledger import Ledger
from hp_plan.torch.sequences.context_guard import unguarded
from hp_plan.torch.training.loss import backward_loss
from hp_plan.torch.training.parts import clip_gradients
from hp_platform import get_platform
from hp_platform.extend import observers, uncollected
from hp_platform.torch.dry import Peers, dry_world

T = torch.Tensor
_MOST = 3  # steps: the first makes what stays, and the order that it learns shows in the second


class Reader(Protocol):
    """What reads a step: it is entered for the step, and told of its phases."""

    def __enter__(self) -> Any: ...

    def __exit__(self, *error: Any) -> Any: ...

    def begin(self, phase: str) -> None:
        """Begin a phase, "forward" or "optimizer"."""
        ...


class _Nobody:
    """Reads nothing."""

    def __enter__(self) -> None: ...

    def __exit__(self, *error: object) -> None: ...

    def begin(self, phase: str) -> None: ...


class Training:
    """A plan's model and optimizer on this rank, and its steps.

    Args:
        plan: the plan.
        device: of the model; meta in a dry world.
        build: makes this rank's part of a plan's model; None is `apply` of `build_model`.

    Attributes:
        tokens: this rank's samples, zeros.
    """

    def __init__(
        self, plan: ParallelPlan, device: torch.device, build: Callable[[ParallelPlan], Any] | None = None
    ) -> None:
        self.plan = plan

        def whole(each: ParallelPlan) -> Any:
            each = dataclasses.replace(each, run=dataclasses.replace(each.run, generation="plain"))  # no probes here
            return apply(build_model(each, device=device), each)

        build = whole if build is None else build
        self.model = build(plan)
        self.objective = build_objective(plan, build)
        self.optimizer = build_optimizer(plan, self.model.named_parameters())
        rows = data_parallel_rows(plan)
        length = plan.data.sequence_length
        self.tokens = torch.zeros(rows.stop - rows.start, length, dtype=torch.int64, device=device)

    def draw_tokens(self) -> None:
        """Draw the samples, alike on all ranks that share them."""
        count = vocabulary(self.plan.model) or _embedded(self.model)
        numbers = torch.Generator().manual_seed(0)
        self.tokens.copy_(torch.randint(count, self.tokens.shape, generator=numbers))

    def step(self, reader: Reader | None = None) -> None:
        """Take a training step, as a trainer does.

        Args:
            reader: reads it; None is nobody.
        """
        reader = _Nobody() if reader is None else reader
        with reader:
            reader.begin("forward")
            self.optimizer.zero_grad()
            loss = backward_loss(self.plan, self.model, self.tokens, objective=self.objective)
            norm = clip_gradients(self.model, self.plan.run.grad_clip)
            reader.begin("optimizer")
            self.optimizer.step()
            del loss, norm


def _embedded(model: Any) -> int:
    """Return the size of the first embedding; 1 of a model without, or a stage."""
    found = (module for module in model.modules() if isinstance(module, torch.nn.Embedding))
    return next((module.num_embeddings for module in found), 1)


class Played(Training):
    """A plan's training on this rank, and what a ledger reads of its steps.

    Args:
        plan: the plan.
        ledger: reads the steps.
        device: of the model; meta in a dry world.
        build: makes this rank's part of a plan's model; None is `apply` of `build_model`.

    Attributes:
        collectives: kind, bytes and global ranks of each collective of the last step.
    """

    def __init__(
        self,
        plan: ParallelPlan,
        ledger: Ledger,
        device: torch.device,
        build: Callable[[ParallelPlan], Any] | None = None,
    ) -> None:
        self.ledger = ledger
        with ledger.knowing_host():
            super().__init__(plan, device, build)
        self.collectives: Counter[tuple[str, int, tuple[int, ...]]] = Counter()
        ledger.know([*self.model.parameters(), *self.model.buffers()])

    def step(self, reader: Reader | None = None) -> None:
        """Take a training step, as a trainer does.

        Args:
            reader: reads it; None is the ledger.
        """
        self.collectives.clear()
        observers.append(self._observe)
        try:
            super().step(self.ledger if reader is None else reader)
        finally:
            observers.remove(self._observe)

    def _observe(self, kind: str, size: int, group: Any) -> None:
        self.collectives[kind, size, tuple(get_platform().groups.get_process_group_ranks(group))] += 1

    def weights(self) -> set[int]:
        """Return the numbers of the storages of parameters and buffers."""
        return self._numbers([*self.model.parameters(), *self.model.buffers()])

    def gradients(self) -> set[int]:
        """Return the numbers of the storages of the gradients that there are."""
        return self._numbers([each.grad for each in self.model.parameters() if each.grad is not None])

    def states(self) -> set[int]:
        """Return the numbers of the storages of the optimizer's states."""
        return self._states_of(self.model.parameters())

    def _states_of(self, parameters: Iterable[T]) -> set[int]:
        optimizers = getattr(self.optimizer, "optimizers", {"": self.optimizer}).values()
        found = [each.state[parameter] for parameter in parameters for each in optimizers if parameter in each.state]
        return self._numbers([each for state in found for each in state.values() if isinstance(each, T)])

    def on_host(self) -> set[int]:
        """Return the numbers of storages of the host: those allocated there, and all that belongs to such weights."""
        known = {number for number, held in enumerate(self.ledger.storages) if held.on_host}
        weights = [each for each in self.model.parameters() if self.ledger.number_of(each) in known]
        own = [each.grad for each in weights if each.grad is not None]
        return known | self._numbers(own) | self._states_of(weights)

    def _numbers(self, tensors: list[T]) -> set[int]:
        return {number for each in tensors if (number := self.ledger.number_of(each)) is not None}


@contextmanager
def without_collector() -> Iterator[None]:
    """Keep Python's collector from running, whose moments would decide when memory is let go."""
    gc.collect()
    with uncollected():
        yield


@contextmanager
def own_host_memory() -> Iterator[None]:
    """Let no run have the buffers that another swapped to."""
    manager = SwapManager()
    manager.release_host_memory()
    try:
        yield
    finally:
        manager.release_host_memory()


@contextmanager
def dry(
    plan: ParallelPlan,
    rank: int,
    *,
    steps: int | None = None,
    peers: Peers | None = None,
    routes: Counts = balanced,
    kind: str | None = None,
    **read: bool,
) -> Iterator[Played]:
    """Play a rank's first steps without memory.

    Args:
        plan: the plan; its mesh says how many ranks there are.
        rank: the one to play.
        steps: how many steps. None is until one ends with the bytes with which it began, on all stages: the second, but
            for programs that are still changing then, which get a third.
        peers: what other ranks say; None is the same as this one.
        routes: how many tokens each expert gets.
        kind: of the device that is played, as `dry_world` takes it.
        read: what the ledger reads beside storages: `kernels`, `modules`.
    """
    world = dry_world(plan.mesh.world_size, rank, peers=peers, kind=kind)
    with world, without_collector(), forced_routes(routes), unguarded(), own_host_memory():
        ledger = Ledger(("meta", "cpu"), **read)
        played = Played(plan, ledger, torch.device("meta"))
        for number in range(_MOST if steps is None else steps):
            played.step()
            if number == 0:
                gc.collect()  # modules that the first step imports, as of torch's compiler, keep its frames
            elif steps is None and _all_recur(plan, rank, ledger, peers):
                break
        yield played


def _all_recur(plan: ParallelPlan, rank: int, ledger: Ledger, peers: Peers | None) -> bool:
    """Tell whether the last step has left as many bytes as there were, in this rank and those of the other stages."""
    recurs = bytes([ledger.recurs])
    across = plan.mesh.world_size // plan.mesh.pp
    told = [recurs] if peers is None else peers.gather(recurs, range(rank % across, plan.mesh.world_size, across))
    return all(map(any, told))
