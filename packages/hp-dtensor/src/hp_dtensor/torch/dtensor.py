"""DTensor: a torch.Tensor with this rank's shard of a global tensor.

Note [A DTensor is its local tensor]
The class of a local tensor is set to DTensor, and its layout is an attribute. ``__torch_function__`` intercepts
functions; the local operation runs with interception off, so autograd records plain local operations and backward runs
without dispatch. With interception off, a DTensor is its local tensor in every respect, including ``shape``.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch

from hp_dtensor.layout.distributed_tensor import DistributedTensor
from hp_dtensor.layout.placements import Placement, Replicate
from hp_dtensor.layout.spec import Layout, TensorSpec, varying
from hp_dtensor.mesh.device_mesh import DeviceMesh
from hp_dtensor.torch import checkpoint
from hp_dtensor.torch.backward import autograd
from hp_dtensor.torch.backward.compat import local_asked
from hp_dtensor.torch.compile.overrides import compiler as _compiler
from hp_dtensor.torch.compile.overrides import overrides
from hp_dtensor.torch.views.kept import HANDED_OUT, recall_shared, remember_shared, stop_keeping
from hp_dtensor.torch.views.strides import keep, local_strides, strides_of
from hp_platform.torch.internals import (
    backward_id,
    get_data,
    get_device,
    get_dtype,
    get_grad,
    get_grad_fn,
    get_requires_grad,
    get_shape,
    plainly,
    set_data,
    set_grad,
    set_requires_grad,
    torch_function_enabled,
)

T = torch.Tensor
_OWN = frozenset(  # not a copy's
    "_spec _called_in _holds _link _meets_plain _moved_from _node_taken _outside_graphs _passed_by _reads _retired"
    " _shadows _shows _strides".split()
)

_from_local: Callable[..., DTensor]
_relayout: Callable[..., DTensor]
_on_local_gradient: Callable[[DTensor, Callable[[Any], Any]], Any]


def install(from_local: Any, relayout: Any, on_local_gradient: Any) -> None:
    """Set the functions behind methods that import this module themselves; called once, by `hp_dtensor.torch`."""
    global _from_local, _relayout, _on_local_gradient
    _from_local, _relayout, _on_local_gradient = from_local, relayout, on_local_gradient


def wrap(local: torch.Tensor, spec: TensorSpec) -> DTensor:
    """Turn ``local`` itself, of shape ``spec.local_shape``, into a DTensor: set its class, add no autograd node."""
    local.__class__ = DTensor
    local._spec = spec  # type: ignore[attr-defined]
    return local  # type: ignore[return-value]


def local_view(tensor: torch.Tensor) -> torch.Tensor:
    """Return a plain tensor on the storage of a DTensor's local tensor (or of a plain tensor), outside autograd."""
    return plainly(T.detach, (), (tensor,))


class DTensor(DistributedTensor, torch.Tensor):
    """A tensor distributed over a DeviceMesh.

    ``shape`` is the global shape. It has the operations of ``torch.Tensor``, whose results are those of a single
    device, distributed.

    Example:
        >>> mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))       # on 2 ranks
        >>> x = distribute_tensor(torch.arange(6.0), mesh, [Shard(0)])
        >>> x.to_local().shape, (x * 2).sum().item()
        (torch.Size([3]), 30.0)
    """

    _strides: tuple[int, ...]
    is_nested = False
    # A graph is traced for local sizes and strides, and reads the global ones when it runs; both are static.
    _dynamo_static_indices = set(range(64))

    # ---- creation ----
    @staticmethod
    def from_local(
        local_tensor: torch.Tensor,
        device_mesh: DeviceMesh | Layout | None = None,
        placements: Sequence[Placement] | None = None,
        *,
        run_check: bool = False,
        shape: Sequence[int] | None = None,
        stride: Sequence[int] | None = None,
        grad_placements: Sequence[Placement] | None = None,
    ) -> DTensor:
        """Create a DTensor from each rank's local tensor, which gets its part of the gradient.

        Args:
            local_tensor: this rank's local tensor.
            device_mesh: the mesh, or a ``Layout`` instead of mesh and placements.
            placements: one per axis; default ``Replicate()`` on all.
            run_check: compare shapes (and replicated values) over the ranks first; communicates.
            shape: global shape; required if shards are uneven. Default: all shards have this rank's size.
            stride: accepted for torch's signature; strides follow from the local tensor.
            grad_placements: layout in which the local tensor gets its gradient, if not the one in which it arrives:
                with ``Partial()`` on an axis where the tensor is replicated or partial, each rank gets one term of it.

        Raises:
            ValueError: placements that do not fit the mesh or the tensor, a ``local_tensor`` that is not this rank's
                shard of ``shape``, or (``run_check``) ranks that disagree.
            NotImplementedError: local tensors of a partial max, min or product that require gradients.
        """
        return _from_local(
            local_tensor, device_mesh, placements, run_check=run_check, shape=shape, grad_placements=grad_placements
        )

    # ---- layout ----
    @property
    def local_shape(self) -> torch.Size:
        """Shape of the local tensor."""
        return plainly(get_shape, (), (self,))

    def redistribute(
        self,
        device_mesh: DeviceMesh | Layout | None = None,
        placements: Sequence[Placement] | None = None,
        *,
        async_op: bool = False,
        forward_dtype: torch.dtype | None = None,
        backward_dtype: torch.dtype | None = None,
    ) -> DTensor:
        """Return the same value in another layout, on this mesh or another; differentiable.

        To another mesh it is collective over the ranks of both: a rank outside the tensor's mesh passes an empty local
        tensor of the same dtype and ``requires_grad``, and runs backward as well.

        Args:
            device_mesh: a mesh of the same kind of device, or a ``Layout``; default the tensor's own.
            placements: one per axis.
            async_op: on a device with streams, run concurrently until the result is used; on CPU the result is ready
                when the call returns.
            forward_dtype: dtype in which the value is sent, and of the result; default the tensor's.
            backward_dtype: dtype in which the gradient is sent, before it is cast back; default the tensor's.

        Raises:
            ValueError: placements that do not fit, or a mesh of another kind of device; on every rank, before any
                communication.
            NotImplementedError: a dtype together with another mesh.
        """
        return _relayout(self, device_mesh, placements, async_op, forward_dtype, backward_dtype)

    def full_tensor(self, *, grad_placements: Sequence[Placement] | None = None) -> torch.Tensor:
        """Return the global value as a plain tensor on every rank; differentiable."""
        spec = self._spec
        if spec.replicated:  # the result shares this tensor's memory
            stop_keeping(self)
        replicated = redistribute(self, spec.with_placements([Replicate()] * spec.mesh.ndim))
        return replicated.to_local(grad_placements=grad_placements)

    def to_local(self, *, grad_placements: Sequence[Placement] | None = None) -> torch.Tensor:
        """Return the local tensor as a plain tensor; differentiable.

        Args:
            grad_placements: layout of the incoming gradient, if not the tensor's own: ``Partial()`` on an axis where
                the tensor is replicated and the ranks compute different things with it.
        """
        spec = self._spec
        self._reads = HANDED_OUT
        if grad_placements is None:
            return plainly(T.view_as, (), (self, self))
        converted = autograd.convert(self, spec, varying(spec, grad_placements))
        return plainly(autograd.AsView.apply, (), (converted,))

    # ---- metadata: global, or the local tensor's if interception is off ----
    @property
    def shape(self) -> torch.Size:
        is_global = torch_function_enabled() and not _compiler._is_compiling_flag
        if not is_global or (backward_id() != -1 and local_asked()):
            return plainly(get_shape, (), (self,))
        spec = self._spec
        try:
            return spec.size
        except AttributeError:
            spec.size = torch.Size(spec.shape)
            return spec.size

    @overrides(T.size)
    def size(self, dim: int | None = None) -> Any:
        shape = self.shape
        return shape if dim is None else shape[dim]

    @overrides(T.dim)
    def dim(self) -> int:
        return len(self.shape)

    ndimension = dim

    @overrides(T.numel)
    def numel(self) -> int:
        return self.shape.numel()

    nelement = numel

    @overrides(T.__len__)
    def __len__(self) -> int:
        if not self.ndim:
            raise TypeError("len() of a 0-d tensor")
        return self.shape[0]

    @overrides(T.stride)
    def stride(self, dim: int | None = None) -> Any:
        strides = (strides_of if torch_function_enabled() and not _compiler._is_compiling_flag else local_strides)(self)
        return strides if dim is None else strides[dim]

    @property
    def dtype(self) -> torch.dtype:
        return plainly(get_dtype, (), (self,))

    @property
    def device(self) -> torch.device:
        return plainly(get_device, (), (self,))

    @property
    def requires_grad(self) -> bool:
        return plainly(get_requires_grad, (), (self,))

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        plainly(set_requires_grad, (), (self, value))

    # ---- autograd ----
    @property
    def grad(self) -> torch.Tensor | None:
        if autograd.arriving_gradients:
            autograd.finish_gradients()
        grad = plainly(get_grad, (), (self,))
        if type(grad) is torch.Tensor and torch_function_enabled():
            if self._spec.partial and grad.requires_grad:
                raise RuntimeError(
                    f"grad of a DTensor placed {self._spec.placements} after backward(create_graph=True): the gradient"
                    " of each rank's term would be taken for the global one; use torch.autograd.grad(...,"
                    " create_graph=True), or reduce_partial() before it requires gradients"
                )
            wrap(grad, autograd.grad_spec(self._spec))
        return grad

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        if autograd.arriving_gradients:
            autograd.finish_gradients()
        if torch_function_enabled() and value is not None:
            if not isinstance(value, DTensor):
                raise TypeError(
                    f"grad of a DTensor must be a DTensor or None, got {type(value).__name__} of shape"
                    f" {tuple(value.shape)}"
                )
            if value._spec is not autograd.grad_spec(self._spec):
                raise ValueError(
                    f"grad is placed {value._spec.placements} and has shape {tuple(value._spec.shape)}, but the tensor"
                    f" needs {autograd.grad_spec(self._spec)}"
                )
        plainly(set_grad, (), (self, value))

    @property
    def data(self) -> torch.Tensor:
        stop_keeping(self)
        data = plainly(get_data, (), (self,))
        if torch_function_enabled():
            keep(wrap(data, self._spec), self)
            stop_keeping(data)
        return data

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        if torch_function_enabled() and not isinstance(value, DTensor):
            raise TypeError("data of a DTensor must be a DTensor: distribute_tensor(value, mesh, placements)")
        if isinstance(value, DTensor) and torch_function_enabled():
            self._spec = value._spec
            keep(self, value)
        autograd.retire_shadows(self)  # they share the old memory
        stop_keeping(self)
        plainly(set_data, (), (self, value))

    def register_hook(self, hook: Any) -> Any:
        autograd.make_way(self, hook)
        plainly(get_grad_fn, (), (self,))  # torch crashes if register_hook makes that of a view whose base changed
        return plainly(T.register_hook, (), (self, _on_local_gradient(self, hook)))

    # ---- copies, pickles, text ----
    def __deepcopy__(self, memo: dict[int, Any]) -> DTensor:
        if id(self) in memo:
            return memo[id(self)]
        if not self.is_leaf:
            raise RuntimeError("only DTensors that are leaves of the graph support deepcopy; detach() first")
        copied = wrap(plainly(T.clone, (), (local_view(self),)), self._spec)
        vars(copied).update({k: copy.deepcopy(v, memo) for k, v in self.__dict__.items() if k not in _OWN})
        memo[id(self)] = copied
        copied.requires_grad_(self.requires_grad)
        grad = self.grad
        if grad is not None:
            copied.grad = copy.deepcopy(grad, memo)
        return copied

    def __reduce_ex__(self, proto: Any) -> Any:
        state = {k: v for k, v in self.__dict__.items() if k not in _OWN}
        return _rebuild, (local_view(self), self._spec, self.requires_grad, state)

    def __create_write_items__(self, fqn: str, _: Any) -> list[Any]:
        return checkpoint.write_items(local_view(self), self._spec, fqn)

    def __create_chunk_list__(self) -> list[Any]:
        return checkpoint.chunk_list(self._spec)

    def __get_tensor_shard__(self, index: Any) -> torch.Tensor:
        return checkpoint.tensor_shard(local_view(self), self._spec, index)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        local = plainly(T.__repr__, (), (plainly(T.detach, (), (self,)),))
        return self._described(local, parameter=isinstance(self, torch.nn.Parameter))

    def __format__(self, spec: str) -> str:
        if self.dim() == 0 and (spec or all(placement.is_replicate() for placement in self._spec.placements)):
            return format(self.item(), spec)  # also in names that a model makes of a number
        return object.__format__(self, spec) if spec else repr(self)


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    return plainly(T.view_as, (), (tensor, tensor)) if isinstance(tensor, DTensor) else tensor


def redistribute(x: DTensor, spec: TensorSpec) -> DTensor:
    """Return ``x`` in layout ``spec``, a new DTensor that knows its source, so that its gradient moves only once."""
    if x._spec is spec:
        view = wrap(plainly(T.view_as, (), (x, x)), spec)
        keep(view, x)
        return view
    moved = wrap(plainly(autograd.move, (), (x, x._spec, spec)), spec)
    if moved.requires_grad:
        autograd.moved_from(moved, x)
    return moved


def redistribute_shared(x: torch.Tensor, spec: TensorSpec, src: TensorSpec | None = None) -> DTensor:
    """Redistribute once for consecutive readers, which get the same DTensor; don't write to it.

    Args:
        x: a DTensor, or a plain local tensor of layout ``src``.
        spec: the target layout.
        src: the layout of a plain ``x``.
    """
    stored = recall_shared(x, spec, src)
    if stored is not None:
        return stored
    value = x if isinstance(x, DTensor) else wrap(x.view_as(x), src or spec)
    return remember_shared(x, spec, src, value if value._spec is spec else redistribute(value, spec))


def _rebuild(local: torch.Tensor, spec: TensorSpec, requires_grad: bool, state: dict[str, Any]) -> DTensor:
    dtensor = wrap(local.detach(), spec)
    vars(dtensor).update(state)
    return dtensor.requires_grad_(requires_grad)  # type: ignore[return-value]
