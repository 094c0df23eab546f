"""The machine whose instructions a pickle has, without Python's objects: nothing of a pickle is run.

Note [Reading pickles]
    Python's own reader calls what a pickle names, sets attributes of whatever lies on its stack, makes a table as long
    as the largest number that a pickle counts by, and hashes keys however deep they are. So this one reads the
    instructions itself. A name means a constant or a `Factory`, which makes an inert object and can't be changed;
    attributes are those of `Plain` objects alone; keys of dictionaries are flat. The number of instructions is bounded,
    and what is read is walked once as a graph: a few bytes can say a list that is in itself, or 2**40 times in another.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from hp_checkpoint.errors import InvalidCheckpointError, shown

Names = Mapping[tuple[str, str], Any]
"""What stands for the names of modules that a pickle may have."""
_INSTRUCTIONS = 4_000_000  # of any pickle; those beside much data may have more
_BYTES_PER_INSTRUCTION = 4  # of that data
_DEPTH = 200
_STOP = ord(".")
_BITS = 14_000  # of an integer: Python writes no longer one as a text
_FLAT = (str, bytes, int, float, type(None))


@dataclass(frozen=True, slots=True)
class Factory:
    """What stands for a class or a function: it makes an object of what a pickle gives it, without side effects."""

    make: Callable[..., Any]


class Plain:
    """An object of a class of another library: its attributes, and none of its methods.

    Args:
        kind: the name of the class.

    Attributes:
        fields: what an object that is not pickled by its attributes is made of.
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.fields: tuple[Any, ...] = ()

    def build(self, state: Any) -> None:
        """Set the attributes, or the fields."""
        if isinstance(state, dict):
            self.__dict__.update(state | {"kind": self.kind})
        elif isinstance(state, (tuple, list)):
            self.fields = tuple(state)
        else:
            raise ValueError(f"a {self.kind} of {shown(state)}")


class Ordered(dict[Any, Any]):
    """An ordered dictionary, which may have attributes, as a state of a module has its ``_metadata``: not read."""


@dataclass(frozen=True, slots=True)
class Storage:
    """The record with a tensor's elements, and the kind of these, as "Float"."""

    key: str
    kind: str


def read_pickle(content: bytes, names: Names, where: str, *, beside: int = 0) -> Any:
    """Read a pickle that may name nothing but ``names``; see Note [Reading pickles].

    Args:
        content: of the pickle.
        names: what stands for the names of modules that it may have: constants, and each a `Factory`.
        where: its place, for errors.
        beside: bytes of the data that it describes.

    Raises:
        InvalidCheckpointError: it names something else, is damaged, or nests too much.
    """
    try:
        value = _Reader(content, names, where).load(max(_INSTRUCTIONS, beside // _BYTES_PER_INSTRUCTION))
        _check_graph(value, where, _INSTRUCTIONS + 2 * len(content))
        return value
    except InvalidCheckpointError:
        raise
    except Exception as error:  # whatever a damaged one leads to
        raise InvalidCheckpointError(f"{where} is damaged: {type(error).__name__}: {str(error)[:300]}") from error


class _Reader:
    """The machine whose instructions a pickle has, as Python's module `pickletools` describes it.

    Args:
        content: of the pickle.
        names: see `read_pickle`.
        where: likewise.
    """

    def __init__(self, content: bytes, names: Names, where: str) -> None:
        self._content, self._names, self._where = content, names, where
        self._at = 0
        self._stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: dict[int, Any] = {}

    def load(self, limit: int) -> Any:
        """Run at most ``limit`` instructions, and return what the pickle has."""
        content, table = self._content + b"\0", _TABLE  # which no instruction has
        for _ in range(limit):
            code = content[self._at]
            self._at += 1
            if code == _STOP:
                return self._pop()
            if code not in table:
                raise ValueError(f"instruction {code} at byte {self._at - 1} of {len(self._content)}")
            table[code](self)
        raise InvalidCheckpointError(f"{self._where} has more than {limit:,} instructions, too many for what it is of")

    # ---- what it reads

    def _take(self, count: int) -> bytes:
        start, self._at = self._at, self._at + count
        if self._at > len(self._content):
            raise ValueError("it is cut off")
        return self._content[start : self._at]

    def _line(self) -> bytes:
        stop = self._content.find(b"\n", self._at)
        if stop < 0:
            raise ValueError("it is cut off")
        start, self._at = self._at, stop + 1
        return self._content[start:stop]

    def _number(self, size: int) -> int:
        return int.from_bytes(self._take(size), "little")

    def _pop(self) -> Any:
        if len(self._stack) <= (self._marks[-1] if self._marks else 0):
            raise ValueError("it takes more than it has")
        return self._stack.pop()

    def _top(self) -> Any:
        self._stack.append(value := self._pop())
        return value

    def _since_mark(self) -> list[Any]:
        if not self._marks:
            raise ValueError("it takes more than it has")
        start = self._marks.pop()
        items = self._stack[start:]
        del self._stack[start:]
        return items

    # ---- instructions

    def _mark(self) -> None:
        self._marks.append(len(self._stack))

    def _drop(self) -> None:
        if self._marks and self._marks[-1] == len(self._stack):
            self._marks.pop()
        else:
            self._pop()

    def _skip(self, count: int) -> None:
        self._take(count)

    def _integer(self, value: int) -> None:
        if value.bit_length() > _BITS:
            raise ValueError(f"an integer of {value.bit_length():,} bits")
        self._stack.append(value)

    def _text_integer(self) -> None:
        text = self._line().rstrip(b"L")
        if len(text) > _BITS // 4:
            raise ValueError(f"an integer of {len(text):,} digits")
        self._integer({b"00": False, b"01": True}.get(text, 0) if text in (b"00", b"01") else int(text))

    def _bytes_integer(self, size: int) -> None:
        count = self._number(size)
        if count > _BITS // 8:
            raise ValueError(f"an integer of {count:,} bytes")
        self._integer(int.from_bytes(self._take(count), "little", signed=True))

    def _text(self, size: int) -> None:
        self._stack.append(str(self._take(self._number(size)), "utf-8", "surrogatepass"))

    def _old_text(self, size: int) -> None:
        self._stack.append(str(self._take(self._number(size)), "ascii"))

    def _binary(self, size: int) -> None:
        self._stack.append(self._take(self._number(size)))

    def _tuple(self, count: int) -> None:
        items = [self._pop() for _ in range(count)]
        self._stack.append(tuple(reversed(items)))

    def _append(self) -> None:
        value = self._pop()
        self._extend([value])

    def _extend(self, items: list[Any]) -> None:
        target = self._top()
        if type(target) is not list:
            raise ValueError(f"it appends to {shown(target)}")
        target.extend(items)

    def _set_items(self, items: list[Any]) -> None:
        target = self._top()
        if not isinstance(target, dict) or len(items) % 2:
            raise ValueError(f"it sets items of {shown(target)}")
        for key, value in zip(items[::2], items[1::2]):
            target[_key(key)] = value

    def _set_item(self) -> None:
        value, key = self._pop(), self._pop()
        self._set_items([key, value])

    def _dictionary(self) -> None:
        items = self._since_mark()
        self._stack.append({})
        self._set_items(items)

    def _put(self, number: int) -> None:
        self._memo[number] = self._top()

    def _get(self, number: int) -> None:
        if number not in self._memo:
            raise ValueError(f"it takes number {number}, of {len(self._memo)} that it has kept")
        self._stack.append(self._memo[number])

    def _name(self, module: Any, name: Any) -> None:
        if not isinstance(module, str) or not isinstance(name, str):
            raise ValueError(f"it names {shown(name)} of {shown(module)}")
        if (module, name) not in self._names:
            raise InvalidCheckpointError(
                f"{self._where} is a pickle that names {module[:80]}.{name[:80]}, which is refused: calling it would"
                " run code"
            )
        self._stack.append(self._names[module, name])

    def _call(self, arguments: Any, options: Any = None) -> None:
        factory = self._pop()
        if not isinstance(factory, Factory) or not isinstance(arguments, (tuple, list)) or options:
            raise ValueError(f"it calls {shown(factory)} with {shown(arguments)}")
        self._stack.append(factory.make(*arguments))

    def _call_with_options(self) -> None:
        options, arguments = self._pop(), self._pop()
        self._call(arguments, options)

    def _build(self) -> None:
        state, target = self._pop(), self._top()
        if isinstance(target, Plain):
            if isinstance(state, dict) and not all(isinstance(key, str) for key in state):
                raise ValueError(f"attributes {shown(state)}")
            Plain.build(target, state)
        elif not isinstance(target, Ordered):
            raise ValueError(f"it sets attributes of {shown(target)}")

    def _persistent(self) -> None:
        found_by = self._pop()
        if not isinstance(found_by, tuple) or len(found_by) < 3 or found_by[0] != "storage":
            raise InvalidCheckpointError(f"{self._where} refers to {shown(found_by)}, expected a storage")
        kind, key = found_by[1:3]
        if not isinstance(kind, str) or not isinstance(key, str):
            raise ValueError(f"a storage {shown(key)} of {shown(kind)}")
        self._stack.append(Storage(key, kind))


def _key(key: Any) -> Any:
    """Return a key of a dictionary, which is flat: the hash of a tuple walks all that is in it."""
    flat = isinstance(key, (*_FLAT, Plain)) or type(key) is tuple and all(isinstance(each, _FLAT) for each in key)
    if not flat:
        raise ValueError(f"a dictionary has the key {shown(key)}")
    return key


def _push(value: Any) -> Callable[[_Reader], None]:
    return lambda reader: reader._stack.append(value)


_TABLE: dict[int, Callable[[_Reader], Any]] = {
    ord(code): instruction
    for code, instruction in {
        "\x80": lambda r: r._skip(1),  # protocol
        "\x95": lambda r: r._skip(8),  # frame
        "(": _Reader._mark,
        "0": _Reader._drop,
        "1": lambda r: r._since_mark(),
        "2": lambda r: r._stack.append(r._top()),
        "N": _push(None),
        "\x88": _push(True),
        "\x89": _push(False),
        "I": _Reader._text_integer,
        "L": _Reader._text_integer,
        "J": lambda r: r._stack.append(int.from_bytes(r._take(4), "little", signed=True)),
        "K": lambda r: r._stack.append(r._number(1)),
        "M": lambda r: r._stack.append(r._number(2)),
        "\x8a": lambda r: r._bytes_integer(1),
        "\x8b": lambda r: r._bytes_integer(4),
        "F": lambda r: r._stack.append(float(r._line())),
        "G": lambda r: r._stack.append(struct.unpack(">d", r._take(8))[0]),
        "T": lambda r: r._old_text(4),
        "U": lambda r: r._old_text(1),
        "V": lambda r: r._stack.append(str(r._line(), "raw-unicode-escape")),
        "X": lambda r: r._text(4),
        "\x8c": lambda r: r._text(1),
        "\x8d": lambda r: r._text(8),
        "B": lambda r: r._binary(4),
        "C": lambda r: r._binary(1),
        "\x8e": lambda r: r._binary(8),
        "]": lambda r: r._stack.append([]),
        "a": _Reader._append,
        "e": lambda r: r._extend(r._since_mark()),
        "l": lambda r: r._stack.append(r._since_mark()),
        ")": _push(()),
        "t": lambda r: r._stack.append(tuple(r._since_mark())),
        "\x85": lambda r: r._tuple(1),
        "\x86": lambda r: r._tuple(2),
        "\x87": lambda r: r._tuple(3),
        "}": lambda r: r._stack.append({}),
        "d": _Reader._dictionary,
        "s": _Reader._set_item,
        "u": lambda r: r._set_items(r._since_mark()),
        "p": lambda r: r._put(int(r._line()[:20])),
        "q": lambda r: r._put(r._number(1)),
        "r": lambda r: r._put(r._number(4)),
        "\x94": lambda r: r._put(len(r._memo)),
        "g": lambda r: r._get(int(r._line()[:20])),
        "h": lambda r: r._get(r._number(1)),
        "j": lambda r: r._get(r._number(4)),
        "c": lambda r: r._name(str(r._line(), "utf-8"), str(r._line(), "utf-8")),
        "\x93": lambda r: r._name(*reversed((r._pop(), r._pop()))),
        "R": lambda r: r._call(r._pop()),
        "\x81": lambda r: r._call(r._pop()),
        "\x92": _Reader._call_with_options,
        "b": _Reader._build,
        "Q": _Reader._persistent,
    }.items()
}


def _check_graph(value: Any, where: str, limit: int) -> None:
    """Refuse a value that is in itself, or that has too many values if each is counted wherever it is."""
    known: dict[int, tuple[int, int]] = {}  # nodes and depth of each container
    path: set[int] = set()
    todo: list[tuple[Any, bool]] = [(value, False)]
    while todo:
        node, left = todo.pop()
        inner = _within(node)
        if inner is None or not left and id(node) in known:
            continue
        if left:
            path.discard(id(node))
            below = [known.get(id(each), (1, 0)) for each in inner if _within(each) is not None]
            nodes = 1 + len(inner) + sum(count for count, _ in below)
            depth = 1 + max((deep for _, deep in below), default=0)
            if nodes > limit or depth > _DEPTH:
                raise InvalidCheckpointError(
                    f"{where} nests {depth} levels of {shown(nodes)} values, expected at most {_DEPTH} of {limit:,}"
                )
            known[id(node)] = nodes, depth
            continue
        if id(node) in path:
            raise InvalidCheckpointError(f"{where} has a value that is in itself")
        path.add(id(node))
        todo.append((node, True))
        todo += [(each, False) for each in inner if _within(each) is not None]


def _within(node: Any) -> Any:
    """Return what a container has; None for what is none."""
    if isinstance(node, dict):
        return node.values()
    if isinstance(node, (list, tuple)):
        return node
    return (*node.__dict__.values(),) if isinstance(node, Plain) else None
