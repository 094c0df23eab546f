"""Functions that no sharding rule decides: metadata, autograd, values read out, optimizers' list functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.optim.optimizer as optimizers
from torch.utils import _foreach_utils

from hp_dtensor.layout.placements import Partial, RaggedShard, Replicate, Shard, StridedShard
from hp_dtensor.layout.spec import TensorSpec
from hp_dtensor.layout.spec import _rebuild as rebuild_spec
from hp_dtensor.mesh.device_mesh import DeviceMesh
from hp_dtensor.mesh.device_mesh import _rebuild as rebuild_mesh
from hp_dtensor.rules.library import dims_argument
from hp_dtensor.torch import checkpoint
from hp_dtensor.torch.backward import autograd, autograd_functions, engine
from hp_dtensor.torch.compile.overrides import Override
from hp_dtensor.torch.dtensor import DTensor, local_view, wrap
from hp_dtensor.torch.dtensor import _rebuild as rebuild
from hp_dtensor.torch.ops import composites, indexing, lists, parallel_loss, random, whole
from hp_dtensor.torch.ops.dispatching import dispatch
from hp_dtensor.torch.ops.dispatching.calls import tensors_of
from hp_dtensor.torch.ops.functions import bind
from hp_dtensor.torch.ops.whole import on_whole
from hp_dtensor.torch.views.kept import stop_keeping
from hp_dtensor.torch.views.strides import keep, note, on_one_device
from hp_platform.torch.internals import get_is_leaf, getter, plainly, setter, torch_function_enabled

T = torch.Tensor


def new(func: Any, args: Any, kwargs: Any) -> Any:
    """``x.new_zeros(size)`` on x's mesh: laid out as x where it has x's shape, else replicated."""
    x, spec = args[0], args[0]._spec
    size_argument = args[1] if len(args) > 1 else kwargs.get("size", ())
    size = tuple(size_argument) if isinstance(size_argument, (tuple, list)) else args[1:]
    if func is T.new_tensor or size != spec.shape:
        out = plainly(func, (), args, kwargs)
        return wrap(out, TensorSpec.of(spec.mesh, [Replicate()] * spec.mesh.ndim, out.shape))
    spec = spec.with_placements([Replicate() if p.is_partial() else p for p in spec.placements])
    rest = args[2:] if isinstance(size_argument, (tuple, list)) else ()
    return wrap(plainly(func, (), (x, spec.local_shape, *rest), {n: v for n, v in kwargs.items() if n != "size"}), spec)


def new_strided(func: Any, args: Any, kwargs: Any) -> Any:
    """``x.new_empty_strided(size, stride)``: as above, where the strides are those of dims in another order."""
    x, spec, size, stride = args[0], args[0]._spec, tuple(args[1]), tuple(args[2])
    order = sorted(range(len(size)), key=lambda dim: (stride[dim], -dim))
    if size != spec.shape or stride != _dense(size, order):
        out = plainly(func, (), args, kwargs)
        return wrap(out, TensorSpec.of(spec.mesh, [Replicate()] * spec.mesh.ndim, out.shape))
    spec = spec.with_placements([Replicate() if p.is_partial() else p for p in spec.placements])
    order = order if len(order) == len(spec.local_shape) else range(len(spec.local_shape))[::-1]
    return wrap(plainly(func, (), (x, spec.local_shape, _dense(spec.local_shape, order)), kwargs), spec)


def _dense(size: Sequence[int], order: Sequence[int]) -> tuple[int, ...]:
    """Strides without gaps, ``order`` from the innermost dim to the outermost."""
    strides, step = [1] * len(size), 1
    for dim in order:
        strides[dim] = step
        step *= max(size[dim], 1)
    return tuple(strides)


Handler = Callable[[Any, Any, Any], Any]


def _local(func: Any, args: Any, kwargs: Any) -> Any:
    """On the local tensor, the result as it is."""
    if len(args) == 1 and not kwargs:
        dispatch.remember_plain(func, args[0]._spec)
    return plainly(func, (), args, kwargs)


def _same(func: Any, args: Any, kwargs: Any) -> Any:
    """On the local tensor; the result has the operand's layout."""
    out = plainly(func, (), args, kwargs)
    if type(out) is T:
        spec = args[0]._spec
        wrap(out, spec)
        if spec.thin:
            keep(out, args[0])
    return out


def _detach(func: Any, args: Any, kwargs: Any) -> Any:
    """As ``_same``; of a leaf it may be the way to an array of numpy's on the same memory."""
    out = _same(func, args, kwargs)
    try:
        leaf = plainly(get_is_leaf, (), (args[0],))
    except RuntimeError:  # one of several views, of which another was written: autograd tells nothing of its graph
        leaf = False
    if out is args[0] or leaf:
        stop_keeping(args[0])
        stop_keeping(out)
    return out


def _read(func: Any, args: Any, kwargs: Any) -> Any:
    """``item``, ``tolist``, ``bool(x)``: the whole value, gathered where it has to be."""
    return func(local_view(args[0].full_tensor()), *args[1:], **kwargs)


def _watch(func: Any, args: Any, kwargs: Any) -> Any:
    """``register_post_accumulate_grad_hook``: from now on the leaf's gradient is summed before it is accumulated."""
    autograd.retire_shadows(args[0])
    hook = args[1] if len(args) > 1 else kwargs["hook"]

    def run(leaf: Any) -> None:
        autograd.note_call(leaf)
        hook(leaf)

    return plainly(func, (), (args[0], run))


def _retain(func: Any, args: Any, kwargs: Any) -> Any:
    """``retain_grad``."""
    autograd.refuse_late(args[0], "retain_grad")
    return plainly(func, (), args, kwargs)


def _component(part: Any) -> property:
    """``x.real`` and ``x.imag``, which torch sets without interception."""
    return property(lambda x: part(x), lambda x, value: part(x).copy_(value))


def _data(func: Any, args: Any, kwargs: Any) -> Any:
    return args[0].data


# ---- extremes: as parts of a maximum without gradients, of the whole with them ----
def _amax(input: Any, dim: Any = (), keepdim: bool = False) -> Any:
    return torch.amax(input, dim, keepdim)


def _amin(input: Any, dim: Any = (), keepdim: bool = False) -> Any:
    return torch.amin(input, dim, keepdim)


def _prod(input: Any, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> Any:
    return torch.prod(input, dtype=dtype) if dim is None else torch.prod(input, dim, keepdim, dtype=dtype)


def _max_dim(input: Any, dim: Any, keepdim: bool = False) -> Any:
    return torch.max(input, dim, keepdim)


def _min_dim(input: Any, dim: Any, keepdim: bool = False) -> Any:
    return torch.min(input, dim, keepdim)


def _larger(input: Any, other: Any) -> Any:
    return torch.maximum(input, other)


def _smaller(input: Any, other: Any) -> Any:
    return torch.minimum(input, other)


def _elementwise(complete: Any) -> Handler:
    """Return the larger or the smaller of two."""

    def handle(func: Any, args: Any, kwargs: Any) -> Any:
        watched = torch.is_grad_enabled() and any(t.requires_grad for t in tensors_of(args, kwargs))
        return dispatch.planned(complete if watched else func, args, kwargs)

    return handle


def _reduced(complete: Any) -> Handler:
    def handle(func: Any, args: Any, kwargs: Any) -> Any:
        x = args[0] if args else kwargs["input"]
        chosen = complete if torch.is_grad_enabled() and x.requires_grad else func
        return dispatch.planned(chosen, args, kwargs)

    return handle


def _extreme(by_dim: Any, elementwise: Any, complete: Any, parts: Any) -> Handler:
    def handle(func: Any, args: Any, kwargs: Any) -> Any:
        other = args[1] if len(args) > 1 else kwargs.get("other", kwargs.get("dim"))
        if isinstance(other, T):
            return elementwise(args[0], other)
        if other is not None:
            return dispatch.planned(by_dim, args, kwargs)
        x = args[0] if args else kwargs["input"]
        return _reduced(complete)(parts, (x,), {})

    return handle


# ---- shapes taken from another tensor ----
def _shaped_as(func: Any) -> Handler:
    def handle(_: Any, args: Any, kwargs: Any) -> Any:
        x, other = args[0], args[1] if len(args) > 1 else kwargs["other"]
        view = func(x, other.shape)
        if x is other and x.requires_grad and x.is_leaf:
            view._shows = x
        return view

    return handle


def _graph_node(func: Any, args: Any, kwargs: Any) -> Any:
    """``grad_fn``; of ``leaf.view_as(leaf)`` it is the way to the leaf's own node: ``get_gradient_edge`` takes it."""
    leaf = args[0].__dict__.get("_shows")
    if leaf is not None:
        engine.give_node(leaf)
    return plainly(func, (), args, kwargs)


def _reshaping(base: Any) -> Handler:
    """``t_`` and its kin: the layout changes with the local part, which stays where it is."""

    def handle(func: Any, args: Any, kwargs: Any) -> Any:
        x = args[0]
        plan = dispatch.plan_for(base, args, kwargs)
        if plan.fixes:
            raise NotImplementedError(
                f"{func.__name__} of a DTensor of shape {tuple(x.shape)} placed {x._spec.placements}: it would have to"
                f" be redistributed; use {base.__name__}"
            )
        if base is torch.squeeze:  # by the sizes of the whole: a part may have others of size 1
            asked = dims_argument(args[1] if len(args) > 1 else kwargs.get("dim"), x.dim())
            args, kwargs = (x, tuple(dim for dim in asked if x.shape[dim] == 1)), {}
        after, _ = on_one_device(base, x, args, kwargs)
        if not any(isinstance(p, RaggedShard) for p in x._spec.placements):  # its part is flat
            plainly(func, (), args, kwargs)
            if plainly(T.size, (), (x,)) != plan.spec.local_shape:  # another of several dims of size 1 is cut
                _reshape_nothing(x, plan.spec.local_shape)
        x._spec = plan.spec
        note(x, after[0].stride())
        return x

    return handle


def _reshape_nothing(x: Any, shape: tuple[int, ...]) -> None:
    """Change the shape of an empty local tensor by views: the gradient of ``as_strided_`` fails without elements.

    Args:
        x: whose part has the dims of ``shape`` in another order, those of size 1 apart.
        shape: what the part becomes.
    """
    plainly(T.squeeze_, (), (x,))
    for dim, size in enumerate(size for size in shape if size != 1):
        found = plainly(T.size, (), (x,)).index(size, dim)
        if found != dim:
            plainly(T.transpose_, (), (x, dim, found))
    for dim, size in enumerate(shape):
        if size == 1:
            plainly(T.unsqueeze_, (), (x, dim))


# ---- metadata ----
def _same_size(func: Any, args: Any, kwargs: Any) -> bool:
    return args[0].shape == (args[1] if len(args) > 1 else kwargs["other"]).shape


def _get_item(func: Any, args: Any, kwargs: Any) -> Any:
    """``x[index]``: a short key for indices of ints, slices, None and ``...``."""
    x, index = args
    if type(x) is not DTensor:
        return indexing.get_item(func, args, on_whole)
    key: list[Any] = [func, "index", x._spec]  # not a key that (func, spec, True) equals where an index is 1
    for item in index if type(index) is tuple else (index,):
        kind = type(item)
        if kind is slice:
            key += (slice, item.start, item.stop, item.step)
        elif kind is int or item is None or item is Ellipsis:
            key.append(item)
        else:
            return indexing.get_item(func, args, on_whole)
    try:
        plan = dispatch._PLANS.get(tuple(key))
    except TypeError:  # bounds that are not ints
        return indexing.get_item(func, args, on_whole)
    if plan is None:
        if any(isinstance(part, T) for part in key):
            return indexing.get_item(func, args, on_whole)
        plan = dispatch.plan_of(tuple(key), func, args, kwargs)
    return plan.run(args, kwargs)


def _item(self: Any, index: Any) -> Any:
    """``x[index]`` without an interception, which takes as long as all the rest."""
    if type(self) is DTensor and torch_function_enabled():
        return _get_item(T.__getitem__, (self, index), {})
    return T.__getitem__(self, index)


def install() -> None:
    """Register the handlers; called once, when hp_dtensor's torch side is imported."""
    table = dispatch._SPECIAL
    getters = """is_leaf is_cuda is_cpu is_sparse is_quantized is_meta is_mkldnn is_mps is_xla is_xpu is_npu
        is_nested _version output_nr retains_grad names layout itemsize nbytes is_ipu is_maia is_vulkan is_mtia
        is_sparse_csr volatile grad_dtype name _backward_hooks _post_accumulate_grad_hooks _base _grad_fn _cdata"""
    for name in getters.split():
        if hasattr(T, name) and hasattr(getattr(T, name), "__get__"):
            table[getter(name)] = _local
    table[getter("grad_fn")] = _graph_node
    for name in "_backward_hooks _post_accumulate_grad_hooks _grad grad_dtype name names retains_grad volatile".split():
        if hasattr(T, name):  # torch itself sets hooks on the base of a view that is written
            table[setter(name)] = _local
    for part in (torch.real, torch.imag):
        setattr(DTensor, part.__name__, _component(part))
    for name in """data_ptr element_size untyped_storage storage_offset is_floating_point is_complex is_signed
        is_contiguous get_device is_inference is_pinned is_shared share_memory_ __hash__
        _is_view is_conj is_neg storage _typed_storage is_set_to dim_order
        record_stream is_coalesced is_distributed _is_zerotensor const_data_ptr""".split():
        if hasattr(T, name):
            table[getattr(T, name)] = _local
    for name in """is_floating_point is_complex is_conj is_neg is_inference is_signed get_device
        _has_compatible_shallow_copy_type""".split():
        table[getattr(torch, name)] = _local
    table[T.detach] = table[torch.detach] = table[T.detach_] = _detach
    table[T.requires_grad_] = table[T.pin_memory] = _same
    table[getter("data")] = _data
    table[T.is_same_size] = table[torch.is_same_size] = _same_size
    table[torch.numel] = lambda func, args, kwargs: (args[0] if args else kwargs["input"]).numel()
    table[T.__reversed__] = lambda func, args, kwargs: args[0].flip(0) if args[0].dim() else args[0]
    table[T.register_post_accumulate_grad_hook] = _watch
    table[T.retain_grad] = _retain
    read = "item tolist numpy __bool__ __float__ __int__ __index__ __complex__ __contains__ __array__ is_nonzero"
    for name in read.split():
        if hasattr(T, name):
            table[getattr(T, name)] = _read
    table[torch.is_nonzero] = _read
    table.update(whole.special())
    table.update(composites.special())
    table.update(parallel_loss.special())
    table[torch.linalg.vector_norm] = lists.vector_norm
    table[torch.norm] = table[torch.functional.norm] = table[T.norm] = lists.norm
    table[torch.linalg.norm] = lists.linalg_norm
    table[torch.stack] = lists.stack
    table[T.__getitem__] = _get_item
    DTensor.__getitem__ = Override(T.__getitem__, _item)
    table[T.view_as], table[T.reshape_as], table[T.expand_as] = map(_shaped_as, (T.view, T.reshape, T.expand))
    table[T.__setitem__] = indexing.set_item
    table[T.index_put_] = table[torch.index_put_] = indexing.index_put_
    table[T.index_put] = table[torch.index_put] = indexing.index_put
    for name, handler in (("select_scatter", indexing.select_scatter), ("slice_scatter", indexing.slice_scatter)):
        table[getattr(torch, name)] = table[getattr(T, name)] = handler
    for name in "t transpose swapaxes swapdims squeeze unsqueeze".split():
        table[getattr(T, f"{name}_")] = _reshaping(getattr(torch, name))
    DTensor.backward = engine.backward_of
    DTensor.set_ = checkpoint.set_  # type: ignore[method-assign,assignment]
    table[torch.autograd.backward] = engine.backward
    table[torch.autograd.grad] = engine.grad
    for name in "new_zeros new_ones new_empty new_full new_tensor".split():
        table[getattr(T, name)] = new
    table[T.new_empty_strided] = new_strided
    for place in (torch, T):
        for name, complete in (("amax", _amax), ("amin", _amin), ("prod", _prod)):
            table[getattr(place, name)] = _reduced(complete)
        table[place.maximum], table[place.minimum] = _elementwise(_larger), _elementwise(_smaller)
        table[place.max] = _extreme(_max_dim, torch.maximum, _amax, torch.amax)
        table[place.min] = _extreme(_min_dim, torch.minimum, _amin, torch.amin)
    bind("pointwise", [_larger, _smaller])
    one = ("input dim=None keepdim=False dtype=None", "input")
    for func in (_amax, _amin, _prod, _max_dim, _min_dim):
        bind("whole_reduction", func, *one)
    for name in dir(torch):
        if name.startswith("_foreach_") or (
            name.startswith("_fused_") and name.endswith("_") and ("adam" in name or "sgd" in name or "adagrad" in name)
        ):
            table[getattr(torch, name)] = lists.each
    for types in (optimizers._foreach_supported_types, _foreach_utils._foreach_supported_types):
        types.append(DTensor)  # else torch's optimizers and clipping call functions of one tensor for each
    table[torch._amp_foreach_non_finite_check_and_unscale_] = engine.unscale
    table[torch._foreach_norm], table[torch._foreach_max] = lists.foreach_norm, lists.largest
    for name in ("_foreach_mm", "_foreach_powsum"):  # not element by element
        if hasattr(torch, name):
            table[getattr(torch, name)] = lists.one_by_one
    table.update(random.special())
    table.update(autograd_functions.special())
    autograd_functions.watch()
    layouts: list[Any] = [Partial, RaggedShard, Replicate, Shard, StridedShard, DeviceMesh, rebuild_mesh, rebuild_spec]
    torch.serialization.add_safe_globals([*layouts, rebuild])  # what torch.load makes of a file that nobody vouches for
