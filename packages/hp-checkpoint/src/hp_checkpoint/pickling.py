"""Pickles that PyTorch asks for, written without PyTorch: values, and calls of functions by their names."""

from __future__ import annotations

import pickle
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

__all__ = ["Call", "Name", "Object", "Reference", "pickled"]


@dataclass(frozen=True, slots=True, eq=False)  # keys of dictionaries, whatever they hold
class Name:
    """A class or function, by its module and its name there."""

    module: str
    name: str


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """What a function returns for arguments."""

    function: Name
    arguments: tuple[Any, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Object:
    """An object of a class, made without its constructor.

    Attributes:
        kind: the class.
        state: its attributes by name, or what its ``__setstate__`` takes; None for an object without any.
    """

    kind: Name
    state: Any = None


@dataclass(frozen=True, slots=True, eq=False)
class Reference:
    """Something that is not in the pickle, by what its reader finds it with."""

    found_by: tuple[Any, ...]


def pickled(value: Any) -> bytes:
    """Return a pickle of protocol 2 of a value of JSON, tuples and the classes here.

    Example:
        >>> pickle.loads(pickled({"a": (1, None), "b": Call(Name("builtins", "complex"), (1.0, 2.0))}))
        {'a': (1, None), 'b': (1+2j)}

    Raises:
        TypeError: a value of another class.
    """
    parts: list[bytes] = [pickle.PROTO, b"\x02"]
    _append(value, parts.append)
    return b"".join([*parts, pickle.STOP])


def _append(value: Any, write: Callable[[bytes], None]) -> None:
    if value is None or isinstance(value, bool):
        write({None: pickle.NONE, True: pickle.NEWTRUE, False: pickle.NEWFALSE}[value])
    elif isinstance(value, int):
        write(_integer(value))
    elif isinstance(value, float):
        write(pickle.BINFLOAT + struct.pack(">d", value))
    elif isinstance(value, str):
        text = value.encode("utf-8", "surrogatepass")
        write(pickle.BINUNICODE + struct.pack("<I", len(text)) + text)
    elif isinstance(value, Name):
        write(pickle.GLOBAL + f"{value.module}\n{value.name}\n".encode())
    elif isinstance(value, tuple):
        _append_all(pickle.MARK, value, pickle.TUPLE, write)
    elif isinstance(value, list):
        _append_all(pickle.EMPTY_LIST + pickle.MARK, value, pickle.APPENDS, write)
    elif isinstance(value, dict):
        items = [each for item in value.items() for each in item]
        _append_all(pickle.EMPTY_DICT + pickle.MARK, items, pickle.SETITEMS, write)
    elif isinstance(value, Call):
        _append_all(b"", (value.function, value.arguments), pickle.REDUCE, write)
    elif isinstance(value, Object):
        _append_all(b"", (value.kind, ()), pickle.NEWOBJ, write)
        if value.state is not None:
            _append_all(b"", (value.state,), pickle.BUILD, write)
    elif isinstance(value, Reference):
        _append_all(b"", (value.found_by,), pickle.BINPERSID, write)
    else:
        raise TypeError(f"{value!r} is a {type(value).__name__}, which is not written into a pickle here")


def _integer(value: int) -> bytes:
    if -(2**31) <= value < 2**31:
        return pickle.BININT + struct.pack("<i", value)
    content = pickle.encode_long(value)
    return pickle.LONG4 + struct.pack("<i", len(content)) + content


def _append_all(before: bytes, values: Any, after: bytes, write: Callable[[bytes], None]) -> None:
    write(before)
    for each in values:
        _append(each, write)
    write(after)
