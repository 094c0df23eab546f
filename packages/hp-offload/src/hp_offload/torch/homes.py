"""Modules whose parameters live on the host: what stands for them while a block runs, and how gradients go home.

Note [What stands for a parameter]
    While a block runs, its modules have tensors of the device in the place of their parameters, which an autograd node
    made from these: so losses, hooks and `torch.autograd.grad` reach the parameters themselves, and a gradient leaves
    for the host when it is complete. What autograd saves of such a tensor is a reference, which brings the block back
    where backward needs it. Whoever else holds the tensor holds its memory: a cache never takes away what is in use.

Note [Copies and the host]
    The host may write to a parameter when a forward or a backward has returned: each ends when the copies from its
    homes are done. A gradient is copied on a stream, and what adds it up at home waits for the copy on the host, in
    the thread of autograd that runs nodes of the CPU, while the device's thread goes on.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch import nn
from torch.autograd import Function, Variable
from torch.autograd.function import once_differentiable
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import _disable_current_modes

from hp_offload.homes.cache import Cache, Step
from hp_offload.manager import SwapManager
from hp_offload.port import link
from hp_offload.torch.around import wrap_inside
from hp_offload.torch.swapping import address_of, changed, kept, residents, unpack
from hp_platform import get_platform
from hp_platform.torch.devices import empty_on_host
from hp_platform.torch.internals import backward_id, in_backward, saved_hooks_above

T = torch.Tensor
_engine: Any = Variable._execution_engine
_placed: weakref.WeakSet[nn.Module] = weakref.WeakSet()


@dataclass
class Part:
    """Parameters that the same blocks use, which come and go together."""

    name: str
    parameters: list[nn.Parameter] = field(default_factory=list)
    here: list[T] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    events: list[Any] = field(default_factory=list)


@dataclass
class Block:
    """A module with a home."""

    name: str
    module: nn.Module
    slots: list[tuple[nn.Module, str, nn.Parameter]]
    parts: list[Part] = field(default_factory=list)
    runs: bool = False
    versions: list[int] = field(default_factory=list)
    """Of the parameters, in the last forward."""


@dataclass
class Found:
    """The blocks of a model and their parts."""

    blocks: list[Block]
    parts: dict[str, Part]

    @property
    def of(self) -> Mapping[str, Sequence[str]]:
        """Get the names of the parts of each block."""
        return {block.name: [part.name for part in block.parts] for block in self.blocks}

    @property
    def sizes(self) -> Mapping[str, int]:
        """Get the bytes of each part."""
        return {name: sum(each.nbytes for each in part.parameters) for name, part in self.parts.items()}


def find_parts(model: nn.Module, names: Sequence[str]) -> Found:
    """Find the parameters of modules; refuse what can't have a home."""
    modules = dict(model.named_modules(remove_duplicate=False))
    if any(module in _placed for module in model.modules()):
        raise RuntimeError("place: the model has homes already; name all of them in one call.")
    blocks = [Block(name, modules[name], []) for name in names]
    owners: dict[nn.Parameter | None, list[str]] = defaultdict(list)
    inside: set[nn.Module] = set()
    for block in blocks:
        for module in block.module.modules():
            inside.add(module)
            for name, parameter in module._parameters.items():
                if parameter is None:
                    continue
                path = next(f"{prefix}.{name}" for prefix, each in modules.items() if each is module).lstrip(".")
                _check(path, module, parameter)
                block.slots.append((module, name, parameter))
                if block.name not in owners[parameter]:
                    owners[parameter].append(block.name)
    for prefix, module in modules.items():
        for name, parameter in module._parameters.items():
            if module not in inside and parameter in owners:
                raise ValueError(
                    f"place: {prefix}.{name} is a parameter of {owners[parameter][0]!r}, too, which has a home on the"
                    f" host, and {prefix or 'the model itself'!r} has none: it would find it there. Give both a home."
                )
    parts: dict[str, Part] = {}
    for parameter, own in owners.items():
        assert parameter is not None
        name = " and ".join(own)
        parts.setdefault(name, Part(name)).parameters.append(parameter)
    for block in blocks:
        block.parts = [part for part in parts.values() if block.name in owners[part.parameters[0]]]
    return Found(blocks, parts)


def _check(path: str, module: nn.Module, parameter: nn.Parameter) -> None:
    if type(parameter) is not nn.Parameter:
        raise NotImplementedError(
            f"place: {path} is a {type(parameter).__name__}: sharded parameters (fully_shard, parallelize_module) and"
            " those of other classes have no homes; for sharded ones fully_shard has CPUOffloadPolicy."
        )
    if type(module).__setattr__ is not nn.Module.__setattr__:
        raise NotImplementedError(
            f"place: {type(module).__name__} ({path}) keeps its parameters in a list of its own, as nn.LSTM does,"
            " where a copy on the device would not be found. Leave it out."
        )
    if not get_platform().devices.has_memory(parameter):
        raise ValueError(f"place: {path} is on the meta device, without values; materialise the model first.")


def place(model: nn.Module, found: Found, budget: int, ahead: int) -> Visits:
    """Move parameters home and everything else to the device, and let the blocks visit it."""
    device = get_platform().devices.current_device()
    kept = {parameter for part in found.parts.values() for parameter in part.parameters}
    for parameter in model.parameters():
        _move(parameter, _at_home(parameter, device) if parameter in kept else parameter.to(device))
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to(device)
    visits = Visits(found, device, budget, ahead)
    for block in found.blocks:
        _placed.add(block.module)
        wrap_inside(block.module, functools.partial(visits.run, block))
    wrap_inside(model, visits.step)
    weakref.finalize(model, _forget, found.parts.values()).atexit = False
    return visits


def _forget(parts: Iterable[Part]) -> None:
    """Let go of parts on the device, but for a graph that needs them."""
    for part in parts:
        for each in part.here:
            residents.pop(address_of(each), None)


def _move(parameter: nn.Parameter, values: T) -> None:
    if values is parameter:
        return
    gradient, parameter.grad = parameter.grad, None
    parameter.data = values.detach()
    if gradient is not None:
        parameter.grad = gradient.to(values.device)


def _at_home(parameter: nn.Parameter, device: torch.device) -> T:
    """Return the parameter's values in memory of the host that the device copies from aside."""
    home = _like(parameter, device)
    home.copy_(parameter.detach())
    return home


def _like(parameter: T, device: torch.device) -> T:
    """Allocate memory of the host for the values of a parameter, or of its gradient."""
    flat = empty_on_host(parameter.numel(), parameter.dtype, from_host=device.type == "cpu")
    return flat.as_strided(parameter.shape, parameter.stride()) if _is_dense(parameter) else flat.view(parameter.shape)


def _is_dense(tensor: T) -> bool:
    """Tell whether elements lie one after the other, in whatever order of dims."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


class Visits:
    """The visits of blocks to the device."""

    def __init__(self, found: Found, device: torch.device, budget: int, ahead: int) -> None:
        self._device, self._parts, self._home = device, found.parts, get_platform().devices.host_device()
        self._empty = torch.UntypedStorage(0, device=device)
        self._cache = Cache(found.of, found.sizes, budget, ahead, self)
        self._depth = 0
        self._task = -1
        self._last_event: Any = None
        self._gradients = 0
        self.gradients = 0

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            "A model with homes can't be copied or pickled: its forward is tied to the cache of this process. Copy it"
            " before place, or save its state_dict()."
        )

    @property
    def last(self) -> Step:
        """What the last whole step did."""
        return self._cache.last

    def resize(self, budget: int) -> None:
        """Give the cache another number of bytes."""
        self._cache.resize(budget)

    # ---- steps ----
    def step(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run the model's forward: a step begins."""
        if self._depth or in_backward():
            return forward(*args, **kwargs)
        training = torch.is_grad_enabled()
        self._begin("training" if training else "evaluation")
        self._depth += 1
        try:
            result = forward(*args, **kwargs)
        except BaseException:
            self._end(whole=False)
            raise
        finally:
            self._depth -= 1
        self._settle()
        if not training:
            self._end(whole=True)
        return result

    def _begin(self, kind: str) -> None:
        self._task, self._gradients = -1, 0
        self._cache.begin(kind)

    def _end(self, whole: bool = True) -> None:
        self._settle()
        self._task = -1
        self.gradients, self._gradients = self._gradients if whole else self.gradients, 0
        self._cache.end(whole)

    def _expect_end(self) -> None:
        """End the step when the backward that runs is over."""
        if self._task != backward_id() != -1:
            self._task = backward_id()
            _engine.queue_callback(self._end)

    def _settle(self) -> None:
        """Wait until homes may be written to."""
        if self._last_event is not None:
            self._last_event.synchronize()
            self._last_event = None

    # ---- blocks ----
    def run(self, block: Block, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a block's forward with its parameters on the device."""
        if torch.compiler.is_compiling():
            untraced: Any = torch.compiler.disable(_refuse_compiler)
            untraced(block.name)
        if block.runs:
            return forward(*args, **kwargs)
        alone = not self._depth and not in_backward()
        if alone:
            self._begin("")
        try:
            with self._visit(block):
                return forward(*args, **kwargs)
        except BaseException:
            if alone:
                self._end(whole=False)
            raise
        finally:
            if alone and not torch.is_grad_enabled():
                self._end(whole=False)

    @contextlib.contextmanager
    def _visit(self, block: Block) -> Iterator[None]:
        """Put what stands for the parameters into the modules: Note [What stands for a parameter]."""
        self._check(block)
        self._cache.use(block.name)
        here = {parameter: each for part in block.parts for parameter, each in zip(part.parameters, part.here)}
        versions = {parameter: each._version for parameter, each in here.items()}
        for part in block.parts:
            for index, each in enumerate(part.here):
                if each.numel():
                    residents[address_of(each)] = functools.partial(_Away, self, block.name, part, index)
        stands = self._stand(here)
        for module, name, parameter in block.slots:
            module._parameters[name] = stands[parameter]  # type: ignore[assignment]
        above = saved_hooks_above(False) is not None or not torch.is_grad_enabled()
        block.runs = True
        try:
            with contextlib.nullcontext() if above else saved_tensors_hooks(kept, unpack):
                yield
        finally:
            block.runs = False
            for module, name, parameter in block.slots:
                module._parameters[name] = parameter
        written = [parameter for parameter, each in here.items() if each._version != versions[parameter]]
        if written:
            raise RuntimeError(
                f"The forward of {block.name!r} wrote to a parameter of shape {tuple(written[0].shape)}: to its copy on"
                " the device, which its home does not see. Write to parameters outside of the forward."
            )

    def _check(self, block: Block) -> None:
        """Refuse parameters that were replaced, moved, or written to since the forward."""
        again = in_backward()
        if again:
            self._expect_end()
        for (module, name, parameter), version in zip(block.slots, block.versions):
            if again and parameter._version != version:
                what = f"{name} of {type(module).__name__} in block {block.name!r}"
                raise changed(what, parameter._version - version, "Step the optimizer after backward.")
        for module, name, parameter in block.slots:
            if module._parameters.get(name) is not parameter or parameter.device != self._home:
                raise RuntimeError(
                    f"{name} of {type(module).__name__} in block {block.name!r} was replaced or moved since place. Load"
                    " values into it (load_state_dict without assign=True), and don't move the model with .to()."
                )
        if not again:
            block.versions = [parameter._version for _, _, parameter in block.slots]

    def _stand(self, here: Mapping[nn.Parameter, T]) -> dict[nn.Parameter, T]:
        stands = {parameter: each.detach() for parameter, each in here.items()}
        trained = [parameter for parameter in here if parameter.requires_grad and torch.is_grad_enabled()]
        if trained:
            leave = _Leave(self, trained)
            linked = trained if self._streams[0] is None else _Arrive.apply(leave, *trained)
            brought = _Bring.apply(leave, [here[parameter] for parameter in trained], *linked)
            stands.update(zip(trained, brought))
        return stands

    # ---- copies: the cache's carrier ----
    @property
    def _streams(self) -> tuple[Any, Any]:
        return SwapManager().streams

    def fetch(self, part: str) -> None:
        """Begin to copy a part to the device."""
        own = self._parts[part]
        SwapManager().note("fetch", part)
        copies: list[T] = []
        with _disable_current_modes(), torch.inference_mode(False), torch.no_grad():
            own.versions = [each._version for each in own.parameters]
            for parameter in own.parameters:
                home = parameter.detach()
                here = torch.empty(0, dtype=home.dtype, device=self._device)
                if home.numel():
                    flat = home.as_strided((home.numel(),), (1,)).view(torch.uint8)
                    storage, event = link().copy_back(flat, home.nbytes, self._empty, self._streams[1])
                    here.set_(storage, 0, home.shape, home.stride())
                    own.events.append(event)
                else:
                    here = here.new_empty(home.shape)
                copies.append(here)
        own.here = copies  # all or none, as where memory ran out in between
        self._last_event = own.events[-1] if own.events else self._last_event

    def wait(self, part: str) -> None:
        """Make what is computed from here on wait for the copy of a part."""
        own = self._parts[part]
        for event in own.events:
            link().wait(event)
        own.events.clear()

    def drop(self, part: str) -> None:
        """Let a part's memory on the device go."""
        self.wait(part)  # memory that is being written to is no one else's
        SwapManager().note("evict", part)
        _forget([self._parts[part]])
        self._parts[part].here = []

    def is_fresh(self, part: str) -> bool:
        """Tell whether a part on the device has the values of its home."""
        own = self._parts[part]
        return own.versions == [each._version for each in own.parameters]

    def return_to(self, block: str, part: Part, index: int) -> T:
        """Return a parameter's values on the device, for the backward of a block."""
        self._expect_end()
        self._cache.use(block)
        return part.here[index]

    def take(self, gradient: T, parameter: nn.Parameter) -> tuple[T, Any]:
        """Copy a gradient to the host."""
        self._expect_end()
        self._gradients += gradient._values().nbytes if gradient.is_sparse else gradient.nbytes
        if gradient.layout is not torch.strided:
            return gradient.to("cpu", copy=True), None
        home, stream = _like(parameter, self._device), self._streams[0]
        if stream is None:
            return home.copy_(gradient), None
        stream.wait_stream(get_platform().devices.device_module().current_stream(self._device))
        with stream:
            home.copy_(gradient, non_blocking=True)
        return home, stream.record_event()


def _refuse_compiler(block: str) -> None:
    raise NotImplementedError(
        f"Block {block!r} has a home on the host, and is called inside of torch.compile, which would keep its"
        " parameters on the device. Compile modules inside of blocks' own functions, or leave the compiler out."
    )


class _Away:
    """Stands for a parameter, or a view of one, that backward needs."""

    __slots__ = ("block", "dtype", "index", "offset", "part", "size", "stride", "version", "visits")

    def __init__(self, visits: Visits, block: str, part: Part, index: int, tensor: T) -> None:
        self.visits, self.block, self.part, self.index = visits, block, part, index
        self.dtype, self.version = tensor.dtype, part.parameters[index]._version
        self.size, self.stride, self.offset = tensor.size(), tensor.stride(), tensor.storage_offset()

    def load(self) -> T:
        """Return the tensor, unless the parameter was written to."""
        writes = self.part.parameters[self.index]._version - self.version
        if writes:
            raise changed(f"A parameter of block {self.block!r}", writes, "Step the optimizer after backward.")
        storage = self.visits.return_to(self.block, self.part, self.index).untyped_storage()
        new = torch.empty(0, dtype=self.dtype, device=storage.device)
        return new.set_(storage, self.offset, self.size, self.stride)


class _Leave:
    """Gradients of one visit of a block on their way to the host."""

    def __init__(self, visits: Visits, parameters: list[nn.Parameter]) -> None:
        self._visits, self._parameters = visits, parameters
        self._events: list[Any] = []
        self._held: list[Sequence[T | None]] = []  # until the copies are done

    def go(self, gradients: Sequence[T | None]) -> list[T | None]:
        """Begin to copy gradients to the host."""
        homes: list[T | None] = []
        for gradient, parameter in zip(gradients, self._parameters):
            home, event = (None, None) if gradient is None else self._visits.take(gradient, parameter)
            homes.append(home)
            if event is not None:
                self._events.append(event)
        if self._events:
            self._held.append(gradients)
        return homes

    def arrive(self) -> None:
        """Wait on the host until they are there."""
        for event in self._events:
            event.synchronize()
        self._events, self._held = [], []


class _Bring(Function):
    """From parameters at home to what stands for them on the device."""

    @staticmethod
    def forward(ctx: Any, leave: _Leave, here: list[T], *parameters: T) -> tuple[T, ...]:
        ctx.set_materialize_grads(False)
        ctx.leave = leave
        return tuple(each.detach() for each in here)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: T | None) -> Any:
        return None, None, *ctx.leave.go(gradients)


class _Arrive(Function):
    """Is run in backward by the CPU's thread, after `_Bring`: Note [Copies and the host]."""

    @staticmethod
    def forward(ctx: Any, leave: _Leave, *parameters: T) -> tuple[T, ...]:
        ctx.set_materialize_grads(False)
        ctx.leave = leave
        return tuple(each.detach() for each in parameters)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: T | None) -> Any:
        ctx.leave.arrive()
        return None, *gradients
