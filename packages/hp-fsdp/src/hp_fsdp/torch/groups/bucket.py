"""Bucket: a group's parameters of one dtype in one flat buffer: gathered as one, reduced as one.

Note [Three buffers]
    *shard* holds the rank's piece for good; the sharded parameters are views of it, so an optimizer's step writes it.
    *full* is the gathered buffer; the unsharded parameters are views of it. The *gradient* buffer takes the unsharded
    gradients (`hp_fsdp.torch.groups.gradients`). The views of the last two are made once; only their memory comes and
    goes, by resizing the storage. So tensors that autograd saved in forward have their values again when the buffer is
    gathered anew in backward, and a step makes no views. Collectives write through an alias with a version counter of
    its own, since autograd must not take a gather for a change of a saved value. While *full* has no memory, its
    version is one that autograd has never saved: a backward that needs a freed parameter raises, and computes with
    nothing else.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ClassVar

import torch

from hp_fsdp.axes import DataAxes
from hp_fsdp.grad_norm import mark_in_blocks
from hp_fsdp.groups.bucket import FlatBucket
from hp_fsdp.options import BucketPlan, GroupOptions
from hp_fsdp.torch.groups.communication import Communication, on_copy_stream, transport
from hp_fsdp.torch.groups.deterministic import MicroBatchBuffer
from hp_fsdp.torch.groups.gradients import GradientBuffer
from hp_fsdp.torch.groups.parameter import ManagedParameter, check_registered, find_registered, has_own_setattr
from hp_platform import collectives, get_platform
from hp_platform.torch.devices import empty_on_host
from hp_platform.torch.internals import (
    get_device,
    get_dtype,
    get_grad,
    get_requires_grad,
    get_version,
    set_versions,
    without_torch_function,
)

FREED = 2**31 - 1
"""The version of a parameter that is freed."""


class Bucket(FlatBucket):
    """A bucket whose sharded and unsharded parameters are views of flat buffers: Note [Three buffers].

    Attributes:
        optimizer_steps: steps of torch's optimizers in this process.
        leaves: another object whenever there are new unsharded parameters, or others of them require gradients.
        watch: see `watching_gathers`.
    """

    optimizer_steps = 0
    eight_bit_states = True
    watch: ClassVar[Callable[[str, torch.Tensor, torch.Tensor, Any], None] | None] = None
    parameters: list[ManagedParameter]

    def __init__(
        self, plan: BucketPlan, axes: DataAxes, device: torch.device, options: GroupOptions, owner: str
    ) -> None:
        # Offloaded shards live on the host and are copied to the device of the collectives.
        super().__init__(plan, axes, device if options.offload is None else transport(axes.mesh), options, owner)
        self.home = device if options.offload is None or device.type == "meta" else torch.device("cpu")
        self.communication: Communication | None = None
        self.prepared = False
        self.version: tuple[int] | None = None  # of `full`, while it has no memory
        for parameter in self.parameters:
            parameter.front = plan.dim

    @staticmethod
    def itemsize(dtype: torch.dtype) -> int:
        return dtype.itemsize

    def is_floating(self) -> bool:
        return self.dtype.is_floating_point

    def shard_originals(self) -> None:
        """Shard the parameters."""
        layout, rank = self.layout, self.axes.shard_rank
        self.shard = self.new_shard(self.home, filled=True)
        with torch.no_grad():
            for index, (parameter, spec) in enumerate(zip(self.parameters, self.specs)):
                view = self.shard_view(index)
                if view.device.type != "meta":
                    start, stop = layout.part(index, rank)
                    self.range_of(index).copy_(parameter.flat()[start:stop])
                parameter.make_sharded(view, spec, f"{parameter.name!r} of {self.owner}")
        self.note_sharded()
        self.show_sharded()

    def new_shard(self, device: torch.device, *, filled: bool = False) -> torch.Tensor:
        """Allocate memory for the rank's piece, zeroed; its padding alone where the caller fills the rest."""
        if self.offload is None or device != get_platform().devices.host_device():
            piece = torch.empty(self.layout.piece, dtype=self.dtype, device=device)
        else:
            piece = empty_on_host(self.layout.piece, self.dtype, pin=self.offload.pin_memory)
        sizes, ranges = self.layout.splits(self.axes.shard_rank)
        for number, part in enumerate(piece.split(sizes)):
            if not filled or number not in ranges:
                part.zero_()
        return piece

    def range_of(self, index: int) -> torch.Tensor:
        """Return a parameter's range of the rank's piece."""
        start, stop = self.layout.place(index, self.axes.shard_rank)
        return self.shard[start:stop]

    def shard_view(self, index: int) -> torch.Tensor:
        """Return the same range in the sharded parameter's shape."""
        return self.parameters[index].part(self.range_of(index), self.axes.shards)

    def note_sharded(self) -> None:
        """Record new sharded parameters."""
        if self.deterministic:
            for parameter in self.parameters:
                mark_in_blocks(parameter.sharded)
        self.note_registrations()

    def note_registrations(self) -> None:
        """Record where the parameters are registered."""
        self.sharded_places, self.sharded_attributes = _places((p, p.sharded) for p in self.parameters)
        if self.prepared:
            self.unsharded_places, self.unsharded_attributes = _places((p, p.unsharded) for p in self.parameters)
        with without_torch_function():
            self.expected = [
                (module._parameters, name, parameter.sharded, parameter.sharded.data_ptr())
                for parameter in self.parameters
                for module, name in parameter.places
            ]

    # ---- lazy preparation ----
    def prepare(self) -> None:
        """Make the gathered buffer and the views of it, at the first use.

        Raises:
            RuntimeError: the parameters are still on the meta device.
        """
        self.check()
        device = self.shard.device
        if not get_platform().devices.has_memory(self.shard):
            place = "cpu" if self.offload is not None else self.axes.mesh.device_type
            raise RuntimeError(
                f"fully_shard: parameter {self.parameters[0].name!r} of {self.owner} is still on the meta device. "
                "Materialise the parameters before the first forward: hp_dtensor.init_parameters(model), or "
                f"model.to_empty(device={place!r}) and an initialisation of your own"
            )
        self.home = device
        if self.offload is None:
            self.device = device
        self.aliased = self.is_aliased()
        self.keeps_writes = self.aliased and self.axes.replicate_size == 1
        with torch.inference_mode(False), torch.no_grad():
            self.full = self.make_full()
            self.full_alias = self.full.data
            self.full_storage = self.full.untyped_storage()
            self.full_bytes = self.full_storage.nbytes()
            self.make_unsharded()
            self.leaves = object()
            self.unsharded_places, self.unsharded_attributes = _places((p, p.unsharded) for p in self.parameters)
            if not self.aliased:
                self.free()
            kind = MicroBatchBuffer if self.deterministic else GradientBuffer
            self.gradients = kind(self.parameters, self.layout, self.axes, self.dtype, self.reduce_dtype, self.device)
            self.gradients.communication = self.communication
            if self.offload is not None and self.home != self.device:
                self.gradients.pin, self.gradients.link = self.offload.pin_memory, self.offload.link
        self.keep()
        self.prepared = True

    def is_aliased(self) -> bool:
        """Tell whether the shard itself is the gathered buffer, on one rank."""
        return self.axes.shard_size == 1 and self.compute_dtype is self.dtype and self.home == self.device

    def make_full(self) -> torch.Tensor:
        """Return the gathered buffer."""
        if self.aliased:
            return self.shard
        return torch.empty(self.layout.total, dtype=self.compute_dtype, device=self.device)

    def make_unsharded(self) -> None:
        """Make the unsharded parameters, views of the gathered buffer."""
        for parameter, offset in zip(self.parameters, self.layout.offsets):
            parameter.make_unsharded(self.full[offset : offset + parameter.numel])

    def addresses(self) -> list[int]:
        """List where the unsharded parameters lie."""
        return [each.unsharded.data_ptr() for each in self.parameters]

    @property
    def gathered_bytes(self) -> int:
        """Bytes of the gathered buffer; none where the shard is it."""
        alone = self.axes.shard_size == 1 and self.compute_dtype is self.dtype and self.offload is None
        if self.aliased if self.prepared else alone:
            return 0
        return self.layout.total * self.compute_dtype.itemsize

    def check(self) -> None:
        """Follow changes to the sharded parameters from outside: new memory, replaced objects, frozen or not."""
        if self.offload is not None and self.shard.device.type not in ("cpu", "meta"):
            self._come_home()
        with without_torch_function():
            dtype, device = self.shard.dtype, self.shard.device
            for registered, name, sharded, address in self.expected:
                new = registered.get(name) is not sharded or sharded.data_ptr() != address
                if not address:  # always 0 without elements
                    new = new or get_dtype(sharded) is not dtype or get_device(sharded) != device
                if new:
                    self._adopt()
                    break
        self.follow_requires_grad()

    def _adopt(self) -> None:
        """Take over parameters that were materialised, moved, cast, or loaded by assignment, into a new shard.

        After a cast, parameters keep their offsets in the buffer, which is aligned for the former dtype.

        Raises:
            RuntimeError: see `find_registered` and `check_registered`.
        """
        with torch.no_grad(), without_torch_function():
            objects = [find_registered(parameter, self.owner) for parameter in self.parameters]
            device, dtype = objects[0].device, objects[0].dtype
            floating, on_host = self.dtype.is_floating_point, self.offload is not None
            check_registered(self.parameters, objects, self.owner, floating=floating, on_host=on_host)
            if device.type == "meta":
                return
            if self.prepared or dtype is not self.dtype:
                former, self.dtype, self.prepared = self.shard, dtype, False
                self.choose_dtypes()
                self.shard = self.new_shard(device)
                if former.device.type != "meta":
                    self.shard.copy_(former)
            else:
                self.shard = self.new_shard(device)
            for index, (parameter, registered) in enumerate(zip(self.parameters, objects)):
                parameter.take_over(registered, self.shard_view(index), self.owner)
        self.note_sharded()
        self.show_sharded()

    def follow_requires_grad(self) -> None:
        """Freeze and unfreeze the unsharded parameters like the sharded ones."""
        with without_torch_function():
            for parameter in self.parameters:
                if get_requires_grad(parameter.sharded) is not parameter.trains:
                    parameter.trains = not parameter.trains
                    if parameter.unsharded is not None:
                        self.leaves = object()
                        parameter.unsharded.requires_grad_(parameter.trains)

    def materialize(self, device: torch.device) -> None:
        """Replace sharded parameters on meta by ones with memory, not initialised yet."""
        if self.shard.device.type != "meta":
            return
        self.shard = self.new_shard(device)
        for index, parameter in enumerate(self.parameters):
            parameter.renew_sharded(self.shard_view(index))
        self.note_sharded()
        self.show_sharded()

    def _come_home(self) -> None:
        """Move a shard to the host after it was initialised on the device, for the sake of random numbers."""
        former, self.shard = self.shard, self.new_shard(torch.device("cpu"))
        with torch.no_grad(), without_torch_function():
            self.shard.copy_(former)
            for index, parameter in enumerate(self.parameters):
                parameter.sharded.data = self.shard_view(index).detach()
        self.note_sharded()

    # ---- gathering ----
    def gather(self) -> Any:
        """Start to fill the gathered buffer from all ranks' shards; return a handle, or None if nothing moves."""
        if not self.prepared:
            self.prepare()
        if self.aliased:
            return None
        self.full_storage.resize_(self.full_bytes)
        if self.post_forward_shard is not None:
            return self._all_gather(self.full_alias, self.post_forward_shard, self.post_forward_group)
        link = None if self.offload is None else self.offload.link
        if link is not None:
            link.note("load", self.owner)
        if self.home == self.device:
            return self._gather_from(self.shard)
        with on_copy_stream(self.device, link):
            return self._gather_from(self.shard.to(self.device, non_blocking=True))

    def _gather_from(self, shard: torch.Tensor) -> Any:
        if self.axes.shard_size == 1:
            self.full_alias.copy_(shard)
            if self.home == self.device:
                return None
            self.source = shard
            return Copied()
        # A cast piece, or one that came from the host, must live until the gather is done.
        self.source = shard if self.compute_dtype is self.dtype else shard.to(self.compute_dtype)
        return self._all_gather(self.full_alias, self.source, self.axes.shard_group)

    def _all_gather(self, full: torch.Tensor, piece: torch.Tensor, group: Any) -> Any:
        if self.communication is not None:
            return self.communication.all_gather(full, piece, group)
        return collectives.all_gather(full, piece, group=group, async_op=True)

    def show_unsharded(self) -> None:
        """Register the unsharded parameters in the modules."""
        if Bucket.watch is not None and self.source is not None and self.axes.shard_size > 1:
            Bucket.watch(self.owner, self.source, self.full_alias, self.axes.shard_group)
        self.source = None
        if self.version is not None:
            set_versions((self.full,), self.version)
            self.version = None
        for registered, name, tensor in self.unsharded_places:
            registered[name] = tensor
        for module, name, tensor in self.unsharded_attributes:
            setattr(module, name, tensor)

    def show_sharded(self) -> None:
        """Register the sharded parameters in the modules."""
        for registered, name, tensor in self.sharded_places:
            registered[name] = tensor
        for module, name, tensor in self.sharded_attributes:
            setattr(module, name, tensor)

    @property
    def owns_full(self) -> bool:
        return not self.aliased

    def piece_of_full(self, place: int, size: int) -> torch.Tensor:
        return self.full_alias.chunk(size)[place].clone()

    def free(self) -> None:
        self.version = (get_version(self.full),)
        set_versions((self.full,), (FREED,))
        self.full_storage.resize_(0)

    def keep(self) -> None:
        """Record the state that `stale` compares with, for a bucket that stays gathered after forward."""
        self.kept_versions, self.kept_step = self._versions(), Bucket.optimizer_steps
        with without_torch_function():
            self.kept_with_gradients = any(get_grad(parameter.sharded) is not None for parameter in self.parameters)

    def stale(self, by_user: bool) -> bool:
        """Tell whether the sharded parameters may have changed since `keep`.

        Fused optimizers do not change the version counter; but an optimizer writes only parameters with gradients, and
        later gradients come from a backward pass, which reshards.

        Args:
            by_user: the user gathered them by ``unshard``, perhaps to add to gradients that there are; then only an
                optimizer of torch's counts that has stepped since.
        """
        stepped = self.kept_step != Bucket.optimizer_steps if by_user else self.kept_with_gradients
        return stepped or self.kept_versions != self._versions()

    def _versions(self) -> list[int]:
        with without_torch_function():
            return [get_version(parameter.sharded) for parameter in self.parameters]


@contextlib.contextmanager
def watching_gathers(see: Callable[[str, torch.Tensor, torch.Tensor, Any], None]) -> Iterator[None]:
    """Call a function with each all-gather of parameters that has arrived, before a module computes with it.

    Those of the shards that `reshard_after_forward` keeps of fewer ranks are not seen.

    Args:
        see: called with the name of the group of parameters, what this rank has sent, what has arrived from all ranks,
            one after the other, and the process group.
    """
    before, Bucket.watch = Bucket.watch, see
    try:
        yield
    finally:
        Bucket.watch = before


class Copied:
    """A copy on the stream for copies, to be waited for like a gather."""

    def __init__(self) -> None:
        devices = get_platform().devices
        self._module = devices.device_module()
        self._event = self._module.Event()
        self._event.record()

    def wait(self) -> None:
        """Make the current stream wait for the copy."""
        self._module.current_stream().wait_event(self._event)


def _places(tensors: Iterable[tuple[ManagedParameter, Any]]) -> tuple[list[Any], list[Any]]:
    """Return where to put tensors, without a lookup later: a module's dictionary, or its own ``__setattr__``."""
    direct, attributes = [], []
    for parameter, tensor in tensors:
        for module, name in parameter.places:
            if has_own_setattr(module):
                attributes.append((module, name, tensor))
            else:
                direct.append((module._parameters, name, tensor))
    return direct, attributes
