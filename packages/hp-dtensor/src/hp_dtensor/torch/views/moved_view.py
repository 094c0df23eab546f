"""Views that had to be redistributed, and their local tensors: they show their source, and writes to them reach it.

Note [A view that moved]
A view along a sharded dim can't share the memory of its source if its elements come from other ranks. Such a result is
of a class of its own, which knows its source and its position there. Every operation and method goes through that
class: if the source was written to since, the view is taken again, in place and in the graph, as autograd does for a
view on a single device; a write to the view is written to the source. A view of such a view usually shares its memory,
and follows it. Dispatch checks for DTensor itself, so all other tensors pay nothing.

If no version counter tells whether the source was written to (its memory was exposed, or it is an inference tensor),
the view is taken again at each read, without a change of its own version counter, just as the write was.

Note [The local tensor of a view that moved]
``to_local()`` exposes the memory of a DTensor, but for a view that moved (Note [A view that moved] in `moved_view`)
that memory is a copy. Ranks may compute different things with local tensors, so nothing may be communicated there: a
write cannot be sent to the source, and the source's new values cannot be fetched. Such a local tensor is of a class of
its own, which refuses both, on each rank by itself. A DTensor created from it is again a view of the source.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hp_dtensor.functions import implicit_replication
from hp_dtensor.layout.placements import Placement
from hp_dtensor.torch.dtensor import DTensor, redistribute
from hp_dtensor.torch.ops.dispatching.calls import functions_of, tensors_of, writes_first
from hp_dtensor.torch.views.kept import HANDED_OUT
from hp_dtensor.torch.views.overlaps import refuse_overlaps_of_call
from hp_dtensor.torch.views.strides import note, on_one_device, storage_of
from hp_platform.extend import list_leaves
from hp_platform.torch.internals import (
    get_base,
    get_data,
    get_is_leaf,
    get_requires_grad,
    get_version,
    getter,
    plainly,
    torch_function_enabled,
    without_torch_function,
)

T = torch.Tensor
_ASKING = frozenset("__get__ __hash__ __len__ size dim numel stride is_contiguous element_size".split())
"""Functions that read no value."""


class PartOfView(torch.Tensor):
    """The local tensor of a view that moved."""

    _view: Any

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        written = args[:1] if writes_first(func) or kwargs.get("inplace") else ()
        for part in _parts([written, kwargs.get("out")]):
            if func is not T.requires_grad_:
                raise RuntimeError(
                    f"{name}: {_shown(part)}. It is a copy, and a write to it can't reach the DTensor of which it is a"
                    " view; write to the view itself, before to_local(), or clone() the local tensor"
                )
        parts = list(_parts([args, kwargs]))
        for part in parts:
            if name not in _ASKING and _is_stale(part._view):
                raise RuntimeError(
                    f"{name}: {_shown(part)}, and the DTensor of which it is a view was written to since; call"
                    " to_local() of the view again, or clone() the local tensor before the write"
                )
        if any(kind is not PartOfView and kind.__torch_function__ is not plainly for kind in types):
            # A DTensor treats plain tensors as replicated, or refuses them.
            return func(*_plain(args), **_plain(kwargs))
        out = plainly(func, types, args, kwargs)
        for result in list_leaves(out):
            for part in parts:
                if type(result) is T and storage_of(result)._cdata == storage_of(part)._cdata:
                    part_of(part._view, result)
        return out

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        return copy.deepcopy(plainly(T.view_as, (), (self, self)), memo)

    def __reduce_ex__(self, proto: Any) -> Any:
        return plainly(T.view_as, (), (self, self)).__reduce_ex__(proto)


def part_of(view: Any, part: torch.Tensor) -> PartOfView:
    """Turn ``part`` itself into the local tensor of a view.

    Args:
        view: the view that moved.
        part: a plain tensor on its memory.
    """
    result: Any = part
    result.__class__ = PartOfView
    result._view = view
    return result


def _is_stale(view: Any) -> bool:
    """Tell whether the source of ``view`` is stale itself, or was written to since the view was taken."""
    link = view.__dict__.get("_link")
    if link is None:
        return False
    if link.take is None:  # it shares the memory of its source
        return _is_stale(link.source)
    if storage_of(link.source)._cdata != link.storage._cdata:  # the view stays on the old storage
        return False
    counted = link.version is not None and link.version != plainly(get_version, (), (link.source,))
    return counted or _is_stale(link.source)


def whole_of(part: torch.Tensor) -> tuple[Any, torch.Tensor]:
    """Return the view whose local tensor is ``part``, None for any other tensor; and ``part`` as a plain tensor."""
    return (part._view, _plain(part)) if type(part) is PartOfView else (None, part)


def _shown(part: Any) -> str:
    return f"the local tensor of shape {tuple(plainly(T.size, (), (part,)))} is of a view that had to be redistributed"


def _plain(value: Any) -> Any:
    if type(value) is PartOfView:
        return plainly(T.view_as, (), (value, value))
    if type(value) in (list, tuple):
        return type(value)(map(_plain, value))
    return {name: _plain(item) for name, item in value.items()} if type(value) is dict else value


def _parts(value: Any) -> Iterator[PartOfView]:
    return (each for each in list_leaves(value) if type(each) is PartOfView)


WHOLE = frozenset(functions_of("view reshape flatten unflatten squeeze unsqueeze ravel view_as reshape_as"))
"""Views of all elements in their order."""
MAY_COPY = frozenset(functions_of("reshape flatten ravel reshape_as contiguous"))
"""Functions that return a view of all elements in their order if strides allow it, otherwise a copy."""
_ALONG = {
    func: names.split()
    for names, funcs in (
        ("input dim index", "select"),
        ("input dim start length", "narrow"),
        ("input dim", "unbind"),
        ("input sections dim", "chunk unsafe_chunk split split_with_sizes unsafe_split tensor_split"),
    )
    for func in functions_of(funcs)
}
"""Views that are an index along one dim, or several consecutive ones, with the names of their arguments."""
VIEWS = frozenset(
    [
        *WHOLE,
        *_ALONG,
        *functions_of(
            """permute transpose swapdims swapaxes movedim moveaxis t adjoint expand expand_as broadcast_to diagonal
            view_as_real view_as_complex real imag detach hsplit vsplit dsplit alias"""
        ),
        *(T.__getitem__, T.unfold, torch.ops.aten.slice, torch.ops.aten.slice.Tensor),
        *(getter(name) for name in ("T", "mT", "H", "mH", "real", "imag")),
    ]
)
"""Functions that return views of one tensor on a single device."""
_SEVERAL = frozenset(functions_of("broadcast_tensors atleast_1d atleast_2d atleast_3d"))
"""Functions that return views of several tensors, each by one of ``VIEWS``."""
_LISTS = frozenset(getattr(torch, name) for name in dir(torch) if name.startswith("_foreach_"))
_RESHAPING = frozenset(getattr(T, f"{name}_") for name in "t transpose swapaxes swapdims squeeze unsqueeze".split())


@dataclass(slots=True)
class _Link:
    """The relation of a view to its source.

    Attributes:
        source: a DTensor, which may be a view that moved itself.
        take: takes the view again; None if it shares the memory of the source.
        put: writes the view to the source.
        version: the source's version when the view was taken; None if it has no version counter.
        recorded: the view was taken with gradients enabled.
        storage: the source's storage when the view was taken. After ``source.data = other`` the view stays on the old
            one, as on a single device.
        spec: the source's layout when the view was taken.
        shows: returns the elements of the source that the view shows, as ``take`` does; None for all, in their order.
    """

    source: Any
    take: Callable[[Any], Any] | None
    put: Callable[[Any, Any], None]
    version: int | None
    recorded: bool
    storage: Any
    spec: Any
    shows: Callable[[Any], Any] | None


class MovedView(DTensor):
    """A DTensor that is a view of another one, but a copy in memory. See Note [A view that moved]."""

    @property
    def _spec(self) -> Any:
        _follow(self)
        return self.__dict__["_spec"]

    @_spec.setter
    def _spec(self, spec: Any) -> None:
        vars(self)["_spec"] = spec

    @property
    def data(self) -> torch.Tensor:
        result: Any = DTensor.data.fget(self)  # type: ignore[attr-defined]
        return shares(result, self) if torch_function_enabled() else result

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        del vars(self)["_link"]
        self.__class__ = DTensor  # type: ignore[assignment]  # it is no longer a view
        self.data = value

    def to_local(self, *, grad_placements: Sequence[Placement] | None = None) -> torch.Tensor:
        return part_of(self, super().to_local(grad_placements=grad_placements))

    def full_tensor(self, *, grad_placements: Sequence[Placement] | None = None) -> torch.Tensor:
        full = super().full_tensor(grad_placements=grad_placements)
        return full.clone() if self._spec.replicated else full  # a write to it would not reach the source

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        with _as_dtensors([self]):
            return DTensor.__repr__(self)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        views = list({id(x): x for x in _views((args, kwargs))}.values())
        if func in _RESHAPING:
            raise NotImplementedError(
                f"{func.__name__} of a DTensor of shape {tuple(args[0].shape)} that is a view of another one and had to"
                f" be moved: use {func.__name__[:-1]}, or clone() it first"
            )
        if func in _SEVERAL:
            return super().__torch_function__(func, types, args, kwargs)
        if func is not T.__hash__:
            for view in views:
                _follow(view)
            views = [view for view in views if type(view) is MovedView]
        if func is not T.__setitem__:
            refuse_overlaps_of_call(func, args, kwargs)
        before = [_counted(view) for view in views]
        with _as_dtensors(views):
            out = func(*args, **kwargs)
        for view, then in zip(views, before, strict=True):
            counted = then is not None and func not in _LISTS  # torch_npu's kernels for lists don't count writes
            if then != _counted(view) if counted else _writes(func, view, args, kwargs):
                _pass_on(view)
        return _views_of_views(func, args, kwargs, out, views) if func in VIEWS else out


# ---- creation ----
def link(out: Any, func: Any, args: Any, kwargs: Any) -> Any:
    """Make the results of a view that moved follow their source.

    Args:
        out: the result of ``func``: a DTensor or several.
        func: one of ``VIEWS``.
        args: its positional arguments, beginning with the source unless that is passed as ``input``.
        kwargs: its keyword arguments.
    """
    source = args[0] if args else kwargs["input"]
    if not isinstance(source, DTensor) or _picks(func, args):
        return out
    metas, is_view = on_one_device(func, source, args, kwargs)
    return linked(out, source, func, args, kwargs, metas) if is_view else out


def linked(out: Any, source: Any, func: Any, args: Any, kwargs: Any, metas: Sequence[torch.Tensor]) -> Any:
    """Make results follow their source as ``link`` does; ``metas`` are a single device's views, on meta."""
    several = isinstance(out, (list, tuple))
    views = [_linked(x, source, func, args, kwargs, n if several else None, out) for n, x in enumerate(_listed(out))]
    for view, meta in zip(views, metas, strict=True):
        note(view, meta.stride())
    return type(out)(views) if several else views[0]


def _linked(x: Any, source: Any, func: Any, args: Any, kwargs: Any, which: int | None, out: Any) -> Any:
    spec = x._spec
    if plainly(get_requires_grad, (), (x,)) and func not in _EXPANDING:
        # its own memory: autograd forbids writes to one of several views, and to a view that a function returned
        x = plainly(T.clone, (), (x,))
    take, put = _ways(source, func, args, kwargs, which, out)
    x.__class__ = MovedView
    x.__dict__["_spec"] = spec
    x.__dict__["_link"] = _Link(
        source, take, put, _counted(source), torch.is_grad_enabled(), storage_of(source), source._spec, take
    )
    return x


_EXPANDING = frozenset(functions_of("expand expand_as broadcast_to"))


def shares(x: Any, source: Any, shows: Callable[[Any], Any] | None = None) -> Any:
    """Make ``x``, which shares the memory of the view ``source``, follow it."""
    x.__class__ = MovedView
    x.__dict__["_link"] = _Link(source, None, lambda source, _: None, None, torch.is_grad_enabled(), None, None, shows)
    return x


def _views_of_views(func: Any, args: Any, kwargs: Any, out: Any, views: list[Any]) -> Any:
    source = args[0] if args else kwargs.get("input")
    if type(source) is not MovedView or _picks(func, args):
        return out
    if func in (T.__getitem__, *MAY_COPY) and not on_one_device(func, source, args, kwargs)[1]:
        return out
    memory = storage_of(source)._cdata
    for n, x in enumerate(_listed(out)):
        which = n if isinstance(out, (list, tuple)) else None
        if type(x) is DTensor:  # not moved; even if it is a copy on one rank only, all ranks take the same steps
            if storage_of(x)._cdata == memory:
                shares(x, source, _taking(func, args, kwargs, which))
            else:
                _linked(x, source, func, args, kwargs, which, out)
    return out


def _picks(func: Any, args: Any) -> bool:
    """Tell whether ``func`` is indexing by tensors, which returns a copy."""
    return func is T.__getitem__ and any(True for _ in tensors_of(args[1:], {}))


# ---- a view's position ----
def _ways(source: Any, func: Any, args: Any, kwargs: Any, which: int | None, out: Any) -> tuple[Any, Any]:
    """Return the functions that take the view again and that write it to the source."""
    index = _index(source, func, args, kwargs, which, out)
    if index is not None:
        return lambda source: source[index], lambda source, view: source.__setitem__(index, view)
    take = _taking(func, args, kwargs, which)
    if func in WHOLE or func in MAY_COPY:
        return take, lambda source, view: source.copy_(view.reshape(source.shape))

    def put(source: Any, view: Any) -> None:
        shape = source.shape
        positions = take(torch.arange(shape.numel(), device=source.device).view(shape))
        if func in _EXPANDING and positions.unique().numel() != positions.numel():
            raise RuntimeError(
                f"unsupported operation: {func.__name__} returned a view of shape {tuple(view.shape)} that has elements"
                f" of the DTensor of shape {tuple(shape)} several times; clone() it before writing to it"
            )
        with implicit_replication():
            source[torch.unravel_index(positions, shape)] = view

    return take, put


def _taking(func: Any, args: Any, kwargs: Any, which: int | None) -> Callable[[Any], Any]:
    """Return a view, the ``which``-th of several, as a function of its source."""
    rest, named = args[1:], {name: value for name, value in kwargs.items() if name != "input"}

    def take(source: Any) -> Any:
        views = func(source, *rest, **named)
        return views if which is None else views[which]

    return take


def _index(source: Any, func: Any, args: Any, kwargs: Any, which: int | None, out: Any) -> Any:
    """Return the view as an index of ints and slices, or None."""
    if func is T.__getitem__:
        return args[1]
    names = _ALONG.get(func)
    if names is None:
        return None
    arguments = {**dict(zip(names, args, strict=False)), **kwargs}
    dim = arguments.get("dim", 0) % max(len(source.shape), 1)
    before = (slice(None),) * dim
    if "index" in names:
        return (*before, arguments["index"])
    if "start" in names:
        start = arguments["start"] % max(source.shape[dim], 1) if arguments["start"] < 0 else arguments["start"]
        return (*before, slice(start, start + arguments["length"]))
    if names == ["input", "dim"]:
        return (*before, which)
    start = sum(each.shape[dim] for each in out[:which])
    return (*before, slice(start, start + out[which].shape[dim]))


# ---- following and writing ----
def _follow(view: Any) -> None:
    """Take ``view`` again if its source was, or may have been, written to since."""
    if not torch_function_enabled() or type(view) is not MovedView:
        return
    link: _Link = view.__dict__["_link"]
    source = link.source
    _follow(source)
    if link.take is None:
        return
    if storage_of(source)._cdata != link.storage._cdata:
        del vars(view)["_link"]
        view.__class__ = DTensor  # type: ignore[assignment]
        return
    if source._spec is not link.spec:
        raise RuntimeError(
            f"a DTensor of shape {tuple(view.__dict__['_spec'].shape)} is a view of one of shape"
            f" {tuple(link.spec.shape)}, whose shape or layout was changed in place since: it is now placed"
            f" {source._spec.placements} and has shape {tuple(source._spec.shape)}; take the view again, or clone() it"
            " before the change"
        )
    version = _counted(source)
    seen = version != link.version
    if not seen and version is not None and not _is_handed_out(source):
        return
    spec = view.__dict__["_spec"]
    with torch.set_grad_enabled(link.recorded), _may_write(view):
        taken = link.take(source)
        taken.__class__ = DTensor  # read once, now
        value = taken if taken._spec is spec else redistribute(taken, spec)
        with without_torch_function():
            if seen and not (get_is_leaf(view) and get_requires_grad(view)):
                T.copy_(view, value)
            else:
                get_data(view).copy_(value.detach())
    vars(view).pop("_reads", None)
    link.version = version


def _is_handed_out(x: Any) -> bool:
    """Tell whether the memory of ``x``, or of the tensor of which it is a view, was exposed."""
    base = plainly(get_base, (), (x,))
    of_base = base is not None and base.__dict__.get("_reads") is HANDED_OUT
    return of_base or x.__dict__.get("_reads") is HANDED_OUT


def _may_write(view: Any) -> Any:
    """Return a context in which ``view`` may be written: an inference tensor only in inference mode."""
    inference = plainly(T.is_inference, (), (view,)) and not torch.is_inference_mode_enabled()
    return torch.inference_mode() if inference else contextlib.nullcontext()


def _pass_on(view: Any) -> None:
    """Write the values of ``view`` to its source, and to the source of that."""
    if type(view) is not MovedView:
        return
    link: _Link = view.__dict__["_link"]
    if link.take is None:
        _pass_on(link.source)
        return
    with _as_dtensors([view]):
        link.put(link.source, view)
    link.version = _counted(link.source)


def _counted(x: Any) -> int | None:
    """Return the version of ``x``; None for an inference tensor, which has none."""
    return None if plainly(T.is_inference, (), (x,)) else plainly(get_version, (), (x,))


def _writes(func: Any, view: Any, args: Any, kwargs: Any) -> bool:
    """Tell by the name of ``func`` whether it writes to ``view``; an inference tensor has no version counter."""
    name = getattr(func, "__name__", "")
    first = args if name.startswith("_fused") else args[:1]  # fused steps write several lists
    return any(x is view for x in _views((first, kwargs.get("out")))) and (writes_first(func) or "out" in kwargs)


@contextlib.contextmanager
def _as_dtensors(views: Sequence[Any]) -> Iterator[None]:
    """Treat the views as ordinary DTensors inside the context."""
    for view in views:
        view.__class__ = DTensor
    try:
        yield
    finally:
        for view in views:
            view.__class__ = MovedView


def _views(value: Any) -> Iterator[Any]:
    return (each for each in list_leaves(value) if type(each) is MovedView)


def _listed(out: Any) -> list[Any]:
    return list(out) if isinstance(out, (list, tuple)) else [out]
