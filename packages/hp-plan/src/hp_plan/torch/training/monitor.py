"""Readings of a torch model: hooks on modules in the steps that are read, and numbers that no step waits for."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.utils.hooks import RemovableHandle

from hp_dtensor import DTensor
from hp_dtensor.torch.extend import local_view
from hp_fsdp import hsdp_sync_stream
from hp_fsdp.extend import counts_here
from hp_pipeline import PipelinedModel
from hp_pipeline.torch.extend import is_stand_in
from hp_plan.checks.monitor.readings import ALONE, COUNTED, PHASES, RECORD
from hp_plan.plan import ParallelPlan
from hp_plan.structure.outline import matches
from hp_plan.torch.models import base
from hp_plan.torch.training.parts import forwards
from hp_platform import get_platform
from hp_platform.torch.internals import in_backward
from hp_styles.extend import runs_on_parts

_NORM, _LOW, _HIGH, _FILLED, _BITS = range(5)
_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Pending:
    """Readings on their way to the host: no work that comes after them is waited for.

    Args:
        places: of each: phase, name, micro-batch, flags and number of elements.
        numbers: what was read of each, tensors of no dims by the number of the reading and the column.
    """

    def __init__(
        self, places: list[tuple[str, str, int, int, int]], numbers: Mapping[tuple[int, int], torch.Tensor]
    ) -> None:
        self._places = places
        groups: dict[tuple[torch.device, torch.dtype], list[tuple[int, int]]] = {}
        for key, number in numbers.items():
            groups.setdefault((number.device, number.dtype), []).append(key)
        self._values: list[tuple[list[tuple[int, int]], torch.Tensor]] = []
        self._done: Any = None
        for (device, _), keys in groups.items():
            row = torch.stack([numbers[key] for key in keys])
            row = row if row.dtype is torch.int64 else row.double()
            if device.type == "cpu":
                self._values.append((keys, row))
                continue
            host = torch.empty(row.shape, dtype=row.dtype, pin_memory=True)
            self._values.append((keys, host.copy_(row, non_blocking=True)))
            self._done = get_platform().devices.device_module().Event()
        if self._done is not None:
            self._done.record()

    def records(self, step: int, number: Callable[[str], int]) -> NDArray[Any]:
        """Wait for the numbers; return them as an array of `RECORD`.

        Args:
            step: which it was.
            number: returns the number of a name.
        """
        if self._done is not None:
            self._done.synchronize()
        floats, integers = np.full((len(self._places), 3), np.nan), np.zeros((len(self._places), 2), np.int64)
        integers[:, 0] = -1
        for keys, values in self._values:
            rows, columns = np.array(keys).T
            if values.dtype is torch.int64:
                integers[rows, columns - _FILLED] = values.numpy()
            else:
                floats[rows, columns] = values.numpy()
        records = np.zeros(len(self._places), RECORD)
        sizes = np.array([place[4] for place in self._places], np.int64)
        records["step"], records["bits"] = step, integers[:, 1]
        records["name"] = [number(name) for _, name, *_ in self._places]
        records["phase"] = [PHASES.index(phase) for phase, *_ in self._places]
        records["micro"] = [place[2] for place in self._places]
        records["flags"] = [place[3] for place in self._places]
        records["norm"], records["low"], records["high"] = floats.T
        records["zeros"] = np.where(integers[:, 0] < 0, np.nan, 1.0 - integers[:, 0] / np.maximum(sizes, 1))
        empty = sizes == 0
        for column, value in {"norm": 0.0, "low": np.inf, "high": -np.inf, "zeros": 0.0}.items():
            records[column][empty] = value
        return records


class Capture:
    """What `[monitor]` reads of a model on this rank.

    Args:
        plan: of the model.
        model: under the plan.
    """

    def __init__(self, plan: ParallelPlan, model: Any) -> None:
        self._plan, self._model, self._section = plan, model, plan.monitor
        self._place = plan.mesh.coordinate(get_platform().groups.rank())
        self._reads = False
        self._micro: dict[int, int] = {}
        self._chosen: dict[int, dict[str, tuple[nn.Module, bool]]] = {}
        self._begin()

    def _begin(self) -> None:
        self._places: list[tuple[str, str, int, int, int]] = []
        self._numbers: dict[tuple[int, int], torch.Tensor] = {}
        self._calls: Counter[tuple[str, int]] = Counter()

    def begin(self, step: int) -> None:
        """Begin a step, which is read if `[monitor] every` says so."""
        self._reads = (step - 1) % self._section.every == 0
        self._begin()

    def layout(self) -> dict[str, Any]:
        """Describe what decides which part of a tensor a rank has, and how it is computed."""
        plan = self._plan
        parts = plan.mesh.data_parallel * plan.mesh.cp  # ranks whose losses have the step's as their mean
        return {
            "mesh": plan.mesh.axes,
            "ranks": plan.mesh.world_size,
            "losses": parts,
            "averaged": 1 if plan.run.deterministic else parts,
            "micro_batches": plan.run.accumulate if plan.mesh.pp == 1 else plan.pipeline.micro_batches,
            "batch_size": plan.data.batch_size,
            "deterministic": plan.run.deterministic,
            "dtypes": sorted({plan.run.dtype, plan.fsdp.param_dtype or plan.run.dtype}),
            "stage": self._place.get("pp", 0),
            "numbers": sorted(self._section.numbers),
            "framework": "torch",
        }

    @contextlib.contextmanager
    def watching(self) -> Iterator[Callable[[int], None] | None]:
        """Read what modules compute inside; yield what is called with the number of each micro-batch."""
        if not self._reads or not {"forward", "backward"} & set(self._section.phases):
            yield None
            return
        stages = stages_of(self._model)
        if not self._chosen:  # now hooks, compilers and adapters are in place
            self._chosen = {
                index: chosen_modules(self._plan, stage, self._section.names) for index, stage in stages.items()
            }
        with contextlib.ExitStack() as stack:
            for index, stage in stages.items():
                order = forwards(self._model, index) if isinstance(self._model, PipelinedModel) else ()
                stack.enter_context(counting(stage, order, self._micro, index))
                for name, (module, on_parts) in self._chosen[index].items():
                    for handle in after_forward(module, self._hook(name, on_parts, index)):
                        stack.callback(handle.remove)
            yield lambda micro: self._micro.update(dict.fromkeys(stages, micro))

    def _hook(self, name: str, on_parts: bool, index: int) -> Callable[[Any], None]:
        def see(output: Any) -> None:
            tensor = first_tensor(output)
            if tensor is None or not tensor.is_floating_point() or tensor.is_meta or not torch.is_grad_enabled():
                return
            micro, recomputed = self._micro[index], in_backward()
            if not recomputed:  # what is computed again in backward was read
                self._calls[name, micro] += 1
            call = self._calls[name, micro]
            called = name if call <= 1 else f"{name}#{call}"
            flags = self._flags(tensor, on_parts)
            if "forward" in self._section.phases and not recomputed:
                self._read("forward", called, micro, tensor, flags)
            if "backward" not in self._section.phases or not tensor.requires_grad:
                return
            done: list[bool] = []

            def arrived(gradient: torch.Tensor) -> None:
                if not done:  # a backward in two halves passes twice
                    done.append(True)
                    self._read("backward", called, micro, gradient, self._flags(gradient, on_parts, gradient=True))

            tensor.register_hook(arrived)

        return see

    def _flags(self, tensor: torch.Tensor, on_parts: bool, *, gradient: bool = False) -> int:
        """Return whether this rank's part of an activation is its own, one of copies, or neither.

        What needs no gradient may be the same for all samples, as positions are.
        """
        if not tensor.requires_grad and not gradient:
            return ALONE
        if isinstance(tensor, DTensor):
            if any(placement.is_partial() for placement in tensor.placements):
                return ALONE
            names, places = tensor.device_mesh.mesh_dim_names or (), tensor.device_mesh.get_coordinate() or ()
            copies = [
                place for place, each in zip(places, tensor.placements, strict=True) if each.is_replicate() and place
            ]
            return 0 if copies or ("tp" not in names and self._place.get("tp", 0)) else COUNTED
        if on_parts:
            return ALONE
        return 0 if self._place.get("tp", 0) else COUNTED

    def gradients(self) -> None:
        """Read the gradients, before they are clipped."""
        if self._reads and "gradient" in self._section.phases:
            hsdp_sync_stream()
            self._tensors("gradient", {name: each.grad for name, each in self._parameters().items()})

    def updated(self, optimizer: Any) -> None:
        """Read weights and the optimizer's states after its step."""
        if not self._reads:
            return
        parameters = self._parameters()
        if "weight" in self._section.phases:
            self._tensors("weight", parameters)
        if "moment" in self._section.phases:
            for name, parameter in parameters.items():
                states = optimizer.state.get(parameter, {})
                own = {f"{name}/{key}": state for key, state in states.items() if _is_moment(state, parameter)}
                self._tensors("moment", own, like=parameter)

    def take(self, loss: torch.Tensor | None) -> Pending | None:
        """Return the readings of the step; None of one that is not read.

        Args:
            loss: this rank's, if it has one.
        """
        if not self._reads:
            return None
        if loss is not None and "loss" in self._section.phases:
            self._read("loss", "", 0, loss.detach(), 0 if self._place.get("tp", 0) else COUNTED)
        pending = Pending(self._places, self._numbers)
        self._begin()
        return pending

    def _parameters(self) -> dict[str, torch.Tensor]:
        model = self._model if isinstance(self._model, PipelinedModel) else base(self._model)
        named = dict(model.named_parameters())
        chosen = self._section.names
        return {
            name: each
            for name, each in named.items()
            if each.requires_grad and (not chosen or any(holds(pattern, name) for pattern in chosen))
        }

    def _tensors(self, phase: str, tensors: Mapping[str, torch.Tensor | None], like: Any = None) -> None:
        if not hasattr(self, "_counted"):
            every = list(self._model.parameters())
            copies = self._model.schedule.copies() if isinstance(self._model, PipelinedModel) else ()
            self._counted = dict(zip(map(id, every), counts_here(every), strict=True))
            self._counted |= dict.fromkeys(map(id, copies), False)  # tied weights, which another stage counts
            self._by_name = {name: self._counted[id(each)] for name, each in self._parameters().items()}
        own = {name: local_view(tensor) for name, tensor in tensors.items() if tensor is not None}
        norms = dict[str, torch.Tensor]()
        if "norm" in self._section.numbers and (filled := {name: each for name, each in own.items() if each.numel()}):
            dtype = torch.float32 if any(each.element_size() < 4 for each in filled.values()) else None
            norms = dict(zip(filled, torch._foreach_norm(list(filled.values()), dtype=dtype), strict=True))
        for name, tensor in own.items():
            counted = self._counted[id(like)] if like is not None else self._by_name[name]
            self._read(phase, name, 0, tensor, COUNTED if counted else 0, norm=norms.get(name))

    def _read(self, phase: str, name: str, micro: int, tensor: torch.Tensor, flags: int, *, norm: Any = None) -> None:
        wanted = self._section.numbers if phase != "loss" else ("norm", "range", "zeros")
        with torch.no_grad():
            own = local_view(tensor)
            size, row = own.numel(), len(self._places)
            self._places.append((phase, name, micro, flags, size))
            if not size:
                return
            numbers = self._numbers
            if "norm" in wanted:
                dtype = torch.float32 if own.element_size() < 4 else None
                numbers[row, _NORM] = torch.linalg.vector_norm(own, dtype=dtype) if norm is None else norm
            if "range" in wanted:
                numbers[row, _LOW], numbers[row, _HIGH] = torch.aminmax(own)
            if "zeros" in wanted:
                numbers[row, _FILLED] = torch.count_nonzero(own)
            if "bits" in wanted:
                numbers[row, _BITS] = sum_of_bits(own.contiguous())


def sum_of_bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the sum of a tensor's bits as integers, modulo 2**64, which depends on no order of rows.

    Matrices are added in words of eight bytes; so are their shards by rows, whose sums are those of the whole.

    Args:
        tensor: plain and contiguous.
    """
    wide = tensor.ndim > 1 and tensor.shape[-1] * tensor.element_size() % 8 == 0
    words = tensor.view(torch.int64 if wide else _WORDS[tensor.element_size()])
    return words.sum(dtype=torch.int64)


def chosen_modules(
    plan: ParallelPlan, stage: nn.Module, patterns: Sequence[str] = (), *, owners: bool = False
) -> dict[str, tuple[nn.Module, bool]]:
    """Return the modules of a stage that are read, and whether each computes on local parts without a layout.

    They are those named, else all without others inside. Of what is compiled the outermost module is read, and nothing
    of what stands for other stages.

    Args:
        plan: of the model.
        stage: or the whole model.
        patterns: of names; none chooses those without others inside.
        owners: with them, those that have parameters of their own.
    """
    modules = dict(base(stage).named_modules())
    compiled = [name for name in modules if any(matches(each, name) for each in plan.compile.blocks)]
    inside = tuple(f"{name}." for name in compiled)
    chosen = {}
    for name, module in modules.items():
        named = any(matches(pattern, name) for pattern in patterns)
        leaf = next(module.children(), None) is None or name in compiled
        leaf = leaf or (owners and next(module.parameters(recurse=False), None) is not None)
        if (named if patterns else leaf) and name and not name.startswith(inside):
            chosen[name] = module
    parts = [name for name, module in modules.items() if runs_on_parts(module)]
    own = {name: any(name == each or name.startswith(f"{each}.") for each in parts) for name in chosen}
    return {name: (module, own[name]) for name, module in chosen.items() if not is_stand_in(module)}


def _is_moment(state: Any, parameter: torch.Tensor) -> bool:
    return isinstance(state, torch.Tensor) and state.is_floating_point() and state.shape == parameter.shape


def holds(pattern: str, name: str) -> bool:
    """Return True if a pattern matches a parameter or a module around it.

    >>> holds("layers.*", "layers.0.norm.weight"), holds("norm", "layers.0.norm.weight")
    (True, False)
    """
    parts = name.split(".")
    return any(matches(pattern, ".".join(parts[:end])) for end in range(1, len(parts) + 1))


def stages_of(model: Any) -> dict[int, nn.Module]:
    """Return the modules on this rank that a step calls, by stage; a whole model is stage 0."""
    return dict(model.stages) if isinstance(model, PipelinedModel) else {0: model}


@contextlib.contextmanager
def counting(stage: nn.Module, order: tuple[int, ...], micro: dict[int, int], index: int) -> Iterator[None]:
    """Keep the number of the micro-batch that a stage runs.

    Args:
        stage: the module.
        order: of the micro-batches of a step; empty where the number is told.
        micro: where it is kept.
        index: under this key.
    """
    micro[index], begun = 0, [0]

    def count(*_: Any) -> None:
        if not in_backward():
            micro[index] = order[begun[0] % len(order)]
            begun[0] += 1

    handle = stage.register_forward_pre_hook(count, prepend=True) if order else None
    try:
        yield
    finally:
        if handle is not None:
            handle.remove()


class _Unwrap:
    """Gives a compiled module back what it was called by."""

    def __init__(self, module: Any, inner: Any) -> None:
        self._module, self._inner = module, inner

    def remove(self) -> None:
        self._module._compiled_call_impl = self._inner


def after_forward(module: Any, see: Callable[[Any], None]) -> list[RemovableHandle | _Unwrap]:
    """Call `see` with what a module returns, outside of its graph where it is compiled.

    It comes before other hooks, such as that of a parallel style, which adds the terms of ranks: the rank that has
    another term is known here.
    """
    inner = module._compiled_call_impl
    if inner is None:
        return [module.register_forward_hook(lambda _, __, output: see(output), prepend=True)]

    def call(*args: Any, **kwargs: Any) -> Any:
        output = inner(*args, **kwargs)
        see(output)
        return output

    module._compiled_call_impl = call
    return [_Unwrap(module, inner)]


def first_tensor(output: Any) -> torch.Tensor | None:
    """Return the first tensor of what a module returns: a tensor, a sequence, a mapping or a model's output."""
    if isinstance(output, torch.Tensor):
        return output
    values = output.values() if isinstance(output, Mapping) else output if isinstance(output, (tuple, list)) else ()
    return next((tensor for each in values if (tensor := first_tensor(each)) is not None), None)
