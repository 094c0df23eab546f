"""Bucket: a group's parameters of one dtype in one flat buffer: gathered as one, reduced as one.

Note [Three buffers]
    *shard* holds the rank's piece for good; the sharded parameters look into it, so an optimizer's step writes it.
    *full* is the gathered buffer; the unsharded parameters look into it. The *gradient* buffer takes the unsharded
    gradients (`hp_fsdp.torch.gradients`). The tensors that look into the last two are made once; only their memory
    comes and goes, by resizing the storage. So what autograd saved in forward finds the values again when the buffer is
    gathered anew in backward, and a step makes no views. Collectives write through an alias with a version counter of
    its own, for autograd must not take a gather for a change of the value that it saved.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from hp_dtensor.torch import autograd as _autograd
from hp_fsdp.axes import DataAxes
from hp_fsdp.layout import FlatLayout
from hp_fsdp.policies import MixedPrecisionPolicy
from hp_fsdp.torch.gradients import GradientBuffer
from hp_fsdp.torch.parameter import ManagedParameter, has_own_setattr
from hp_platform.torch import collectives

__all__ = ["Bucket"]

ALIGNMENT = 64
"""Parameters and pieces start at multiples of this many bytes: a cache line, and more than vector loads ask for."""

_plain = torch._C.DisableTorchFunctionSubclass
_get_grad = torch.Tensor.grad.__get__  # type: ignore[attr-defined]
_get_requires_grad = torch.Tensor.requires_grad.__get__  # type: ignore[attr-defined]


class Bucket:
    """Parameters of one dtype, sharded, gathered and reduced together.

    Args:
        parameters: in the order in which they lie in the buffer; all of one dtype.
        axes: the axes of data parallelism.
        device: where the buffers live; meta where the parameters are to be materialised later.
        policy: dtypes of computation and reduction.
        owner: text that names the group in errors.
    """

    def __init__(
        self,
        parameters: Sequence[ManagedParameter],
        axes: DataAxes,
        device: torch.device,
        policy: MixedPrecisionPolicy,
        owner: str,
    ) -> None:
        self.parameters = list(parameters)
        self.axes = axes
        self.owner = owner
        self.dtype: torch.dtype = parameters[0].original.dtype  # type: ignore[union-attr]
        self.compute_dtype: torch.dtype = policy.param_dtype if self._casts(policy.param_dtype) else self.dtype
        self.reduce_dtype: torch.dtype = policy.reduce_dtype if self._casts(policy.reduce_dtype) else self.compute_dtype
        self.layout = FlatLayout.of(
            [parameter.numel for parameter in parameters],
            axes.shard_size,
            align=max(
                1, ALIGNMENT // min(self.dtype.itemsize, self.compute_dtype.itemsize, self.reduce_dtype.itemsize)
            ),
        )
        self.aliased = axes.shard_size == 1 and self.compute_dtype is self.dtype
        self.has_inner = any(parameter.inner is not None for parameter in parameters)
        self.prepared = False
        self._shard_originals(device)

    def _casts(self, dtype: torch.dtype | None) -> bool:
        return dtype is not None and self.dtype.is_floating_point

    def _shard_originals(self, device: torch.device) -> None:
        layout, rank = self.layout, self.axes.shard_rank
        self.shard = torch.zeros(layout.piece, dtype=self.dtype, device=device)
        with torch.no_grad():
            for index, parameter in enumerate(self.parameters):
                view = self._shard_view(index)
                if device.type != "meta":
                    start, stop = layout.part(index, rank)
                    view.copy_(parameter.flat()[start:stop])
                spec = self.axes.sharded_spec(
                    parameter.name, layout.units(index), parameter.global_shape, parameter.inner
                )
                parameter.make_sharded(view, spec, f"{parameter.name!r} of {self.owner}")
        self._note_sharded()
        self.show_sharded()

    def _shard_view(self, index: int) -> torch.Tensor:
        start, stop = self.layout.place(index, self.axes.shard_rank)
        return self.shard[start:stop]

    def _note_sharded(self) -> None:
        self.sharded_places, self.sharded_attributes = _places((p, p.sharded) for p in self.parameters)
        with _plain():
            self.expected = [
                (
                    parameter.places[0][0]._parameters,
                    parameter.places[0][1],
                    parameter.sharded,
                    parameter.sharded.data_ptr(),
                )
                for parameter in self.parameters
            ]

    # ---- lazy preparation ----
    def prepare(self) -> None:
        """Makes the gathered buffer and what looks into it, at the first use.

        Raises:
            RuntimeError: the parameters are still on the meta device.
        """
        self.check()
        device = self.shard.device
        if device.type == "meta":
            raise RuntimeError(
                f"fully_shard: parameter {self.parameters[0].name!r} of {self.owner} is still on the meta device. "
                "Materialise the parameters before the first forward: hp_dtensor.init_parameters(model), or "
                'model.to_empty(device="cpu") and an initialisation of your own'
            )
        layout = self.layout
        with torch.inference_mode(False), torch.no_grad():
            if self.aliased:
                self.full = self.shard
            else:
                self.full = torch.empty(layout.total, dtype=self.compute_dtype, device=device)
            self.full_alias = self.full.data
            self.full_storage = self.full.untyped_storage()
            self.full_bytes = self.full_storage.nbytes()
            for parameter, offset in zip(self.parameters, layout.offsets):
                parameter.make_unsharded(self.full[offset : offset + parameter.numel])
            self.unsharded_places, self.unsharded_attributes = _places((p, p.unsharded) for p in self.parameters)
            if not self.aliased:
                self.full_storage.resize_(0)
            self.gradients = GradientBuffer(self.parameters, layout, self.axes, self.dtype, self.reduce_dtype, device)
        self.source: torch.Tensor | None = None
        self.keep()
        self.prepared = True

    def check(self) -> None:
        """Follows what was done to the sharded parameters from outside: new memory, replaced objects, frozen or not."""
        with _plain():
            for registered, name, sharded, address in self.expected:
                if registered.get(name) is not sharded or sharded.data_ptr() != address:
                    self._adopt()
                    break
            for parameter in self.parameters:
                if _get_requires_grad(parameter.sharded) is not parameter.trains:
                    parameter.trains = not parameter.trains
                    if parameter.unsharded is not None:
                        parameter.unsharded.requires_grad_(parameter.trains)

    def materialize(self, device: torch.device) -> None:
        """Replaces sharded parameters on meta by ones with memory, not initialised yet."""
        if self.shard.device.type != "meta":
            return
        self.shard = torch.zeros(self.layout.piece, dtype=self.dtype, device=device)
        for index, parameter in enumerate(self.parameters):
            parameter.renew_sharded(self._shard_view(index))
        self._note_sharded()
        self.show_sharded()

    def _adopt(self) -> None:
        """Moves parameters that were materialised, loaded by assignment or moved back into a flat shard."""
        with torch.no_grad(), _plain():
            found = []
            for parameter in self.parameters:
                module, name = parameter.places[0]
                registered: Any = module._parameters.get(name)
                if registered is None or getattr(registered, "_spec", None) is not parameter.sharded._spec:
                    raise RuntimeError(
                        f"fully_shard: parameter {parameter.name!r} of {self.owner} was replaced by"
                        f" {type(registered).__name__} that is not laid out as {parameter.sharded._spec}. Change a"
                        " sharded parameter in place, or load values with load_full_state_dict(model, ...)"
                    )
                found.append(registered)
            device, dtype = found[0].device, found[0].dtype
            if dtype is not self.dtype:
                raise RuntimeError(
                    f"fully_shard: parameter {self.parameters[0].name!r} of {self.owner} was cast from {self.dtype} to"
                    f" {dtype} after it was sharded. Cast the model before fully_shard"
                )
            if device.type == "meta":
                return
            if self.prepared:
                self.shard = self.shard.to(device, copy=True)
                self.prepared = False
            else:
                self.shard = torch.zeros(self.layout.piece, dtype=self.dtype, device=device)
            for index, (parameter, registered) in enumerate(zip(self.parameters, found)):
                view = self._shard_view(index)
                view.copy_(registered)
                registered.data = view.detach()
                parameter.sharded = registered
                parameter.trains = _get_requires_grad(registered)
        self._note_sharded()
        self.show_sharded()

    # ---- gathering ----
    def gather(self) -> Any:
        """Starts to fill the gathered buffer from all ranks' shards; returns a handle, or None where nothing moves."""
        if self.has_inner:
            _autograd.forget()  # what it keeps of the unsharded parameters may be of older values
        if self.aliased:
            return None
        self.full_storage.resize_(self.full_bytes)
        if self.axes.shard_size == 1:
            self.full_alias.copy_(self.shard)
            return None
        # A cast piece must live until the gather is done.
        self.source = self.shard if self.compute_dtype is self.dtype else self.shard.to(self.compute_dtype)
        return collectives.all_gather(self.full_alias, self.source, group=self.axes.shard_group, async_op=True)

    def show_unsharded(self) -> None:
        """Registers the unsharded parameters in the modules."""
        self.source = None
        for registered, name, tensor in self.unsharded_places:
            registered[name] = tensor
        for module, name, tensor in self.unsharded_attributes:
            setattr(module, name, tensor)

    def show_sharded(self) -> None:
        """Registers the sharded parameters in the modules."""
        for registered, name, tensor in self.sharded_places:
            registered[name] = tensor
        for module, name, tensor in self.sharded_attributes:
            setattr(module, name, tensor)

    def release(self) -> None:
        """Frees the gathered buffer."""
        if not self.aliased:
            self.full_storage.resize_(0)

    def keep(self) -> None:
        """Notes what `stale` has to know of a bucket that stays gathered after forward."""
        self.kept_version = self.shard._version
        with _plain():
            self.kept_with_gradients = any(_get_grad(parameter.sharded) is not None for parameter in self.parameters)

    def stale(self) -> bool:
        """Whether the sharded parameters may have changed since `keep`.

        Fused optimizers write without a trace in the version counter; but an optimizer has something to write only
        where there were gradients, and gradients that came later came with a backward pass, which reshards.
        """
        return self.kept_with_gradients or self.kept_version != self.shard._version


def _places(tensors: Iterable[tuple[ManagedParameter, Any]]) -> tuple[list[Any], list[Any]]:
    """Where to put tensors, without a lookup later: into a module's dictionary, or by its own ``__setattr__``."""
    direct, attributes = [], []
    for parameter, tensor in tensors:
        for module, name in parameter.places:
            if has_own_setattr(module):
                attributes.append((module, name, tensor))
            else:
                direct.append((module._parameters, name, tensor))
    return direct, attributes
