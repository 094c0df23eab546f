"""Runs with a planted fault: a bit that flips on one rank, in what it computes, keeps or receives."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from small_runs import run

from hp_dtensor.torch.extend import local_view
from hp_fsdp.torch.groups import bucket
from hp_plan import CorruptionError
from hp_platform import get_platform
from hyper_parallel.supervision.run_end import DivergedError
from hyper_parallel.torch.trainer import Trainer

WORDS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Fault:
    """A flipped bit.

    Attributes:
        kind: "forward" or "backward" of a module; "gradient" of a parameter's own product; "wire": what has arrived of
            a gather; "reduced": a gradient before the update; "weight" or a state such as "exp_avg" after it.
        step: in which.
        rank: on which.
        name: of the module or the parameter; of a wire, how many gathers of the computation come before it.
        bit: of the element.
        element: which, modulo their number.
        computations: of the step's computations, in their order, those that it hits: 1 is the step's own, in a step
            that is replayed; None is each of them, from this step on.
    """

    kind: str
    step: int
    rank: int
    name: str
    bit: int = 50
    element: int = 3
    computations: tuple[int, ...] | None = (1,)


def flip(tensor: torch.Tensor, fault: Fault) -> None:
    words = local_view(tensor).detach().view(-1).view(WORDS[tensor.element_size()])
    at, bits = fault.element % len(words), 8 * tensor.element_size()
    bit = fault.bit % bits
    words[at] ^= 1 << bit if bit < bits - 1 else -(1 << bit)


def flipped(tensor: torch.Tensor, fault: Fault) -> torch.Tensor:
    copy = tensor.clone(memory_format=torch.contiguous_format)
    flip(copy, fault)
    return copy


@contextmanager
def planted(fault: Fault | None) -> Iterator[None]:
    """Let a fault come up in the run inside."""
    if fault is None:
        yield
        return
    state = {"step": 1, "computation": 0, "gathers": 0, "inside": False}
    here = fault.rank == get_platform().groups.rank()
    backward, update, all_gather = Trainer._backward, Trainer.update, bucket.collectives.all_gather

    def strikes() -> bool:
        if not here or state["step"] < fault.step:
            return False
        return fault.computations is None or (
            state["step"] == fault.step and state["computation"] in fault.computations
        )

    def computed(self: Any, *args: Any) -> Any:
        state["gathers"] = 0
        try:
            if fault.kind not in ("forward", "backward", "gradient"):
                return backward(self, *args)
            with ExitStack() as stack:
                if here:  # on all computations, so that each has the same graph
                    stack.enter_context(spoiled(self.model, fault, strikes))
                return backward(self, *args)
        finally:
            state["computation"] += 1

    def updated(self: Any) -> None:
        if here and fault.kind == "reduced" and state["step"] == fault.step:
            flip(parameter_of(self.model, fault.name).grad, fault)
        update(self)
        if here and state["step"] == fault.step:
            parameter = parameter_of(self.model, fault.name)
            if fault.kind == "weight":
                flip(parameter, fault)
            elif fault.kind.startswith("exp_avg"):
                flip(self.optimizer.state[parameter][fault.kind], fault)
        state.update(step=state["step"] + 1, computation=0)

    def gathered(output: Any, piece: Any, **options: Any) -> Any:
        handle = all_gather(output, piece, **options)
        state["gathers"] += 1
        if fault.kind != "wire" or not strikes() or state["gathers"] != int(fault.name) + 1:
            return handle
        if handle is not None:
            handle.wait()
        other = (options["group"].rank() + 1) % options["group"].size()
        flip(output.view(-1)[other * piece.numel() : (other + 1) * piece.numel()], fault)
        return None

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(Trainer, "_backward", computed))
        stack.enter_context(mock.patch.object(Trainer, "update", updated))
        stack.enter_context(mock.patch.object(bucket.collectives, "all_gather", gathered))
        yield


def parameter_of(model: Any, name: str) -> Any:
    return dict(model.named_parameters()).get(name)


@contextmanager
def spoiled(model: Any, fault: Fault, strikes: Any) -> Iterator[None]:
    """Patch the module that a fault is in, if this rank has it."""
    stages = getattr(model, "stages", {0: model})
    modules = {name: module for stage in stages.values() for name, module in stage.named_modules()}
    name = fault.name.rpartition(".")[0] if fault.kind == "gradient" else fault.name
    module = modules.get(name)
    if module is None:
        yield
        return
    forward = module.forward

    def run(*args: Any, **kwargs: Any) -> Any:
        output = forward(*args, **kwargs)
        if not torch.is_grad_enabled():
            return output
        if fault.kind == "forward":
            return flipped(output, fault) if strikes() else output.clone()
        if fault.kind == "backward":
            changed = output.clone()
            changed.register_hook(lambda gradient: flipped(gradient, fault) if strikes() else None)
            return changed
        parameter = module._parameters[fault.name.rpartition(".")[2]]
        with torch._C.DisableTorchFunctionSubclass():
            handles.append(
                torch.Tensor.register_hook(parameter, lambda gradient: flipped(gradient, fault) if strikes() else None)
            )
        return output

    handles: list[Any] = []
    with mock.patch.object(module, "forward", run):
        yield
    for handle in handles:
        handle.remove()


def run_corrupted(
    folder: Any, mesh: Any, faults: Any, sdc: Any, steps: int = 3, model: Any = None, *, first: int = 0, **changed: Any
) -> None:
    """Train once with each fault in a folder of its own, numbered from `first`; write what a run ends with."""
    for number, fault in enumerate(faults, first):
        own = folder / str(number)
        own.mkdir(exist_ok=True)
        with planted(fault):
            try:
                run(own, mesh, steps, model, changed={"sdc": sdc, **changed})
            except (CorruptionError, DivergedError) as error:  # a reported flip may leave no finite loss
                (own / f"error-{get_platform().groups.rank()}").write_text(str(error))


def random_faults(kinds: tuple[str, ...], names: Any, ranks: int, count: int, *, seed: int, bits: int) -> list[Fault]:
    """Draw faults: names by kind."""
    drawn = random.Random(seed)
    return [
        Fault(
            kind := kinds[number % len(kinds)],
            2 + drawn.randrange(2),
            drawn.randrange(ranks),
            drawn.choice(names[kind]),
            drawn.randrange(bits),
            drawn.randrange(10**6),
        )
        for number in range(count)
    ]
