"""DTensor: a MindSpore tensor with this rank's shard of a global tensor.

Note [A DTensor is its local tensor]
The class of a local tensor is set to DTensor, and its layout is an attribute. ``__fallback__`` intercepts kernels; the
local operation runs with interception off, so PyNative's autograd records plain local operations and the backward pass
runs without dispatch. A Parameter stays the same object: its class becomes one that is both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from mindspore import Parameter, Tensor, mint, ops
from mindspore._c_expression import TensorPy

from hp_dtensor.layout.distributed_tensor import DistributedTensor
from hp_dtensor.layout.placements import Placement, Replicate
from hp_dtensor.layout.spec import Layout, TensorSpec, as_placements, grad_spec, normalize, varying
from hp_dtensor.mesh.device_mesh import DeviceMesh
from hp_dtensor.mindspore.backward import autograd
from hp_dtensor.mindspore.backward.autograd import local_mode, local_only

_shape = TensorPy.shape.__get__
_DParameter: type[DTensor]
_from_local: Callable[..., DTensor]
_get_item: Callable[[DTensor, Any], Any]
_set_item: Callable[[DTensor, Any, Any], Any]
_dispatch: Callable[[Any, Any, Any], Any]


def install(parameter: type[DTensor], from_local: Any, get_item: Any, set_item: Any, dispatch: Any) -> None:
    """Set the class and functions that import this module themselves; called once, by `hp_dtensor.mindspore`.

    Args:
        parameter: the class of a Parameter that is a DTensor.
        from_local: the implementation of `DTensor.from_local`.
        get_item: the implementation of ``x[index]``.
        set_item: the implementation of ``x[index] = value``.
        dispatch: the implementation of ``__fallback__``.
    """
    global _DParameter, _from_local, _get_item, _set_item, _dispatch
    _DParameter, _from_local, _get_item, _set_item, _dispatch = parameter, from_local, get_item, set_item, dispatch


def wrap(local: Tensor, spec: TensorSpec) -> DTensor:
    """Turn ``local`` itself into a DTensor of layout ``spec``: set its class, add no autograd node.

    Args:
        local: the local tensor, of shape ``spec.local_shape``; not to be used as a plain tensor afterwards.
        spec: the layout.
    """
    if not isinstance(local, DTensor):
        local._plain_class = type(local)  # for a Parameter, a class that MindSpore creates
    if isinstance(local, Parameter):
        local.__class__ = _DParameter
    else:
        local.__class__ = DTensor
    local._spec = spec
    return local


def unwrap(tensor: DTensor) -> Tensor:
    """Turn a DTensor back into the plain tensor (or Parameter) that its local tensor is, in place: undo `wrap`."""
    # Parameter itself is not a Tensor: MindSpore creates Parameters of a class that is both.
    tensor.__class__ = Parameter._get_base_class(Tensor) if isinstance(tensor, Parameter) else Tensor
    return tensor


def local_of(tensor: Tensor) -> Tensor:
    if not isinstance(tensor, DTensor):
        return tensor
    return autograd.alias(tensor)


def local_view(tensor: Tensor) -> Tensor:
    """Return a plain tensor on the memory of a DTensor's local tensor (or of a plain tensor), outside autograd."""
    with local_mode():
        return ops.stop_gradient(tensor)


def _reflected(name: str, function: Any) -> Any:
    """Define an operator that Python tries before that of a plain left operand, which doesn't find ``__fallback__``."""
    of_number = getattr(Tensor, name)
    return lambda self, other: function(other, self) if isinstance(other, Tensor) else of_number(self, other)


class DTensor(DistributedTensor, Tensor):
    """A tensor distributed over a DeviceMesh.

    ``shape`` is the global shape. It has the operations of ``mindspore.Tensor``, whose results are those of a single
    device, distributed.

    Example:
        >>> mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))       # on 2 workers
        >>> x = distribute_tensor(mindspore.ops.arange(6.0), mesh, [Shard(0)])
        >>> x.to_local().shape, (x * 2).sum().item()
        ((3,), 30.0)
    """

    _plain_class: type

    # ---- creation ----
    @staticmethod
    def from_local(
        local_tensor: Tensor,
        device_mesh: DeviceMesh | Layout | None = None,
        placements: Sequence[Placement] | None = None,
        *,
        run_check: bool = False,
        shape: Sequence[int] | None = None,
        grad_placements: Sequence[Placement] | None = None,
    ) -> DTensor:
        """Create a DTensor from each rank's local tensor, which gets its part of the gradient.

        Args:
            local_tensor: this rank's local tensor.
            device_mesh: the mesh, or a ``Layout`` instead of mesh and placements.
            placements: one per axis; default ``Replicate()`` on all.
            run_check: compare shapes and replicated values over the ranks first; communicates.
            shape: global shape; required if shards are uneven.
            grad_placements: layout in which the local tensor gets its gradient, if not the one in which it arrives:
                with ``Partial()`` on an axis where the tensor is replicated or partial, each rank gets one term of it.

        Raises:
            ValueError: placements that do not fit the mesh or the tensor, a ``local_tensor`` that is not this rank's
                shard of ``shape``, or (``run_check``) ranks that disagree.
        """
        return _from_local(
            local_tensor, device_mesh, placements, run_check=run_check, shape=shape, grad_placements=grad_placements
        )

    # ---- layout ----
    layout = DistributedTensor.sharding

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of the local tensor."""
        return tuple(_shape(self))

    def redistribute(
        self,
        device_mesh: DeviceMesh | Layout | None = None,
        placements: Sequence[Placement] | None = None,
        *,
        async_op: bool = False,
        forward_dtype: Any = None,
        backward_dtype: Any = None,
    ) -> DTensor:
        """Return the same value in another layout; differentiable.

        Args:
            device_mesh: the tensor's own mesh (default), or a ``Layout``.
            placements: one per axis.
            async_op: accepted; the result is ready when the call returns.
            forward_dtype: dtype in which the value is sent, and of the result; default the tensor's.
            backward_dtype: dtype in which the gradient is sent, before it is cast back; default the tensor's.

        Raises:
            ValueError: a different mesh, or placements that do not fit.
        """
        mesh, target = as_placements(device_mesh, placements, self._spec.mesh, "redistribute")
        if mesh != self._spec.mesh:
            raise ValueError(
                f"redistribute: the tensor is on {self._spec.mesh}, asked for {mesh}; only the same mesh is supported "
                "(gather with full_tensor() and distribute_tensor() it anew)"
            )
        spec = self._spec.with_placements(normalize(target, mesh, len(self._spec.shape), "redistribute"))
        if forward_dtype is None and backward_dtype is None:
            return redistribute(self, spec)
        if spec is self._spec:  # nothing is sent
            return redistribute(self if forward_dtype is None else self.to(forward_dtype), spec)
        return wrap(autograd.move_in(self, self._spec, spec, forward_dtype, backward_dtype), spec)

    def full_tensor(self) -> Tensor:
        """Return the global value as a plain tensor on every rank; differentiable."""
        return local_of(redistribute(self, self._spec.with_placements([Replicate()] * self._spec.mesh.ndim)))

    def to_local(self, *, grad_placements: Sequence[Placement] | None = None) -> Tensor:
        """Return the local tensor as a plain tensor; differentiable.

        Args:
            grad_placements: layout of the incoming gradient, if not the tensor's own: ``Partial()`` on an axis where
                the tensor is replicated and the ranks compute different things with it.

        Raises:
            ValueError: a gradient layout that the tensor's own cannot have.
        """
        spec = self._spec
        if grad_placements is None:
            return local_of(self)
        return autograd.alias(autograd.convert(self, spec, varying(spec, grad_placements)))

    # ---- metadata: global, or the local tensor's in local mode ----
    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(_shape(self)) if local_only() else self._spec.shape

    def dim(self) -> int:
        return len(self.shape)

    ndimension = dim

    @property
    def size(self) -> int:
        count = 1
        for length in self.shape:
            count *= length
        return count

    def numel(self) -> int:
        return self.size

    nelement = numel

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of a 0-d tensor")
        return self.shape[0]

    def __iter__(self) -> Iterator[Any]:
        return (self[index] for index in range(len(self)))

    def expand_as(self, other: Any) -> Any:
        return ops.broadcast_to(self, tuple(other.shape))

    @property
    def T(self) -> Any:
        return ops.transpose(self, tuple(reversed(range(self.ndim))))

    # ---- values ----
    def item(self, *index: Any) -> Any:
        """Return the value of a one-element tensor, reduced or gathered first; every rank of the mesh must call it."""
        return (local_of(self) if local_only() else self.full_tensor()).item(*index)

    def __bool__(self) -> bool:
        return bool(self.item())

    def __int__(self) -> int:
        return int(self.item())

    def __float__(self) -> float:
        return float(self.item())

    def __index__(self) -> int:
        return int(self.item())

    def asnumpy(self) -> Any:
        """Return the values of a replicated tensor.

        Raises:
            ValueError: on a sharded or partial tensor, whose values this rank does not have.
        """
        if not local_only() and not self._spec.replicated:
            raise ValueError(
                f"asnumpy: this rank has only a part of a DTensor placed {self._spec.placements}; write"
                " full_tensor().asnumpy() for the global values, to_local().asnumpy() for the local ones"
            )
        return TensorPy.asnumpy(local_view(self))

    numpy = asnumpy

    def tolist(self) -> Any:
        return self.asnumpy().tolist()

    def __array__(self, dtype: Any = None) -> Any:
        return self.asnumpy() if dtype is None else self.asnumpy().astype(dtype)

    # ---- indexing ----
    def __getitem__(self, index: Any) -> Any:
        return _get_item(self, index)

    def __setitem__(self, index: Any, value: Any) -> Any:
        return _set_item(self, index, value)

    __radd__ = _reflected("__radd__", ops.add)
    __rsub__ = _reflected("__rsub__", ops.sub)
    __rmul__ = _reflected("__rmul__", ops.mul)
    __rtruediv__ = _reflected("__rtruediv__", ops.div)
    __rfloordiv__ = _reflected("__rfloordiv__", ops.floor_div)
    __rmod__ = _reflected("__rmod__", mint.remainder)
    __rpow__ = _reflected("__rpow__", ops.pow)
    __rmatmul__ = _reflected("__rmatmul__", ops.matmul)

    # ---- autograd ----
    def register_hook(self, hook: Any) -> Any:
        """Call ``hook`` with the gradient, a DTensor in the gradient's own layout."""
        spec = grad_spec(self._spec)

        def on_local(grad: Tensor) -> Any:
            replacement = hook(wrap(local_view(grad), spec))
            if isinstance(replacement, DTensor):
                replacement = local_of(replacement if replacement._spec is spec else redistribute(replacement, spec))
            return replacement

        return Tensor.register_hook(self, on_local)

    # ---- interception ----
    def __fallback__(self, func: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _dispatch(func, args, kwargs or {})

    # ---- copies, text ----
    def __deepcopy__(self, memo: dict[int, Any]) -> DTensor:
        if id(self) not in memo:
            with local_mode():
                memo[id(self)] = wrap(ops.stop_gradient(self).copy(), self._spec)
        return memo[id(self)]

    def __getstate__(self) -> Any:
        raise TypeError("a DTensor can't be pickled on MindSpore; pickle to_local() and the layout")

    def __repr__(self) -> str:
        if local_only():
            return repr(local_view(self))
        return self._described(repr(local_view(self)), parameter=isinstance(self, Parameter))

    __str__ = __repr__


def redistribute(x: DTensor, spec: TensorSpec) -> DTensor:
    """Return ``x`` in layout ``spec``, a new DTensor."""
    if x._spec is spec:
        return wrap(local_of(x), spec)
    return wrap(autograd.move(x, x._spec, spec), spec)


def redistribute_shared(x: Tensor, spec: TensorSpec, src: TensorSpec | None = None) -> DTensor:
    """Redistribute once for consecutive readers, which get the same DTensor; don't write to it.

    Args:
        x: a DTensor, or a plain local tensor of layout ``src``.
        spec: the target layout.
        src: the layout of a plain ``x``.
    """
    recorded = autograd.grad_enabled() and x._requires_grad
    stored = autograd.recall(x, spec, ("shared", src), recorded)
    if stored is not None:
        return stored
    value = x if isinstance(x, DTensor) else wrap(autograd.alias(x), src or spec)
    moved = value if value._spec is spec else redistribute(value, spec)
    return autograd.remember(x, spec, ("shared", src), recorded, moved)
