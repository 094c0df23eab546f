"""The bits that modules compute in a step, and those that arrive of sharded weights, read while a step runs."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

from hp_dtensor.torch.extend import local_view
from hp_fsdp import hsdp_sync_stream
from hp_fsdp.torch.extend import watching_gathers
from hp_pipeline import PipelinedModel
from hp_plan.checks.sdc.voting import Computed, Order
from hp_plan.plan import ParallelPlan
from hp_plan.torch.training.monitor import (
    after_forward,
    chosen_modules,
    counting,
    first_tensor,
    stages_of,
    sum_of_bits,
)
from hp_plan.torch.training.parts import forwards
from hp_platform import get_platform
from hp_platform.extend import share_bytes
from hp_platform.torch.internals import in_backward, without_torch_function

_LAST = 2**31  # the loss comes after all forwards
_SHOWN = 4  # parts that have arrived otherwise than they were sent


class Replay:
    """What `[sdc] replay_every` reads of a step's computation on this rank.

    Read are the outputs of modules without others inside and of those with parameters of their own, the gradients that
    come to them, and each micro-batch's gradient of each parameter before any is added over ranks: a rank's own
    work. Where backward computes a block again, its outputs are read again.

    Args:
        plan: of the model.
        model: under the plan.

    Attributes:
        part: of the batch that is computed inside of `reading`; None is this rank's own.
    """

    def __init__(self, plan: ParallelPlan, model: Any) -> None:
        self._plan, self._model = plan, model
        self._micro: dict[int, int] = {}
        self._back: dict[int, int] = {}  # the micro-batch whose backward runs, by stage
        self._chosen: dict[int, dict[str, tuple[nn.Module, bool]]] = {}
        self._hooked: dict[int, Any] = {}
        self._on = False
        self.part: int | None = None
        self._begin()

    def _begin(self) -> None:
        self._back.clear()
        self._names: list[str] = []
        self._orders: list[Order] = []
        self._bits: list[torch.Tensor] = []
        self._calls: Counter[tuple[str, int]] = Counter()
        self._gathers: list[tuple[str, Any, torch.Tensor, torch.Tensor]] = []

    @contextlib.contextmanager
    def reading(self, part: int | None = None) -> Iterator[None]:
        """Read the computation of gradients inside.

        Args:
            part: of the batch, whose samples are computed; None is this rank's own.
        """
        self._on, self.part = True, part
        self._begin()
        try:
            yield
        finally:
            self._on, self.part = False, None

    @contextlib.contextmanager
    def watching(self) -> Iterator[Callable[[int], None] | None]:
        """Read what modules compute inside, if it is to be read; yield what is called before each micro-batch."""
        if not self._on:
            yield None
            return
        stages = stages_of(self._model)
        if not self._chosen:
            self._chosen = {index: chosen_modules(self._plan, each, owners=True) for index, each in stages.items()}
        with contextlib.ExitStack() as stack:
            stack.enter_context(watching_gathers(self._arrived))
            stack.callback(self._unhook)
            for index, stage in stages.items():
                order = forwards(self._model, index) if isinstance(self._model, PipelinedModel) else ()
                stack.enter_context(counting(stage, order, self._micro, index))
                for name, (module, _) in self._chosen[index].items():
                    for handle in after_forward(module, self._hook(name, module, index)):
                        stack.callback(handle.remove)
            yield lambda micro: self._micro.update(dict.fromkeys(stages, micro))
            hsdp_sync_stream()

    def _unhook(self) -> None:
        for handle in self._hooked.values():
            handle.remove()
        self._hooked.clear()

    def _hook(self, name: str, module: nn.Module, index: int) -> Callable[[Any], None]:
        compiled = module._compiled_call_impl is not None

        def see(output: Any) -> None:
            if not torch.is_grad_enabled():
                return
            micro, recomputed = self._micro[index], in_backward()
            if not recomputed:
                self._calls[name, micro] += 1
                self._watch_gradients(name, module, index, deep=compiled)
            call = self._calls[name, micro]
            called = name if call <= 1 else f"{name}#{call}"
            tensor = first_tensor(output)
            if tensor is None or tensor.is_meta:
                return
            if recomputed:
                self._read("recomputed", called, self._back.get(index, 0), index, tensor)
            else:
                self._read("forward", called, micro, index, tensor)
            if not tensor.requires_grad:
                return
            done: list[bool] = []

            def arrived(gradient: torch.Tensor) -> None:
                if not done:  # a backward in two halves passes twice
                    done.append(True)
                    self._back[index] = micro
                    self._read("backward", called, micro, index, gradient)

            tensor.register_hook(arrived)

        return see

    def _watch_gradients(self, name: str, module: nn.Module, index: int, *, deep: bool) -> None:
        """Read the gradients of the parameters that a module computes with, those of each micro-batch by itself."""
        for own, parameter in module.named_parameters(recurse=deep):
            if parameter.requires_grad and id(parameter) not in self._hooked:
                full = f"{name}.{own}"

                def arrived(gradient: torch.Tensor, full: str = full) -> None:
                    self._read("gradient", full, self._back.get(index, 0), index, gradient)

                with without_torch_function():  # else sharded modules take it for the reduced gradient's
                    self._hooked[id(parameter)] = torch.Tensor.register_hook(parameter, arrived)

    def _read(self, phase: str, name: str, micro: int, index: int, tensor: torch.Tensor) -> None:
        backward = phase != "forward"
        self._names.append(f"{phase} {name}")
        self._orders.append((int(backward), micro, -index if backward else index, len(self._names)))
        with torch.no_grad():
            self._bits.append(_bits(tensor))

    def _arrived(self, name: str, sent: torch.Tensor, arrived: torch.Tensor, group: Any) -> None:
        with torch.no_grad():
            parts = arrived.view(-1, sent.numel())
            self._gathers.append((name, group, _bits(sent), torch.stack([_bits(part) for part in parts])))

    def take(self, loss: torch.Tensor | None) -> Computed:
        """Return what was read; the ranks that share sharded weights call it together.

        Args:
            loss: this rank's, if it has one.
        """
        if loss is not None:
            self._names.append("forward loss")
            self._orders.append((0, _LAST, 0, len(self._names)))
            self._bits.append(_bits(loss.detach()))
        read = torch.stack(self._bits).cpu().numpy() if self._bits else np.empty(0, np.int64)
        computed = Computed(tuple(self._names), tuple(self._orders), read, self._wires())
        self._begin()
        return computed

    def _wires(self) -> tuple[tuple[str, int, int, int], ...]:
        """Compare what has arrived of each rank with what it says to have sent."""
        found: list[tuple[str, int, int, int]] = []
        for group in dict.fromkeys(group for _, group, *_ in self._gathers):
            own = [each for each in self._gathers if each[1] is group]
            sent = torch.stack([each[2] for each in own]).cpu().numpy()
            arrived = torch.stack([each[3] for each in own]).cpu().numpy()
            everyone = [np.frombuffer(each, np.int64) for each in share_bytes(sent.tobytes(), group)]
            ranks = get_platform().groups.get_process_group_ranks(group)
            for place, theirs in enumerate(everyone):
                for number in np.flatnonzero(theirs != arrived[:, place]).tolist():
                    found.append((own[number][0], ranks[place], int(theirs[number]), int(arrived[number, place])))
        return tuple(found[:_SHOWN])

    def copy_buffers(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Copy the buffers of the model, which a forward may change."""
        named = {id(each): each for stage in stages_of(self._model).values() for each in stage.buffers()}
        return [(own, own.clone()) for each in named.values() if (own := local_view(each)).numel() and not own.is_meta]

    def put_buffers(self, buffers: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Put the values back that `copy_buffers` has returned."""
        with torch.no_grad():
            for own, copied in buffers:
                own.copy_(copied)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return sum_of_bits(local_view(tensor).contiguous())
