"""States: nested dictionaries of tensors and JSON values, as tensors by name and one JSON text. Nothing is pickled."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from hp_checkpoint.errors import InvalidCheckpointError, shown
from hp_checkpoint.layout.tensors import is_tensor, memory_of

Address = tuple[str, str]
"""Of a tensor: its part (the first word of its file's name) and its name in the part."""

_PART = re.compile(r"[A-Za-z0-9_]+")
_TENSOR, _FLOAT, _TUPLE, _PAIRS = "__tensor__", "__float__", "__tuple__", "__pairs__"
_MARKS = {_TENSOR, _FLOAT, _TUPLE, _PAIRS}


class TensorPlace(tuple[str, str]):
    """The address of a tensor, in its place in a state."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Unreadable:
    """Stands for a value that is not read, and says why."""

    text: str


class State:
    """A state as tensors and JSON.

    Attributes:
        tensors: by address; one that appears more than once has the address of its first place.
        aliases: the other addresses of such tensors.
        tree: the state as JSON values, with the tensors' addresses in their places.
    """

    def __init__(self) -> None:
        self.tensors: dict[Address, Any] = {}
        self.aliases: dict[Address, Address] = {}
        self.tree: Any = None


def flatten(state: Mapping[str, Any], *, top: str | None = None, to_load: bool = False) -> State:
    """Divide a state into tensors and JSON values.

    Tensors under a key of the state, as "optimizer", are the part of that name, and named by their path below it.
    Tensors at the top are the part "model", or "state" where the state has that key.

    Args:
        state: nested dictionaries and lists.
        top: the part of tensors at the top. Default None: as above.
        to_load: tensors of the same memory are one, since it has one value after a load. Default False: a tensor is
            another one if it is another object.

    Raises:
        TypeError: a value that is neither a tensor nor JSON, or a key that is neither a string nor a number.
        ValueError: two tensors of one name.
    """
    result = State()
    places: dict[Hashable, Address] = {}
    if not isinstance(state, Mapping):
        raise TypeError(f"checkpoint: the state is a {type(state).__name__}, expected a dictionary")
    part = top or top_part(state)

    result.tree = _tree(state, (), lambda path, value: _add(result, places, address(path, part), value, to_load))
    return result


def _tree(value: Any, path: tuple[Any, ...], add: Callable[[tuple[Any, ...], Any], Address]) -> Any:
    """Return a value as JSON, with the address that ``add`` gives it in the place of each tensor."""
    if is_tensor(value):
        return {_TENSOR: list(add(path, value))}
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, (str, int)):
                raise TypeError(f"checkpoint: {_dotted(path)!r} has the key {key!r}; keys are strings or numbers")
            _check_text(key, path)
        items = [(key, _tree(inner, (*path, key), add)) for key, inner in value.items()]
        if all(isinstance(key, str) for key, _ in items) and not _MARKS.intersection(value):
            return dict(items)
        return {_PAIRS: [list(item) for item in items]}
    if isinstance(value, (list, tuple)):
        items = [_tree(inner, (*path, number), add) for number, inner in enumerate(value)]
        return {_TUPLE: items} if isinstance(value, tuple) else items
    if type(value) is float and not math.isfinite(value):
        return {_FLOAT: repr(value)}
    if value is None or type(value) in (bool, int, float, str):
        _check_text(value, path)
        return value
    raise TypeError(
        f"checkpoint: {_dotted(path)!r} is a {type(value).__module__}.{type(value).__qualname__}; a checkpoint has"
        " tensors, arrays, and what JSON has (None, bool, int, float, str, lists, dictionaries), because a pickle"
        f" would run code when it is loaded. {_advice(value)}"
    )


def _advice(value: Any) -> str:
    return "Save its state_dict()" if hasattr(value, "state_dict") else "Convert it, as by .item() or str()"


def decode(tree: Any, tensor: Callable[[Address], Any], where: str) -> Any:
    """Return the state of a tree: the inverse of `flatten`.

    Args:
        tree: of JSON.
        tensor: returns the tensor of an address.
        where: the tree's place, for errors.

    Raises:
        InvalidCheckpointError: the tree is none that `flatten` makes.
    """
    try:
        return _decoded(tree, tensor)
    except (IndexError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise InvalidCheckpointError(
            f"the values beside the tensors in {where} can't be read: {type(error).__name__}: {str(error)[:300]}"
        ) from None


def _decoded(tree: Any, tensor: Callable[[Address], Any]) -> Any:
    if isinstance(tree, dict):
        if len(tree) == 1:
            mark, inner = next(iter(tree.items()))
            if mark == _TENSOR:
                part, name = inner
                if not isinstance(part, str) or not isinstance(name, str):
                    raise ValueError(f"a tensor's place is {shown(inner)}")
                return tensor((part, name))
            if mark == _FLOAT:
                return float(inner)
            if mark == _TUPLE:
                return tuple(_decoded(each, tensor) for each in inner)
            if mark == _PAIRS:
                return {key: _decoded(each, tensor) for key, each in inner}
        return {key: _decoded(each, tensor) for key, each in tree.items()}
    return [_decoded(each, tensor) for each in tree] if isinstance(tree, list) else tree


def present(state: Any, saved: Any) -> Any:
    """Return a state without the keys that the saved one lacks."""
    if isinstance(state, Mapping) and isinstance(saved, Mapping):
        places = {key: _key(saved, key) for key in state}
        return {key: present(state[key], saved[at]) for key, at in places.items() if at in saved}
    if isinstance(state, list) and isinstance(saved, list) and len(state) == len(saved):
        return [present(*pair) for pair in zip(state, saved, strict=True)]
    return state


def changes(
    template: Any, saved: Any, path: tuple[Any, ...] = (), *, partial: bool = False
) -> Iterator[tuple[Any, Any, Any]]:
    """List what makes a template have the saved values that are no tensors: (dictionary or list, key, value).

    An empty dictionary takes all values that were saved in it, unless there are tensors among them: `without_tensors`.

    Args:
        template: a state, whose tensors stay.
        saved: the decoded state, with an `Unreadable` for each tensor.
        path: of both, for errors.
        partial: leave values as they are that the saved state lacks.

    Raises:
        ValueError: the template has a key that the saved state lacks, or a list of another length.
    """
    if isinstance(saved, Unreadable):
        raise ValueError(f"load: {_dotted(path)!r} can't be read: {saved.text}")
    if isinstance(template, dict) and not isinstance(saved, Mapping):
        raise ValueError(f"load: {_dotted(path)!r} is a dictionary, the checkpoint has {shown(saved)}")
    if path and saved and not template and isinstance(template, dict):
        if not _has_unreadable(saved, path):
            yield from ((template, key, value) for key, value in saved.items())
        return
    for key, inner in list(template.items() if isinstance(template, dict) else enumerate(template)):
        if is_tensor(inner):
            continue
        at, own = _key(saved, key), (*path, key)
        if isinstance(saved, Mapping) and at not in saved:
            if partial:
                continue
            raise ValueError(f"load: {_dotted(own)!r} is not in the checkpoint, which has {shown(list(saved)[:8])}")
        value = saved[at]
        same_length = isinstance(inner, list) and isinstance(value, (list, tuple)) and len(inner) == len(value)
        if same_length or isinstance(inner, dict):
            yield from changes(inner, value, own, partial=partial)
            continue
        if isinstance(inner, (list, tuple)) and any(is_tensor(each) for each in inner):
            raise ValueError(
                f"load: {_dotted(own)!r} is a {type(inner).__name__} with tensors, of {len(inner)} elements; use lists"
                " of the same length"
            )
        for place, found in unreadable(value, own):
            raise ValueError(f"load: {_dotted(place)!r} can't be read: {found.text}")
        yield template, key, value


def without_tensors(template: Any, saved: Any, path: tuple[Any, ...] = ()) -> Iterator[str]:
    """List the dictionaries of a template that are empty and have tensors in the checkpoint.

    A rank may have none of them, as a stage without layers; that no rank has any is a mistake.

    Args:
        template: a state.
        saved: the decoded state, with an `Unreadable` for each tensor.
        path: of both.
    """
    if isinstance(template, dict) and isinstance(saved, Mapping):
        if path and saved and not template and _has_unreadable(saved, path):
            yield _dotted(path)
        for key, inner in template.items():
            if (at := _key(saved, key)) in saved:
                yield from without_tensors(inner, saved[at], (*path, key))


def _has_unreadable(saved: Any, path: tuple[Any, ...]) -> bool:
    return next(iter(unreadable(saved, path)), None) is not None


def _key(saved: Any, key: Any) -> Any:
    """Return a key of a saved dictionary for one of a state; torch's files have texts in place of numbers."""
    return str(key) if isinstance(saved, Mapping) and key not in saved else key


def unreadable(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Unreadable]]:
    """List what in a state is not read, with its path."""
    if isinstance(value, Unreadable):
        yield path, value
    items = (
        value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, (list, tuple)) else ()
    )
    for key, inner in items:
        yield from unreadable(inner, (*path, key))


def values_of(state: Any, path: tuple[Any, ...] = ()) -> Iterator[str]:
    """List the names of a state's values that are no tensors."""
    items: Any = state.items() if isinstance(state, Mapping) else enumerate(state) if isinstance(state, list) else None
    if items is None and not is_tensor(state):
        yield _dotted(path)
    for key, inner in items or ():
        yield from values_of(inner, (*path, key))


def merge(trees: list[Any]) -> Any:
    """Join the trees of several ranks: dictionaries by their keys, all else has to be equal.

    Args:
        trees: the different ones.

    Raises:
        ValueError: two ranks have different values of a key.
    """
    result = trees[0]
    for tree in trees[1:]:
        result = _join(result, tree, ())
    return result


def _join(one: Any, other: Any, path: tuple[Any, ...]) -> Any:
    if one == other and type(one) is type(other):
        return one
    plain = isinstance(one, dict) and isinstance(other, dict) and not _MARKS.intersection({*one, *other})
    if not plain:
        texts = [json.dumps(each)[:80] for each in (one, other)]
        raise ValueError(
            f"save: {_dotted(path)!r} is {texts[0]} on one rank and {texts[1]} on another. Values that differ by"
            " rank need keys of their own, as f'rank{rank}'"
        )
    return {
        key: _join(one[key], other[key], (*path, key)) if key in one and key in other else {**other, **one}[key]
        for key in dict.fromkeys([*one, *other])
    }


def _dotted(path: tuple[Any, ...]) -> str:
    return ".".join(map(str, path)) if path else "the state"


def _check_text(value: Any, path: tuple[Any, ...]) -> None:
    """Refuse a text with half of a surrogate pair, as of a file's name that is no UTF-8: no JSON file can have it."""
    if isinstance(value, str) and not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            raise ValueError(f"checkpoint: {_dotted(path)!r} has the text {value!r}, which UTF-8 lacks") from None


def address(path: tuple[Any, ...], top: str) -> Address:
    """Return the address of a tensor.

    Args:
        path: its keys from the top of the state.
        top: the part of tensors at the top.
    """
    if len(path) == 1:
        return top, str(path[0])
    part = str(path[0])
    return (part, _dotted(path[1:])) if _PART.fullmatch(part) else ("state", _dotted(path))


def top_part(state: Any) -> str:
    """Return the part of the tensors at the top of a state."""
    return "state" if isinstance(state, Mapping) and "model" in state else "model"


def _add(state: State, places: dict[Hashable, Address], address: Address, value: Any, to_load: bool) -> Address:
    if address in state.tensors or address in state.aliases:
        raise ValueError(f"checkpoint: two tensors are named {address[1]!r} in {address[0]!r}; rename one")
    first = places.setdefault(memory_of(value) if to_load else id(value), address)
    if first == address or first[0] != address[0] and not to_load:  # a file has no entry of another part
        state.tensors[address] = value
        return address
    state.aliases[address] = first
    return first
