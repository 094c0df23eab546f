"""Functions of users on DTensors (``local_map``, ``custom_shard``), and contexts for code next to plain tensors.

Note [Shapes of results]
    A result's global shape follows from this rank's part and the placements, if all parts are as large. Where an
    argument has uneven shards, ranks tell each other the sizes of their parts of the results first.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from hp_dtensor import port
from hp_dtensor.layout.distributed_tensor import DistributedTensor
from hp_dtensor.layout.placements import Placement, Shard
from hp_dtensor.layout.spec import Layout, TensorSpec, normalize
from hp_dtensor.mesh.device_mesh import DeviceMesh
from hp_dtensor.rules.factors import Solution, choose, solve
from hp_dtensor.rules.library import RULES
from hp_dtensor.rules.planning import Call
from hp_platform.extend import list_leaves, share_bytes, share_numbers


class LocalMapError(ValueError, AssertionError):
    """Placements that don't fit the arguments or results of a `local_map`."""


def local_map(
    func: Callable[..., Any] | None = None,
    out_placements: Any = None,
    in_placements: Sequence[Any] | None = None,
    in_grad_placements: Sequence[Any] | None = None,
    device_mesh: DeviceMesh | None = None,
    *,
    redistribute_inputs: bool = False,
) -> Callable[..., Any]:
    """Return a function of DTensors that runs ``func`` on their local tensors.

    Example:
        >>> @local_map(out_placements=[Partial()], in_placements=([Shard(1)], [Shard(0)]))
        ... def product(x, w):
        ...     return x @ w
        >>> y = product(x, w)                                  # x and w are DTensors, and so is y

    Args:
        func: a function of plain tensors; default: return a decorator.
        out_placements: the placements of the result, or a tuple with those of each result; None for a result that is
            not a tensor. Here and below, a Layout may be passed instead of placements.
        in_placements: for each positional argument (lists, tuples and dicts flattened) the placements that it must
            have; None for one that is not a DTensor. Default: any placements.
        in_grad_placements: for each positional argument the layout of the gradient that ``func`` yields. Default: the
            layout of the argument's gradient, and ``Partial`` on axes where the argument is replicated and a result is
            sharded or partial (torch's own function takes each rank's gradient for the global one there).
        device_mesh: the mesh of the results; default that of the first DTensor.
        redistribute_inputs: redistribute arguments to ``in_placements``; otherwise other placements are an error.

    Returns:
        The function. Called without any DTensor, it is ``func``.

    Raises:
        ValueError: in a call: arguments or results that do not fit the placements.
    """
    if func is None:
        return functools.partial(
            local_map,
            out_placements=out_placements,
            in_placements=in_placements,
            in_grad_placements=in_grad_placements,
            device_mesh=device_mesh,
            redistribute_inputs=redistribute_inputs,
        )

    @functools.wraps(func)
    def run(*args: Any, **kwargs: Any) -> Any:
        leaves, dtensor = list(list_leaves(args)), port.tensors().DTensor
        dtensors = [value for value in leaves if isinstance(value, dtensor)]
        if not dtensors:
            return func(*args, **kwargs)
        for name, entries in (("in_placements", in_placements), ("in_grad_placements", in_grad_placements)):
            if entries is not None and len(entries) != len(leaves):
                raise LocalMapError(
                    f"local_map: {name} has {len(entries)} entries for {len(leaves)} positional arguments (lists and"
                    " dicts flattened); pass one per argument, None for one that is not a DTensor"
                )
        mesh = dtensors[0].device_mesh if device_mesh is None else device_mesh
        varies = _varying(out_placements)
        moved = [_argument(index, value, in_placements, redistribute_inputs) for index, value in enumerate(leaves)]
        uneven = any(_is_uneven(value) for value in moved if isinstance(value, dtensor))
        local = [_local(index, value, in_grad_placements, mesh, varies) for index, value in enumerate(moved)]
        return _placed(func(*_rebuilt(args, iter(local)), **kwargs), out_placements, mesh, uneven)

    return run


def custom_shard(
    fn: Callable[..., Any],
    device_mesh: DeviceMesh,
    out_placements: Any,
    in_placements: Sequence[Sequence[Placement] | None] | None = None,
    redistribute_inputs: bool = False,
) -> Callable[..., Any]:
    """Return a function of DTensors that runs ``fn`` on their local tensors.

    Unlike `local_map`, it requires a mesh, does not look inside lists and dicts, and accepts fewer entries than
    arguments.

    Args:
        fn: a function of plain tensors.
        device_mesh: the mesh of the results.
        out_placements: placements of the result, or a tuple with those of each result; None for a plain result. On axes
            where a result is sharded or partial, the gradient of a replicated argument is summed over the ranks.
        in_placements: placements that each positional argument must have; None for any, and for plain arguments.
        redistribute_inputs: redistribute arguments to ``in_placements``; otherwise other placements are an error.

    Raises:
        ValueError: in a call: an argument has other placements than ``in_placements``.
    """
    one = bool(out_placements) and isinstance(out_placements[0], Placement)
    entries = (out_placements,) if one or out_placements is None else tuple(out_placements)
    varies = {axis for each in entries for axis, p in enumerate(each or ()) if not p.is_replicate()}

    def run(*args: Any, **kwargs: Any) -> Any:
        dtensor, local, uneven = port.tensors().DTensor, [], False
        for position, value in enumerate(args):
            if isinstance(value, dtensor):
                placements = in_placements[position] if in_placements and position < len(in_placements) else None
                what = f"custom_shard: argument {position}"
                if placements is not None:
                    placements = normalize(placements, value._spec.mesh, len(value._spec.shape), what)
                value = _moved(what, value, placements, redistribute_inputs)
                uneven = uneven or _is_uneven(value)
                value = _varied(value, device_mesh, varies)
            local.append(value)
        out = fn(*local, **kwargs)
        several = isinstance(out, (tuple, list))
        results = [
            value
            if placements is None
            else _from_local(value, device_mesh, placements, uneven, "custom_shard: the result")
            for value, placements in zip(out if several else (out,), entries, strict=True)
        ]
        return tuple(results) if several else results[0]

    return run


def _argument(index: int, value: Any, in_placements: Any, redistribute: bool) -> Any:
    """Return one argument, a DTensor with the placements that it must have."""
    entry = None if in_placements is None else in_placements[index]
    if not isinstance(value, port.tensors().DTensor):
        if entry is not None and not isinstance(value, _tensor()):
            raise LocalMapError(
                f"local_map: in_placements[{index}] is {entry}, but the argument is a {type(value).__name__}: pass None"
                " if it is not a tensor"
            )
        return value
    placements = None if in_placements is None else _checked(index, entry, value._spec, "in_placements")
    return _moved(f"local_map: argument {index}", value, placements, redistribute)


def _local(index: int, value: Any, gradients: Any, mesh: DeviceMesh, varies: set[int]) -> Any:
    """Return one argument as ``func`` sees it."""
    if not isinstance(value, port.tensors().DTensor):
        return value
    if gradients is not None:
        return value.to_local(grad_placements=_checked(index, gradients[index], value._spec, "in_grad_placements"))
    return _varied(value, mesh, varies)


def _moved(what: str, value: Any, placements: Sequence[Placement] | None, redistribute: bool) -> Any:
    """Return a DTensor with the required placements, None for any.

    Raises:
        LocalMapError: it has others, and ``redistribute`` is False.
    """
    spec = value._spec if placements is None else value._spec.with_placements(placements)
    if spec is value._spec:
        return value
    if not redistribute:
        raise LocalMapError(
            f"{what} is placed {value._spec.placements}, but in_placements has {spec.placements}; pass"
            " redistribute_inputs=True to redistribute it"
        )
    return port.tensors().redistribute(value, spec)


def _varied(value: Any, mesh: DeviceMesh, varies: set[int]) -> Any:
    """Return a DTensor's local tensor, whose gradient is partial on the axes where a result varies."""
    spec = value._spec
    axes = tuple(axis in varies and p.is_replicate() for axis, p in enumerate(spec.placements))
    if spec.mesh == mesh and any(axes):
        return port.tensors().local_of(port.gradients().convert(value, spec, axes))
    return value.to_local()


def _checked(index: int, entry: Any, spec: Any, name: str) -> tuple[Placement, ...]:
    if entry is None:
        raise LocalMapError(
            f"local_map: {name}[{index}] is None, but the argument is a DTensor placed {spec.placements}; pass its"
            " placements"
        )
    return normalize(_placements(entry), spec.mesh, len(spec.shape), f"local_map: {name}[{index}]")


def _is_uneven(value: Any) -> bool:
    """Tell whether ranks have parts of different sizes of a DTensor; the answer is the same on all ranks."""
    spec = value._spec
    parts = [1] * len(spec.shape)
    for p, size in zip(spec.placements, spec.mesh.shape, strict=True):
        if isinstance(p, Shard):
            parts[p.dim] *= size
    return any(length % count for length, count in zip(spec.shape, parts, strict=True))


def _from_local(value: Any, mesh: DeviceMesh, placements: Any, uneven: bool, what: str) -> Any:
    """Return a result as a DTensor: Note [Shapes of results].

    Raises:
        LocalMapError: on all ranks: parts of other sizes than the placements give them.
    """
    from_local = port.tensors().DTensor.from_local
    placed = normalize(placements, mesh, len(value.shape), what)
    shape, own = list(value.shape), tuple(value.shape)
    axes = [(axis, p.dim) for axis, p in enumerate(placed) if isinstance(p, Shard)]
    if not (uneven and axes):
        return from_local(value, mesh, placements)
    for axis, dim in reversed(axes):
        shape[dim] = sum(size for (size,) in share_numbers([shape[dim]], mesh.get_group(axis)))
    expected = TensorSpec.of(mesh, placed, tuple(shape)).local_shape
    fault = b"" if expected == own else f"rank {mesh.get_rank()} has {own} and not {expected}".encode()
    for axis in range(len(placed)):
        fault = next(filter(None, share_bytes(fault, mesh.get_group(axis))), b"")
    if fault:
        raise LocalMapError(
            f"{what} is placed {placed}, but the ranks' results are not the parts of one tensor: of shape"
            f" {tuple(shape)}, {fault.decode()}; func must keep the sizes of uneven shards"
        )
    return from_local(value, mesh, placements, shape=tuple(shape))


def _placed(out: Any, out_placements: Any, mesh: DeviceMesh, uneven: bool) -> Any:
    """Return the results of ``func`` with tensors as DTensors."""
    values = list(list_leaves(out))
    entries = out_placements if _is_several(out_placements) else (out_placements,)
    if len(entries) != len(values):
        raise LocalMapError(
            f"local_map: out_placements has {len(entries)} entries for {len(values)} results; pass a tuple with one"
            " per result, None for one that is not a tensor"
        )
    placed, tensor, dtensor = [], _tensor(), port.tensors().DTensor
    for index, (value, entry) in enumerate(zip(values, entries, strict=True)):
        if isinstance(value, dtensor):
            raise LocalMapError(f"local_map: result {index} is a DTensor; func must return local tensors")
        if isinstance(value, tensor) != (entry is not None):
            raise LocalMapError(
                f"local_map: out_placements[{index}] is {entry}, but the result is a {type(value).__name__}: a tensor"
                " needs placements, anything else None"
            )
        placed.append(
            value
            if entry is None
            else _from_local(value, mesh, _placements(entry), uneven, f"local_map: result {index}")
        )
    return _rebuilt(out, iter(placed))


def _tensor() -> type:
    """Return the framework's class of tensors."""
    return port.tensors().DTensor.__base__


# ---- placements as arguments ----
def _placements(entry: Any) -> Any:
    return entry.placements if isinstance(entry, Layout) else entry


def _is_several(out_placements: Any) -> bool:
    """Tell whether there is an entry per result: a tuple, but not of placements."""
    return isinstance(out_placements, tuple) and not any(isinstance(each, Placement) for each in out_placements)


def _varying(out_placements: Any) -> set[int]:
    """Return the mesh axes on which a result is sharded or partial."""
    several = out_placements if _is_several(out_placements) else (out_placements,)
    return {axis for each in several for axis, p in enumerate(_placements(each) or ()) if not p.is_replicate()}


# ---- trees ----
def _rebuilt(tree: Any, leaves: Iterator[Any]) -> Any:
    if isinstance(tree, dict):
        return type(tree)((name, _rebuilt(value, leaves)) for name, value in tree.items())
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(_rebuilt(value, leaves) for value in tree))
    if isinstance(tree, (list, tuple)):
        return type(tree)(_rebuilt(value, leaves) for value in tree)
    return next(leaves)


def parallelize_value_and_grad(
    fn: Callable[..., Any],
    grad_position: int | Sequence[int] | None = 0,
    weights: Any = None,
    has_aux: bool = False,
) -> Callable[..., Any]:
    """Return a function that computes ``fn`` and its gradients, as ``mindspore.value_and_grad`` does.

    Args:
        fn: returns a scalar loss, a DTensor or a plain tensor; with ``has_aux`` a tuple of the loss and more.
        grad_position: indices of the inputs to differentiate by; None: none.
        weights: parameters to differentiate by, such as ``module.parameters()`` or ``cell.trainable_params()``; None:
            none.
        has_aux: differentiate only the first result.

    Returns:
        A function of the arguments of ``fn``. It returns the results of ``fn``, with the loss as a plain global value,
        detached, and the gradients: those of the inputs, those of the weights, or a pair of the two. One input (an int,
        not a tuple) or one weight (a tensor, not a list) has one gradient, several have a tuple. The gradient of a
        DTensor is a DTensor in its layout; that of an unused input is zero. ``.grad`` is not changed.

    Raises:
        ValueError: the loss is not a scalar.
    """
    return port.functions().value_and_grad(fn, grad_position, weights, has_aux)


class DistributedFunction:
    """Base of a distributed autograd function: ``forward`` and ``backward`` see local tensors.

    ``_op_name`` names the sharding rule, which determines the layouts of the operands and of the result. The result's
    shape follows from the rule's factors.

    Example:
        >>> class Scale(DFunction):
        ...     _op_name = "mul"
        ...
        ...     @staticmethod
        ...     def forward(ctx, x, y):
        ...         ctx.save_for_backward(x, y)
        ...         return x * y
        ...
        ...     @staticmethod
        ...     def backward(ctx, grad):
        ...         x, y = ctx.saved_tensors
        ...         return grad * y, grad * x
    """

    _op_name: str = ""

    @classmethod
    def apply(cls, *args: Any) -> Any:
        """Run the function on Tensors or DTensors.

        Raises:
            ValueError: ``_op_name`` names no rule, Tensors and DTensors are mixed, or DTensors are on different meshes.
        """
        framework: Any = super()
        return _apply(cls, framework.apply, args)


def _apply(function: type[DistributedFunction], apply: Callable[..., Any], args: Sequence[Any]) -> Any:
    f, convert, tensor = port.tensors(), port.gradients().convert, _tensor()
    tensors = [value for value in args if isinstance(value, tensor)]
    dtensors = [value for value in tensors if isinstance(value, f.DTensor)]
    if not dtensors:
        return apply(*args)
    if len(dtensors) != len(tensors):
        raise ValueError(f"{function.__name__}: plain tensors and DTensors are mixed; distribute the plain ones")
    itemsizes = [f.local_view(value).itemsize for value in dtensors]
    if not function._op_name:
        raise ValueError(
            f"{function.__name__} is a DFunction without a rule: set its class attribute _op_name to one of"
            f" {sorted(RULES)}, by which layouts of its result and operands follow from each other"
        )
    solution, spec = _solve(function._op_name, [value._spec for value in dtensors], itemsizes)
    layouts = iter(zip(solution.operands, solution.vary, strict=True))
    local = []
    for value in args:
        if isinstance(value, f.DTensor):
            placements, vary = next(layouts)
            axes = tuple(v and p.is_replicate() for v, p in zip(vary, placements, strict=True))
            target = value._spec.with_placements(placements)
            value = f.local_of(convert(value, target, axes if any(axes) else None))
        local.append(value)
    return f.wrap(apply(*local), spec)


def _solve(name: str, specs: Sequence[TensorSpec], itemsizes: Sequence[int]) -> tuple[Solution, TensorSpec]:
    """Return the operands' placements and the layout of the one result, whose shape follows from the rule's factors.

    Args:
        name: the rule.
        specs: the operands' layouts.
        itemsizes: bytes per element of each operand.
    """
    if name not in RULES:
        raise ValueError(f"Unknown rule {name!r} in _op_name; expected one of {sorted(RULES)}")
    mesh = specs[0].mesh
    if any(spec.mesh != mesh for spec in specs):
        raise ValueError(f"{name}: operands are on different meshes; redistribute them to one mesh first")
    shapes = [spec.shape for spec in specs]
    factors = RULES[name](shapes, [shapes[0]], {})
    sizes: dict[int, int] = {}
    for dims, shape in zip(factors.operands, shapes, strict=True):
        for factor, size in zip(dims, shape, strict=True):
            if factor is not None:
                sizes[factor] = max(size, sizes.get(factor, 0))
    result = tuple(1 if factor is None else sizes[factor] for factor in factors.results[0])
    solution = solve(factors, shapes, [spec.placements for spec in specs], mesh.shape, itemsizes, [result])
    return solution, TensorSpec.of(mesh, solution.results[0], result)


def registered(
    rule: Callable[..., Any], name_of: Callable[[Call], str], itemsize: Callable[[Any], int]
) -> Callable[[Call, Sequence[tuple[int, ...]]], Solution]:
    """Return what solves the calls of an operation whose rule a user registered: see ``register_sharding``.

    Args:
        rule: the user's function.
        name_of: names a call's operation in errors.
        itemsize: bytes an element of an operand.
    """

    def solve(call: Call, shapes: Sequence[tuple[int, ...]]) -> Solution:
        values = [_described(value) for value in call.args]
        named = {name: _described(value) for name, value in call.kwargs.items()}
        sizes = [itemsize(tensor) for tensor in call.tensors if tensor is not None]
        return choose(name_of(call), rule(*values, **named), call.specs, sizes, shapes)

    return solve


def _described(value: Any) -> Any:
    if isinstance(value, DistributedTensor):
        return value._spec
    if isinstance(value, (list, tuple)):
        return [_described(item) for item in value]
    return float if type(value) is float else value


_implicit: contextvars.ContextVar[bool] = contextvars.ContextVar("implicit_replication", default=False)
_open: list[object] = []  # the contexts of all threads


@contextlib.contextmanager
def implicit_replication() -> Iterator[None]:
    """Treat plain tensors in operations with DTensors as replicated on their mesh.

    They must have the same values on every rank of the mesh. Outside of this context, mixing the two is an error.
    Threads of Python each have their own contexts; those of a framework, as the ones that run backward and its
    recomputed blocks on an accelerator, have the contexts of all.
    """
    token = _implicit.set(True)
    _open.append(token)
    try:
        yield
    finally:
        _open.remove(token)
        _implicit.reset(token)


def replicates_plain() -> bool:
    """Tell whether plain tensors count as replicated here."""
    return _implicit.get() or bool(_open) and isinstance(threading.current_thread(), threading._DummyThread)


class SkipDTensorDispatch:
    """Context in which DTensors act as their local tensors in every respect. Nests; each thread has its own.

    Elementwise code, above all an optimizer's step, runs in it unchanged.

    Example:
        >>> with SkipDTensorDispatch():
        ...     optimizer.step()
    """

    def __init__(self) -> None:
        self._contexts: list[Any] = []

    def __enter__(self) -> SkipDTensorDispatch:
        context = port.gradients().local_mode()
        context.__enter__()
        self._contexts.append(context)
        return self

    def __exit__(self, *error: Any) -> None:
        self._contexts.pop().__exit__(*error)
