"""A step run once more with hooks on all modules, to find where its first NaN or infinity was born."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from hp_dtensor.torch.extend import local_view
from hp_fsdp import hsdp_sync_stream
from hp_pipeline import PipelinedModel
from hp_pipeline.torch.extend import is_stand_in
from hp_plan.checks.monitor.origin import PHASES, Origin
from hp_plan.plan import ParallelPlan
from hp_plan.structure.outline import matches
from hp_plan.torch.models import base
from hp_plan.torch.training.monitor import after_forward, counting, stages_of
from hp_plan.torch.training.parts import forwards
from hp_platform import get_platform
from hp_platform.extend import list_leaves, map_nested
from hp_platform.torch.internals import in_backward


class Hunt:
    """The first NaN or infinity of a step that is run again.

    Modules get copies of their inputs, so that the gradient that each of them makes for an input is seen by itself.

    Args:
        plan: of the model.
        model: under the plan, with the weights that the step had.
    """

    def __init__(self, plan: ParallelPlan, model: Any) -> None:
        self._plan, self._model = plan, model
        self._rank = get_platform().groups.rank()
        self._micro: dict[int, int] = {}
        self._found: dict[str, Origin] = {}
        self._order = 0

    @contextlib.contextmanager
    def hooked(self) -> Iterator[Callable[[int], None]]:
        """Look at what modules compute inside; yield what is called with the number of each micro-batch."""
        self._parameters("weight", lambda parameter: parameter)
        stages = stages_of(self._model)
        with contextlib.ExitStack() as stack:
            for index, stage in stages.items():
                order = forwards(self._model, index) if isinstance(self._model, PipelinedModel) else ()
                stack.enter_context(counting(stage, order, self._micro, index))
                for name, module in base(stage).named_modules():
                    if is_stand_in(module):
                        continue
                    compiled = self._compiled(name)
                    if compiled == name != "":  # its graph takes no hooks
                        handles: list[Any] = after_forward(module, self._after(name, index))
                    elif compiled is None:
                        before = module.register_forward_pre_hook(self._before(name, index), with_kwargs=True)
                        handles = [before, *after_forward(module, self._after(name, index))]
                    else:
                        continue
                    for handle in handles:
                        stack.callback(handle.remove)
            yield lambda micro: self._micro.update(dict.fromkeys(stages, micro))
        hsdp_sync_stream()
        self._parameters("gradient", lambda parameter: parameter.grad)

    def _compiled(self, name: str) -> str | None:
        """Return the name of the compiled module that a module is, or is inside of."""
        parts = name.split(".")
        outer = (".".join(parts[:end]) for end in range(1, len(parts) + 1))
        return next((each for each in outer if any(matches(block, each) for block in self._plan.compile.blocks)), None)

    @property
    def origin(self) -> Origin | None:
        """The first of this rank; None where all was finite."""
        return next((self._found[phase] for phase in PHASES if phase in self._found), None)

    def _before(self, name: str, index: int) -> Any:
        def copy(value: Any) -> Any:
            if not isinstance(value, torch.Tensor) or not value.is_floating_point() or not value.requires_grad:
                return value
            if not in_backward():
                self._note("forward", name, index, value, made=False)
            copied = value.clone()  # in a recomputation, too, which has to take the same path
            if in_backward():
                return copied
            copied.register_hook(self._arriving(name, index, made=True))
            return copied

        def run(module: nn.Module, args: Any, kwargs: Any) -> Any:
            return map_nested(copy, args), {key: map_nested(copy, value) for key, value in kwargs.items()}

        return run

    def _after(self, name: str, index: int) -> Callable[[Any], None]:
        def see(output: Any) -> None:
            if in_backward():
                return
            self._order += 1
            for tensor in list_leaves(output):
                if not isinstance(tensor, torch.Tensor) or not tensor.is_floating_point():
                    continue
                self._note("forward", name, index, tensor, made=True)
                if tensor.requires_grad:
                    tensor.register_hook(self._arriving(name, index, made=False))

        return see

    def _arriving(self, name: str, index: int, *, made: bool) -> Callable[[torch.Tensor], None]:
        micro = self._micro[index]
        return lambda gradient: self._note("backward", name, index, gradient, made=made, micro=micro)

    def _parameters(self, phase: str, read: Callable[[torch.Tensor], torch.Tensor | None]) -> None:
        for name, parameter in base(self._model).named_parameters() if isinstance(self._model, nn.Module) else ():
            tensor = read(parameter)
            if tensor is not None:
                self._note(phase, name, -1, tensor, made=True)

    def _note(
        self, phase: str, name: str, index: int, tensor: torch.Tensor, *, made: bool, micro: int | None = None
    ) -> None:
        """Keep the first tensor of a phase that is not finite."""
        if phase == "backward":
            self._order += 1
        if phase in self._found or tensor.is_meta or (phase == "forward" and not torch.is_grad_enabled()):
            return
        own = local_view(tensor)
        wrong = ~torch.isfinite(own)
        if not bool(wrong.any()):
            return
        element = tuple(wrong.nonzero()[0].tolist())
        row = own[element[:-1]] if element else own.reshape(1)
        at = element[-1] if element else 0
        beside = [row[place].item() for place in range(max(0, at - 2), min(len(row), at + 3)) if place != at]
        number = self._micro.get(index, 0) if micro is None else micro
        order = (number, -index if phase == "backward" else index, self._order)
        value = float(row[at])
        self._found[phase] = Origin(phase, name, self._rank, number, element, value, tuple(beside), made, order=order)
