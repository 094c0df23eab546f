"""Arguments of a module's call that concern the attention inside: mask, position ids, window, key/value cache.

A transformers attention module is handed a mask that its model made of this rank's part. Its meaning is read from it,
and the mask is taken away, so that all ranks compute in the same way: Note [What a position says] in
`hp_styles.context.documents`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hp_dtensor import DTensor

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
