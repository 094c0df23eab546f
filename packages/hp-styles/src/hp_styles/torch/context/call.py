"""Arguments of a module's call that concern attention: mask, position ids, window, cache; the meaning of the mask.

A transformers attention module is handed a mask that its model made of this rank's part. Its meaning is read from it,
and the mask is taken away, so that all ranks compute in the same way: Note [What a position says] in
`hp_styles.context.rounds`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from hp_dtensor import DTensor
from hp_styles.context.plan import chunks_of
from hp_styles.context.rounds import Part, Run, Segment, plain_runs

T = torch.Tensor
_CACHES = ("past_key_values", "past_key_value", "layer_past")


@dataclass
class Call:
    """Arguments of a module's call.

    Attributes:
        name: of the module's class.
        takes_mask: its forward has an ``attention_mask``, as transformers' have.
        mask: that, where it is a mask of queries and keys; it is not handed on.
        positions: position ids, [batch or 1, length].
        causal: the module's own attribute.
        window: keys that a query sees, its own among them; None is all.
        cache: name of the key/value cache that is passed, for errors.
        cached: tokens in it.
        lengths: those that a sequence among the arguments has; None where they are not known.
    """

    name: str
    takes_mask: bool = False
    mask: T | None = None
    positions: T | None = None
    causal: bool = True
    window: int | None = None
    cache: str | None = None
    cached: int = 0
    lengths: frozenset[int] | None = None

    def refuse_other_keys(self, queries: int, keys: int) -> None:
        """Refuse keys of a sequence that this call was not given: those of earlier calls.

        Args:
            queries: their number on this rank.
            keys: their number on this rank.

        Raises:
            NotImplementedError: they are as long as neither the queries nor an argument.
        """
        if queries != keys and self.lengths is not None and keys not in self.lengths:
            self.refuse_cache("ContextParallel", filled=True)  # where the model's is known, by its name
            raise NotImplementedError(
                f"ContextParallel on {self.name}: {queries} queries and {keys} keys, and no sequence of {keys} tokens"
                " is passed in this call. Keys of earlier calls, a key/value cache, are each rank's own: decoding is"
                " not supported. Compute the keys from this call's tokens; generate with a model without this style"
            )

    def refuse_cache(self, style: str, *, filled: bool) -> None:
        """Refuse a key/value cache.

        Args:
            style: the style, for the error.
            filled: only one that holds tokens.

        Raises:
            NotImplementedError: there is one.
        """
        if self.cached:
            raise NotImplementedError(
                f"{style} on {self.name}: the key/value cache ({self.cache}) holds {self.cached} tokens already, but "
                "where the sequence is sharded they are each rank's own: decoding and generate() are not supported. "
                "Train and evaluate full sequences, with use_cache=False; generate with a model without this style"
            )
        if self.cache is not None and not filled:
            raise NotImplementedError(
                f"{style} on {self.name}: a key/value cache ({self.cache}) copies keys and values between their"
                " projections and attention, so attention does not read the tensors that were sent early. A"
                " transformers model creates a cache unless it is called with use_cache=False (or has config.use_cache"
                " = False)"
            )


@functools.lru_cache(maxsize=1024)
def _parameters(function: Any) -> dict[str, int]:
    parameters = list(inspect.signature(function).parameters.values())
    places = {p.name: i - 1 for i, p in enumerate(parameters) if p.kind == p.POSITIONAL_OR_KEYWORD}  # without self
    return {**dict.fromkeys((p.name for p in parameters if p.kind == p.KEYWORD_ONLY), -1), **places}


def call_of(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Call, tuple[Any, ...], Any]:
    """Read a call, and return it with its arguments without the mask."""
    names = _parameters(type(module).forward)
    call = Call(
        type(module).__name__, takes_mask="attention_mask" in names, lengths=_lengths((*args, *kwargs.values()))
    )
    if not call.takes_mask:
        return call, args, kwargs

    def find(name: str) -> Any:
        if name in kwargs:
            return kwargs[name]
        place = names.get(name, -1)
        return args[place] if 0 <= place < len(args) else None

    mask, positions = find("attention_mask"), find("position_ids")
    if isinstance(mask, DTensor) and all(placement.is_replicate() for placement in mask.placements):
        mask = mask.to_local()  # over ranks of another axis, such as tensor parallel ones
    if isinstance(mask, T) and not isinstance(mask, DTensor) and mask.dim() == 4:
        call.mask = mask
        if "attention_mask" in kwargs:
            kwargs = {**kwargs, "attention_mask": None}
        else:
            place = names["attention_mask"]
            args = (*args[:place], None, *args[place + 1 :])
    positions = positions.to_local() if isinstance(positions, DTensor) else positions
    if isinstance(positions, T) and positions.dim() == 2:  # of several dims of space: no order of tokens
        call.positions = positions
    call.causal = bool(getattr(module, "is_causal", True))  # transformers' default
    call.window = _window(module)
    _find_cache(call, module, next((x for x in map(find, _CACHES) if x is not None), None))
    return call, args, kwargs


def _lengths(values: Sequence[Any]) -> frozenset[int]:
    """Return the sizes of tensors but for their last dim, which is a mask's keys or features."""
    local = (value.to_local() if isinstance(value, DTensor) else value for value in values if isinstance(value, T))
    return frozenset(size for value in local for size in value.shape[:-1])


def left_out(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Exception | None:
    """Return the error for missing position ids: the model would count from 0 on each rank."""
    names = _parameters(type(module).forward)
    place = names.get("position_ids")
    if place is None or kwargs.get("position_ids") is not None or (0 <= place < len(args) and args[place] is not None):
        return None
    return ValueError(
        f"ContextParallel: {type(module).__name__} is called without position_ids, so it would count from 0 on each"
        " rank; pass those of this rank's tokens, context_parallel_shard(torch.arange(full_length)[None], mesh), with"
        " the style's load_balance"
    )


def _window(module: nn.Module) -> int | None:
    """Return the sliding window of a transformers attention module: its own, or its layer type's.

    Raises:
        NotImplementedError: layers of another type, such as those that see chunks.
    """
    config, index = getattr(module, "config", None), getattr(module, "layer_idx", None)
    types = getattr(config, "layer_types", None)
    kind = types[index] if types and isinstance(index, int) and index < len(types) else None
    if kind is not None and kind not in ("full_attention", "sliding_attention"):
        raise NotImplementedError(
            f"ContextParallel on {type(module).__name__}: layer {index} is of the type {kind!r}; only attention over "
            "the full sequence and over a sliding window (full_attention, sliding_attention) is supported"
        )
    if hasattr(module, "sliding_window"):
        return module.sliding_window or None  # type: ignore[return-value]
    if kind == "full_attention":
        return None
    return getattr(config, "sliding_window", None) or None


def _find_cache(call: Call, module: nn.Module, cache: Any) -> None:
    if cache is None:
        return
    call.cache = type(cache).__name__
    if hasattr(cache, "get_seq_length"):
        call.cached = int(cache.get_seq_length(getattr(module, "layer_idx", None) or 0))
    elif isinstance(cache, (tuple, list)) and cache and isinstance(cache[0], T):
        call.cached = cache[0].shape[-2]


_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


class Arguments:
    """The inputs of a module's forward, by name and by position.

    Args:
        module: the module.
        style: the name of the style, for errors.
        named: the inputs that are looked for in each call.
        handed: the name of the argument that is passed in, if any.

    Raises:
        ValueError: forward does not have them.
    """

    def __init__(self, module: nn.Module, style: str, named: Sequence[str | int], handed: str | None) -> None:
        signature = inspect.signature(module.forward)
        parameters = signature.parameters.values()
        self._where = f"{style} on {type(module).__name__}"
        self._signature = signature
        self._index = {p.name: i for i, p in enumerate(p for p in parameters if p.kind in _POSITIONAL)}
        kinds = {p.kind for p in parameters}
        names = {p.name for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}
        for name in named:
            if isinstance(name, int):
                accepted = 0 <= name < len(self._index) or (name >= 0 and inspect.Parameter.VAR_POSITIONAL in kinds)
            else:
                accepted = name in names or inspect.Parameter.VAR_KEYWORD in kinds
            if not accepted:
                raise ValueError(
                    f"{self._where}: forward{signature} has no input {name!r}; pass the name of one of its inputs"
                )
        if handed is not None and (handed not in names or signature.parameters[handed].kind == _POSITIONAL[0]):
            raise ValueError(
                f"{self._where}: forward{signature} has no argument {handed!r} for the positions of its queries in the"
                " full sequence, which a causal mask needs. Add one and name it with positions=, or pass"
                " positions=None if the result does not depend on them"
            )

    def find(self, name: str | int, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[int | str, torch.Tensor]:
        """Find an input of a call: its place and its value.

        Raises:
            TypeError: it is not there, or no tensor.
        """
        place = name if name in kwargs or isinstance(name, int) else self._index.get(name, len(args))
        value = kwargs.get(place) if isinstance(place, str) else args[place] if place < len(args) else None
        if not isinstance(value, torch.Tensor):
            got = "nothing" if value is None else type(value).__name__
            raise TypeError(
                f"{self._where}: the input {name!r} of forward{self._signature} must be a tensor, got {got}; the call"
                f" has {[type(x).__name__ for x in args]} and { {key: type(x).__name__ for key, x in kwargs.items()} }"
            )
        return place, value

    def hand(self, name: str, value: torch.Tensor, args: list[Any], kwargs: dict[str, Any]) -> None:
        """Pass an argument in place of the caller's."""
        index = self._index.get(name, len(args))
        if index < len(args):
            args[index] = value
        else:
            kwargs[name] = value


def mapped(output: Any, do: Callable[[Any], Any]) -> Any:
    """Apply ``do`` to a module's result, or to each of its items if it is a tuple or a list."""
    if not isinstance(output, (tuple, list)):
        return do(output)
    items = [do(x) for x in output]
    return type(output)(*items) if hasattr(output, "_fields") else type(output)(items)


def refuse_compiled(style: str) -> None:
    """Refuse to be traced.

    Raises:
        NotImplementedError: under torch.compile.
    """
    if torch.compiler.is_compiling():
        untraced: Any = torch.compiler.disable(_refuse)  # else Dynamo would run what raises once more, eagerly
        untraced(style)


def _refuse(style: str) -> None:
    raise NotImplementedError(
        f"{style}: modules with this style can't be compiled; leave them out of the compiled region"
        " (torch.compiler.disable)"
    )


def _allowed(length: int, causal: bool, window: int | None, device: torch.device) -> T:
    """[length, length]: which keys of this rank's part a model that knows no other lets a query see."""
    place = torch.arange(length, device=device)
    return _within(place, place, causal, window)


def _within(queries: T, keys: T, causal: bool, window: int | None) -> T:
    """Return which keys are seen, by places in the sequence."""
    queries = queries[:, None]
    seen = keys <= queries if causal else torch.ones(len(queries), len(keys), dtype=torch.bool, device=keys.device)
    return seen if window is None else seen & (keys > queries - window)


@dataclass
class Reading:
    """Meaning of a mask.

    Attributes:
        causal: a query sees no later keys.
        kept: [batch, length]: no padding; None is all.
        packed: position ids that do not count up separate documents.
        joined: it is not, though there is such.
    """

    causal: bool
    kept: T | None = None
    packed: bool = False
    joined: bool = False


def _boolean(mask: T) -> T | None:
    if mask.dtype == torch.bool or not mask.is_floating_point():
        return mask if mask.dtype == torch.bool else None
    hidden = mask <= torch.finfo(mask.dtype).min
    return ~hidden if bool(((mask == 0) | hidden).all()) else None


def read_mask(call: Call, length: int) -> Reading:
    """Read the mask of a call, or what its absence says.

    Raises:
        NotImplementedError: it says something that can't be told from position ids, window and padding.
    """
    if call.mask is None:
        return Reading(call.causal, joined=call.positions is not None and bool(_jumps(call.positions).any()))
    mask = _boolean(call.mask)
    if mask is not None and tuple(mask.shape[1:]) == (1, length, length):
        kept = mask[:, 0].diagonal(dim1=-2, dim2=-1)
        for causal in (call.causal, not call.causal):
            window = call.window if causal else None
            seen = _allowed(length, causal, window, mask.device) & kept[:, None]
            apart = None
            if call.positions is not None:
                document = torch.nn.functional.pad(_jumps(call.positions), (1, 0)).cumsum(-1)
                apart = seen & (document[:, :, None] == document[:, None])
            padding = None if bool(kept.all()) else kept
            if torch.equal(mask[:, 0], seen):
                return Reading(causal, padding, joined=apart is not None and not torch.equal(apart, seen))
            if apart is not None and torch.equal(mask[:, 0], apart.expand_as(seen)):
                return Reading(causal, padding, packed=True)
    raise NotImplementedError(
        f"ContextParallel on {call.name}: its attention_mask of shape {tuple(call.mask.shape)}, for {length} tokens,"
        f" does not consist of causal={call.causal}, a sliding window of {call.window}, packed documents by"
        f" position_ids ({'given' if call.positions is not None else 'not given'}) and padded keys. Only these are"
        " supported where the sequence is sharded; a mask of the full sequence works where q, k and v are a module's"
        " inputs (qkv_indices=) and ulysses_degree is None"
    )


def _jumps(positions: T) -> T:
    """[rows, length - 1]: where position ids do not count up by one."""
    return positions.diff(dim=-1) != 1


def part_of(reading: Reading, positions: T | None, *, rank: int, size: int, length: int, load_balance: bool) -> Part:
    """Describe this rank's part to the other ranks.

    Raises:
        ValueError: position ids of another length.
    """
    if positions is not None and positions.shape[-1] != length:
        raise ValueError(
            f"ContextParallel: position_ids of shape {tuple(positions.shape)} for a part of {length} tokens; shard "
            "them like the tokens, with context_parallel_shard"
        )
    plain = plain_runs(rank, size, length, load_balance)
    kept = reading.kept
    if kept is None and (positions is None or _is_plain(positions, plain)):
        return Part((), reading.packed, reading.joined, positions is not None)
    starts = torch.zeros(1, length, dtype=torch.bool)
    starts[:, [run.start for run in plain]] = True
    if positions is not None:
        starts = starts.to(positions.device).repeat(len(positions), 1)
        starts[:, 1:] |= _jumps(positions)
    if kept is not None:
        starts = starts.to(kept.device).expand(len(kept), -1).clone()
        starts[:, 1:] |= kept.diff(dim=-1)
    found = starts.nonzero()
    here = positions.expand(len(starts), -1)[starts] if positions is not None else torch.zeros_like(found[:, 0])
    stay = kept[starts] if kept is not None else torch.ones_like(found[:, 0])
    rows: list[list[Run]] = [[] for _ in range(len(starts))]
    for row, start, position, is_kept in torch.stack([found[:, 0], found[:, 1], here, stay], 1).tolist():
        rows[row].append(Run(start, position, bool(is_kept)))
    return Part(tuple(map(tuple, rows)), reading.packed, reading.joined, positions is not None)


def _is_plain(positions: T, plain: Sequence[Run]) -> bool:
    runs = [*plain, Run(positions.shape[-1], 0)]
    pieces = [
        torch.arange(run.position, run.position + after.start - run.start, device=positions.device)
        for run, after in zip(runs, runs[1:], strict=False)
    ]
    return bool((positions == torch.cat(pieces)).all())


@dataclass
class Seen:
    """Keys of the full sequence that a query sees.

    Attributes:
        length: tokens of the full sequence.
        causal: none that are later.
        window: only so many up to its own.
        rows: documents and padding of each row; none where the sequence is one document.
    """

    length: int
    causal: bool
    window: int | None
    rows: tuple[tuple[Segment, ...], ...]
    _documents: T | None = field(default=None, repr=False)
    _whole: T | None = field(default=None, repr=False)

    @property
    def is_plain(self) -> bool:
        """True if no mask is needed but ``causal``."""
        return not self.rows and (self.window is None or self.window >= self.length)

    def documents(self, device: torch.device) -> T:
        """[rows, length]: the document of each token, -1 for padding."""
        if self._documents is None:
            rows = []
            for row in self.rows:
                ends = [*(after.start for after in row[1:]), self.length]
                sizes = [end - piece.start for piece, end in zip(row, ends, strict=True)]
                rows.append(torch.tensor([piece.document for piece in row]).repeat_interleave(torch.tensor(sizes)))
            self._documents = torch.stack(rows).to(device)
        return self._documents

    def mask(self, queries: T, keys: T) -> T:
        """Return the mask [rows or 1, 1, queries, keys], by places in the sequence."""
        seen = _within(queries, keys, self.causal, self.window)[None]
        if self.rows:
            documents = self.documents(keys.device)
            seen = seen & (documents[:, keys] >= 0)[:, None]
            if any(segment.document > 0 for row in self.rows for segment in row):
                seen = seen & (documents[:, queries, None] == documents[:, None, keys])
        return seen[:, None]

    def whole(self, device: torch.device) -> T:
        """Return the mask of all queries and keys."""
        if self._whole is None:
            place = torch.arange(self.length, device=device)
            self._whole = self.mask(place, place)
        return self._whole


def places(rank: int, size: int, length: int, load_balance: bool, device: torch.device) -> T:
    """Return the places of a rank's ``length`` tokens in the full sequence."""
    chunks = chunks_of(rank, size, load_balance)
    width = length // len(chunks)
    runs = [torch.arange(chunk * width, (chunk + 1) * width, device=device) for chunk in chunks]
    return runs[0] if len(runs) == 1 else torch.cat(runs)
