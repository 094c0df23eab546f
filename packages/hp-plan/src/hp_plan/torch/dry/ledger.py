"""Every tensor's memory over a program, operation by operation, of tensors with memory or without.

Note [The ledger]
A dispatch mode sees each operator's results, and keeps a weak reference to each storage: what is freed is noted when
Python lets go of it, on the meta device as on a real one. `UntypedStorage.resize_` is followed as well, by which fully
sharded parameters are gathered and let go. So the same ledger reads a dry run and a real one, and the two can be
compared to the byte; an allocator's rounding and the workspaces of kernels are in neither. Of the host's memory it sees
what `empty_on_host` allocates.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from hp_dtensor.torch.extend import Modules
from hp_plan.torch.dry.compat import calling_line, running_module
from hp_plan.torch.dry.flops import flops_of
from hp_plan.torch.dry.likeness import Results
from hp_platform.torch.devices import host_observers
from hp_platform.torch.dry import value_observers
from hp_platform.torch.internals import in_backward, without_torch_function

T = torch.Tensor
_VALUE = torch.ops.aten._local_scalar_dense.default
_COPIES = (torch.ops.aten.copy_.default, torch.ops.aten._foreach_copy_.default)


@dataclass(slots=True)
class Held:
    """A storage: what made it, and where.

    Attributes:
        operator: that returned it first; "" of tensors that were there before.
        shape: of the first tensor in it.
        module: that was running, by name; "" outside of modules.
        phase: "forward", "backward", "optimizer" or "before".
        resized: it was resized, as a gathered buffer is.
        on_host: it is the host's memory, from which a device copies.
    """

    operator: str
    shape: tuple[int, ...]
    module: str
    phase: str
    resized: bool = False
    on_host: bool = False


@dataclass(slots=True)
class Step:
    """What a ledger has read since it began anew.

    Attributes:
        changes: (operation, storage, bytes) in order; a storage's bytes are negative where it goes.
        start: live bytes at its begin, by storage.
        operations: their number.
        flops: of products and attention.
        kernels: how often each distinct call was made, by `kernel_key`; empty unless asked for.
        phases: the operation at which each phase begins, by name.
    """

    changes: list[tuple[int, int, int]] = field(default_factory=list)
    start: dict[int, int] = field(default_factory=dict)
    operations: int = 0
    flops: int = 0
    kernels: Counter[str] = field(default_factory=Counter)
    phases: dict[str, int] = field(default_factory=dict)


class Ledger(TorchDispatchMode):
    """Reads the memory of what runs inside: Note [The ledger].

    Args:
        devices: kinds of device whose tensors count, such as ("cpu",).
        kernels: count distinct calls too, which takes longer.
        modules: find the running module of each storage, which takes longer.

    Attributes:
        step: what was read since `begin`.
        storages: each storage that was seen, by its number.
        assumed: values that the program read from tensors without values, by place.
    """

    def __init__(self, devices: Iterable[str], *, kernels: bool = False, modules: bool = False) -> None:
        super().__init__()
        self.devices = frozenset(devices)
        self.step = Step()
        self.storages: list[Held] = []
        self.assumed: Counter[tuple[str, str]] = Counter()
        self.phase = "before"
        self._sizes: dict[int, int] = {}
        self._numbers: dict[int, int] = {}
        self._refs: dict[int, Any] = {}
        self._results = Results()
        self._count_kernels = kernels
        self._modules = Modules() if modules else None

    def __enter__(self) -> Any:
        """Begin to read."""
        host_observers.append(self._know_on_host)
        value_observers.append(self._assume)
        self._resize = torch.UntypedStorage.resize_
        torch.UntypedStorage.resize_ = self._resized()
        if self._modules is not None:
            self._modules.start()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        """End."""
        super().__exit__(*error)
        host_observers.remove(self._know_on_host)
        value_observers.remove(self._assume)
        torch.UntypedStorage.resize_ = self._resize
        if self._modules is not None:
            self._modules.stop()

    @property
    def live(self) -> int:
        """Bytes of all storages now."""
        return sum(self._sizes.values())

    @property
    def recurs(self) -> bool:
        """The sizes of all storages are those with which the step began."""
        return Counter(filter(None, self._sizes.values())) == Counter(filter(None, self.step.start.values()))

    def begin(self, phase: str) -> None:
        """Begin a phase of a step; the phase "forward" begins a step anew."""
        if phase == "forward":
            self.step = Step(start={self._numbers[key]: size for key, size in self._sizes.items()})
        self.phase = phase
        self.step.phases[phase] = self.step.operations

    def know(self, tensors: Iterable[T]) -> None:
        """Count tensors that were there before."""
        with without_torch_function():
            for tensor in tensors:
                self._meet(tensor, "")

    @contextmanager
    def knowing_host(self) -> Iterator[None]:
        """Count the host's memory that is allocated while inside, and nothing else."""
        host_observers.append(self._know_on_host)
        try:
            yield
        finally:
            host_observers.remove(self._know_on_host)

    def _know_on_host(self, memory: T) -> None:
        with without_torch_function():
            self._meet(memory, "empty")
            self.storages[self._numbers[memory.untyped_storage()._cdata]].on_host = True

    def number_of(self, tensor: T) -> int | None:
        """Return the number of a tensor's storage, None of one that was not seen."""
        with without_torch_function():
            return self._numbers.get(tensor.untyped_storage()._cdata)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        """Run an operator and read its results."""
        named = dict(kwargs or {})
        self.step.operations += 1
        with without_torch_function():
            if func is _VALUE and args[0].is_meta:
                return self._assumed_value(args[0].dtype)
            if "meta" in self.devices:
                moved = self._on_one_device(func, args, named)
                if moved is None:
                    return args[0] if func is _COPIES[0] else None
                args, named = moved
                out = self._results.call(func, args, named)
            else:
                out = func(*args, **named)
            for each in (out,) if isinstance(out, T) else out if isinstance(out, (tuple, list)) else ():
                if isinstance(each, T) and each.device.type in self.devices:
                    self._meet(each, func._schema.name)
            self.step.flops += flops_of(func, args, named, out)
            if self._count_kernels and not getattr(func, "is_view", False) and func.namespace != "profiler":
                self.step.kernels[kernel_key(func, args, named)] += 1
        return out

    # ---- storages ----
    def _meet(self, tensor: T, operator: str) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        before = self._sizes.get(key)
        size = storage.nbytes()
        if before is not None:
            if size != before:
                self._change(key, size - before)
            return
        phase, module = self.phase, ""
        if phase == "forward" and in_backward():
            phase = "backward"
        if self._modules is not None and operator:
            module = running_module(self._modules)
        self._numbers[key] = len(self.storages)
        self.storages.append(Held(operator.removeprefix("aten::"), tuple(tensor.shape), module, phase))
        self._sizes[key] = 0
        self._change(key, size)
        self._refs[key] = weakref.ref(storage, lambda _, key=key: self._let_go(key))

    def _change(self, key: int, by: int) -> None:
        self._sizes[key] += by
        self.step.changes.append((self.step.operations, self._numbers[key], by))

    def _let_go(self, key: int) -> None:
        size, number = self._sizes.pop(key), self._numbers.pop(key)
        self._refs.pop(key)
        self.step.changes.append((self.step.operations, number, -size))

    def _resized(self) -> Any:
        ledger, original = self, self._resize

        def resize_(storage: torch.UntypedStorage, size: int) -> Any:
            result, key = original(storage, size), storage._cdata
            if key in ledger._sizes:
                ledger.storages[ledger._numbers[key]].resized = True
                ledger._change(key, size - ledger._sizes[key])
            return result

        return resize_

    # ---- values that are not there ----
    def _assumed_value(self, dtype: torch.dtype) -> Any:
        self._assume("a number is 1, a condition True")
        return True if dtype is torch.bool else 1.0 if dtype.is_floating_point else 1

    def _assume(self, what: str) -> None:
        self.assumed[what, calling_line()] += 1

    def _on_one_device(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, dict[str, Any]] | None:
        """Give an operator of host and meta tensors meta tensors alone; None where it is a copy, which is not made."""
        on_host = on_meta = False
        for each in (*args, *kwargs.values()):
            for value in each if isinstance(each, (list, tuple)) else (each,):
                if isinstance(value, T) and value.dim():
                    on_meta |= value.is_meta
                    on_host |= value.is_cpu
        if on_host and on_meta:
            if func in _COPIES:
                return None
            args, kwargs = tree_map(_without_values, (args, kwargs))
        device = kwargs.get("device")
        if func is torch.ops.aten._to_copy.default and args[0].is_meta and device is not None:
            kwargs["device"] = torch.device("meta")
        return args, kwargs


def _without_values(value: Any) -> Any:
    """Return a host tensor's likeness on the meta device, and anything else as it is."""
    if not isinstance(value, T) or value.is_meta or not value.dim():
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")


def kernel_key(func: Any, args: Any, kwargs: Any) -> str:
    """Return the text of a call in which shapes, strides and dtypes stand for tensors.

    Args:
        func: the operator.
        args: its positional arguments.
        kwargs: its keyword arguments.
    """
    parts = [_of_argument(each) for each in args]
    parts += [
        f"{name}={_of_argument(each)}" for name, each in sorted(kwargs.items()) if name not in ("device", "layout")
    ]
    return f"{func}({', '.join(parts)})"


def _of_argument(value: Any) -> str:
    if isinstance(value, T):
        shape, strides = ",".join(map(str, value.shape)), ",".join(map(str, value.stride()))
        return f"{str(value.dtype).removeprefix('torch.')}[{shape}|{strides}]"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_of_argument, value))}]"
    return str(value)
