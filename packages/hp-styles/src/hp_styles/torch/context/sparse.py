"""The hooks of context parallelism on modules of sparse attention; Note [Whole keys] in `hp_styles.context.sparse`.

Everything that is refused is refused by what all ranks know alike, or is compared, before a key is sent.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from hp_dtensor import DeviceMesh, DTensor, Partial, Replicate, Shard
from hp_platform import get_platform
from hp_platform.torch.internals import in_backward
from hp_styles.context.sparse import DSAIndexerLossContextParallel, EarlySparseStyle, SparseStyle
from hp_styles.inputs import current_round, hook, note_comparing
from hp_styles.torch.context.call import Arguments, mapped, refuse_compiled
from hp_styles.torch.context.exchange import SequenceGroup, like
from hp_styles.torch.context.gather import Blocks, Whole, gather, register

T = torch.Tensor
Key = str | int
_DIMS = 8  # of a tensor, for what the ranks compare
_WIDTH = 4 + _DIMS  # of what they compare of one


class _Queries(threading.local):
    """The queries of the cores that run on this thread, of one style on one module."""

    def __init__(self) -> None:
        self.stack: list[T] = []


def attach_sparse(module: nn.Module, mesh: DeviceMesh, style: SparseStyle) -> None:
    """Register the hooks.

    Args:
        module: the core, or what holds it (``style.core``).
        mesh: of one axis.
        style: the style.

    Raises:
        RuntimeError: the core has such hooks already.
        ValueError: inputs or submodules that there are not, or ranks that do not ascend.
    """
    what = type(style).__name__
    core, early = module, {}
    if isinstance(style, EarlySparseStyle):
        core, early = _submodule(module, style.core, what), style.projections
    projections = {path: _submodule(module, path, what) for path in early.values()}
    if getattr(core, "_context_parallel", False):
        raise RuntimeError(f"{what}: {type(core).__name__} already has a context parallel style; apply only one")
    arguments = Arguments(core, what, (style.query, *style.keys), style.positions)
    group = SequenceGroup(mesh, style.load_balance, what)
    plan = Whole(mesh.get_group(), group.size, style.seq_dim, style.load_balance)
    blocks, queries = Blocks(plan, what, early), _Queries()
    core._context_parallel = True  # type: ignore[assignment]
    note_comparing(core)
    if projections and group.size > 1:
        register(module, projections, blocks, lambda path, output: _check_early(group, style, path, output))
    receive = _receiver(group, style, plan, arguments, blocks, queries)
    core.register_forward_pre_hook(receive, with_kwargs=True)
    core.register_forward_hook(hook(_giver(group, style, queries)))
    core.register_forward_hook(hook(lambda mod, args, output: _leave(queries)), always_call=True)


def _submodule(module: nn.Module, path: str, what: str) -> nn.Module:
    try:
        return module.get_submodule(path)
    except AttributeError:
        names = [name for name, _ in module.named_modules() if name]
        raise ValueError(f"{what}: {type(module).__name__} has no submodule {path!r}; it has {names}") from None


def _leave(queries: _Queries) -> None:
    if queries.stack:  # there is none after an error in the hook before
        queries.stack.pop()


# ---- what goes in ----
def _receiver(
    group: SequenceGroup, style: SparseStyle, plan: Whole, arguments: Arguments, blocks: Blocks, queries: _Queries
) -> Any:
    def receive(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        refuse_compiled(group.style)
        positional, named = list(args), dict(kwargs)
        query = arguments.find(style.query, positional, named)[1]
        inputs = {key: arguments.find(key, positional, named) for key in style.keys}
        keys = {key: x for key, (_, x) in inputs.items()}
        parts: dict[Key, T] = {}

        def checked() -> dict[Key, T]:
            _check(group, style, {style.query: query, **keys})
            parts.update({key: _local(x, query) for key, x in keys.items()})
            mine = _local(query, query)
            _check_lengths(group, style, mine, parts)
            return {style.query: mine, **parts}

        _agree(group, checked, (style.query, *style.keys), style.seq_dim)
        places = {place for place, _ in inputs.values()}
        for place, x in [*enumerate(positional), *named.items()]:
            if isinstance(x, DTensor) and place not in places:
                _put(positional, named, place, _cut(group, x, f"the input {place!r}", query))
        for key, x in _whole(group, style, plan, blocks, keys, parts, query).items():
            _put(positional, named, inputs[key][0], x)
        if style.positions is not None:
            mine = _local(query, query)
            places = group.places(mine.shape[style.seq_dim], mine.device)
            arguments.hand(style.positions, places, positional, named)
        queries.stack.append(query)
        return tuple(positional), named

    return receive


def _put(args: list[Any], kwargs: dict[str, Any], place: Key, value: Any) -> None:
    if isinstance(place, str):
        kwargs[place] = value
    else:
        args[place] = value


def _check(group: SequenceGroup, style: SparseStyle, inputs: Mapping[Key, T]) -> None:
    """Check queries and keys before DTensors become plain.

    Raises:
        TypeError: only some are DTensors, or on several meshes.
        ValueError: dims or layouts that do not fit.
    """
    dim = style.seq_dim
    if len({x.device_mesh if isinstance(x, DTensor) else None for x in inputs.values()}) > 1:
        on = {name: x.device_mesh if isinstance(x, DTensor) else "no mesh, plain" for name, x in inputs.items()}
        listed = ", ".join(f"{name!r} is on {mesh}" for name, mesh in on.items())
        raise TypeError(f"{group.style}: queries and keys must be plain, or all on one mesh; {listed}")
    for name, x in inputs.items():
        if not dim < x.dim() <= _DIMS:
            raise ValueError(
                f"{group.style}: {name!r} has shape {tuple(x.shape)}; it must have the sequence in dim {dim}"
                f" (seq_dim=) and at most {_DIMS} dims"
            )
        if isinstance(x, DTensor):
            group.check_layout(x, repr(name), dim, *_sharded_otherwise(style, x))


def _sharded_otherwise(style: SparseStyle, x: T) -> tuple[set[int], str]:
    """Return the dims that may be sharded over another axis, and their description for an error."""
    if style.sharded_heads:
        return set(range(x.dim() - 1)) - {style.seq_dim}, ", or Shard of the batch or the heads"
    batch = ", or Shard of the batch" if style.seq_dim else ""
    return set(range(style.seq_dim)), f"{batch} (the result is a sum over heads)"


def _local(x: T, query: T) -> T:
    """Return this rank's part as a plain tensor; replicated inputs get the sum of their gradients over other axes."""
    if not isinstance(x, DTensor):
        return x
    assert isinstance(query, DTensor)  # checked
    pairs = zip(x.placements, query.placements, strict=True)
    return x.to_local(grad_placements=[Partial() if _summed(p, q) else p for p, q in pairs])


def _summed(placement: Any, of_query: Any) -> bool:
    return placement.is_replicate() and isinstance(of_query, Shard)


def _cut(group: SequenceGroup, x: DTensor, name: str, query: T) -> T:
    """Another input, as this rank's part.

    Raises:
        ValueError: it is on another mesh, or not sharded over the group's axis.
    """
    if isinstance(query, DTensor) and x.device_mesh == query.device_mesh:
        ours = [p for p, cut in zip(x.placements, group.cuts(x), strict=True) if cut]
        if not any(p.is_partial() for p in x.placements) and (group.size == 1 or all(map(_is_shard, ours))):
            return _local(x, query)
    raise ValueError(
        f"{group.style}: {name} of shape {tuple(x.shape)} is placed {x.placements} on {x.device_mesh}. A DTensor that"
        f" is not a key must be on the queries' mesh and sharded over ranks {group.ranks}, as they are: redistribute"
        " it, or pass a plain tensor"
    )


def _is_shard(placement: Any) -> bool:
    return isinstance(placement, Shard)


def _check_lengths(group: SequenceGroup, style: SparseStyle, query: T, parts: Mapping[Key, T]) -> None:
    dim, length = style.seq_dim, query.shape[style.seq_dim]
    for key, x in parts.items():
        if x.shape[dim] != length:
            raise ValueError(
                f"{group.style}: the key {key!r} of shape {tuple(x.shape)} has {x.shape[dim]} tokens (dim {dim}), the"
                f" query {length}. Both must be this rank's part of one sequence; keys are gathered here"
            )
    group.check_halves(query, f"the query {style.query!r}", dim)


def _agree(group: SequenceGroup, checked: Callable[[], Mapping[Key, T]], names: Sequence[Key], dim: int) -> None:
    """Compare over the ranks what each alone knows, and refuse on all of them what one refuses.

    Once a call of what `parallelize_module` was given, whatever its data is: Note [Parts are compared] in
    `hp_styles.inputs`. What comes later in the call is of the same data, and is checked on each rank alone.

    Args:
        group: the ranks.
        checked: this rank's parts by name, or an error.
        names: of the parts.
        dim: the sequence's.

    Raises:
        TypeError, ValueError: that of ``checked``.
        ValueError: the parts differ, or another rank refuses its own.
    """
    fault: Exception | None = None
    numbers = [0] * (len(names) * _WIDTH)
    try:
        numbers = [number for x in checked().values() for number in _facts(x)]
    except (TypeError, ValueError) as error:
        fault = error
    settled = current_round().settled
    key = "sparse", group.mesh
    if group.size == 1 or key in settled or in_backward():
        if fault is not None:
            raise fault
        return
    rows = group.gathered([int(fault is not None), *numbers])
    if fault is not None:
        raise fault
    refused = [rank for rank, row in zip(group.ranks, rows, strict=True) if row[0]]
    if refused:
        raise ValueError(f"{group.style}: ranks {refused} refuse their parts of the sequence; see their errors")
    if any(row[1:] != numbers for row in rows):

        def shapes(row: list[int]) -> list[list[int]]:
            return [row[i + 4 : i + 4 + row[i + 3]] for i in range(1, len(row), _WIDTH)]

        listed = "; ".join(f"rank {rank}: {shapes(row)}" for rank, row in zip(group.ranks, rows, strict=True))
        raise ValueError(
            f"{group.style}: the ranks of the context axis hold parts of different shapes or dtypes, or differ in which"
            f" of them need a gradient. The shapes of {', '.join(map(repr, names))} are {listed}. Shard the sequence, "
            f"dim {dim}, with context_parallel_shard, which refuses lengths that do not divide"
        )
    settled[key] = True


def _facts(x: T) -> list[int]:
    facts = [x.itemsize, int(x.is_floating_point()), int(x.requires_grad), x.dim(), *x.shape]
    return [*facts, *[0] * (_WIDTH - len(facts))]


def _whole(
    group: SequenceGroup,
    style: SparseStyle,
    plan: Whole,
    blocks: Blocks,
    keys: Mapping[Key, T],
    parts: Mapping[Key, T],
    query: T,
) -> dict[Key, T]:
    """Gather the keys of the full sequence."""
    if group.size == 1:
        return dict(parts)
    early = blocks.projections if blocks.check(parts) else {}
    for key in early:
        x = keys[key]
        if isinstance(x, DTensor) and isinstance(query, DTensor) and any(map(_summed, x.placements, query.placements)):
            raise ValueError(
                f"{group.style}: the key {key!r} is placed {x.placements} and the query {query.placements}: its"
                " gradient must be summed over another axis, which is not supported for a key that is sent early;"
                " leave it out of projections"
            )
    rest = {key: x for key, x in parts.items() if key not in early}
    late = dict(zip(rest, gather(plan, list(rest.values())), strict=True))
    return {key: blocks.take(key, x) if key in early else late[key] for key, x in parts.items()}


def _check_early(group: SequenceGroup, style: SparseStyle, path: str, output: Any) -> None:
    """Refuse a projection's output that cannot be sent.

    Raises:
        TypeError: it is not a tensor.
        ValueError: it has no sequence, or differs between the ranks.
    """
    if not isinstance(output, T):
        raise TypeError(f"{group.style}: the output of {path} must be a tensor, got {type(output).__name__}")

    def checked() -> dict[Key, T]:
        _check(group, style, {path: output})
        local = _local(output, output)
        group.check_halves(local, f"the output of {path}", style.seq_dim)
        return {path: local}

    _agree(group, checked, (path,), style.seq_dim)


# ---- what comes out ----
def _giver(group: SequenceGroup, style: SparseStyle, queries: _Queries) -> Any:
    def give(module: nn.Module, args: Any, output: Any) -> Any:
        query = queries.stack[-1]
        if isinstance(style, DSAIndexerLossContextParallel) and style.reduction != "none":
            first = output[0] if isinstance(output, (tuple, list)) and output else output
            if not isinstance(first, T) or not first.is_floating_point():
                raise TypeError(
                    f"{group.style} on {type(module).__name__}: the output must be a loss, alone or first of several,"
                    f" got {type(first).__name__}"
                )
            result = _over_tokens(group, first, query, style.reduction)
            output = mapped(output, lambda x: result if x is first else x)
        elif isinstance(query, DTensor):
            output = mapped(output, lambda x: _laid_out(group, style, x, query) if isinstance(x, T) else x)
        if not style.use_local_output:
            return output
        return mapped(output, lambda x: x.to_local() if isinstance(x, DTensor) else x)

    return give


def _laid_out(group: SequenceGroup, style: SparseStyle, out: T, query: DTensor) -> T:
    dim, length = style.seq_dim, query.local_shape[style.seq_dim]
    if out.dim() <= dim or out.shape[dim] != length:
        raise ValueError(
            f"{group.style}: an output of shape {tuple(out.shape)} must have the {length} queries in dim {dim}, to be"
            " laid out as they are; give the module plain tensors, or let it return no other tensors"
        )
    return like(out, query)


def _over_tokens(group: SequenceGroup, loss: T, query: T, reduction: str) -> T:
    """Compute the loss of all tokens from that of each rank's own."""
    inside = isinstance(query, DTensor) and any(group.cuts(query))
    if not inside and group.size > 1:
        loss = _OverGroup.apply(loss, group.mesh.get_group(), "avg" if reduction == "mean" else "sum")
    if not isinstance(query, DTensor):
        return loss
    mesh = query.device_mesh
    cut = [isinstance(p, Shard) for p in query.placements]
    if reduction == "mean":
        for axis, is_cut in enumerate(cut):
            loss = loss / mesh.size(axis) if is_cut else loss
    total = DTensor.from_local(loss, mesh, [Partial() if is_cut else Replicate() for is_cut in cut])
    return total.redistribute(placements=[Replicate()] * mesh.ndim)


class _OverGroup(torch.autograd.Function):
    """A loss reduced over the ranks, each of which uses it in the same way: the gradient of its own tokens' loss."""

    @staticmethod
    def forward(ctx: Any, loss: T, group: Any, op: str) -> T:
        total = loss.clone(memory_format=torch.contiguous_format)
        get_platform().collectives.all_reduce(total, op, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, grad: T) -> Any:
        return grad, None, None
