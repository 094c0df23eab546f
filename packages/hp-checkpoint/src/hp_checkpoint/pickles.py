"""Pickles of other libraries, read without running their code: no names but those listed here mean something."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from hp_checkpoint.errors import InvalidCheckpointError

__all__ = ["Names", "Plain", "Storage", "StoredTensor", "plain", "read_pickle", "tensor_names", "value_names"]

Names = Mapping[tuple[str, str], Any]
_DTYPES = """
float64 float32 float16 bfloat16 float8_e4m3fn float8_e5m2 complex64
int64 int32 int16 int8 uint64 uint32 uint16 uint8 bool
""".split()
_KINDS = {
    "Double": "float64",
    "Float": "float32",
    "Half": "float16",
    "BFloat16": "bfloat16",
    "Long": "int64",
    "Int": "int32",
    "Short": "int16",
    "Char": "int8",
    "Byte": "uint8",
    "Bool": "bool",
    "ComplexFloat": "complex64",
}


class Plain:
    """An object of a class of another library: its attributes, and none of its methods.

    Attributes:
        fields: what an object that is not pickled by its attributes is made of.
    """

    fields: tuple[Any, ...] = ()

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            self.__dict__.update(state)
        else:
            self.fields = tuple(state)


def plain(name: str) -> type[Plain]:
    """Return a class for the objects of another library's class of this name."""
    return type(name, (Plain,), {})


@dataclass(frozen=True, slots=True)
class Storage:
    """The record with a tensor's elements, and the kind of these, as "Float"."""

    key: str
    kind: str


class StoredTensor:
    """A tensor in a pickle: the record with its elements, and where in it they are, in elements.

    Args:
        storage: the record.
        offset: of the first element.
        size: its shape.
        stride: of each dim.
        requires_grad: not read.
        hooks: not read.
        others: the dtype, where the storage has bytes.
    """

    def __init__(
        self, storage: Storage, offset: int, size: Any, stride: Any, requires_grad: Any, hooks: Any, *others: Any
    ) -> None:
        self.storage, self.offset, self.size, self.stride = storage, offset, tuple(size), tuple(stride)
        self.dtype: str = others[0] if storage.kind == "Untyped" else _KINDS[storage.kind]


def read_pickle(content: bytes, names: Names, where: str) -> Any:
    """Read a pickle that may name nothing but ``names``.

    Args:
        content: of the pickle.
        names: what stands for the names of modules that it may have: constants, and callables without side effects.
        where: its place, for errors.

    Raises:
        InvalidCheckpointError: it names something else, or is damaged.
    """
    try:
        return _Unpickler(content, names, where).load()
    except InvalidCheckpointError:
        raise
    except Exception as error:  # whatever a damaged one leads to
        raise InvalidCheckpointError(f"{where} is damaged: {type(error).__name__}: {error}") from error


class _Unpickler(pickle.Unpickler):
    def __init__(self, content: bytes, names: Names, where: str) -> None:
        super().__init__(io.BytesIO(content))
        self._names, self._where = names, where

    def find_class(self, module: str, name: str) -> Any:
        """Return what stands for a name."""
        if (module, name) not in self._names:
            raise InvalidCheckpointError(
                f"{self._where} is a pickle that names {module}.{name}, which is refused: calling it would run code"
            )
        return self._names[module, name]

    def persistent_load(self, pid: Any) -> Storage:
        """Return the record of a tensor's elements."""
        kind, kind_of_elements, key, *_ = pid
        if kind != "storage":
            raise InvalidCheckpointError(f"{self._where} refers to a {kind!r}, expected a storage")
        return Storage(key, kind_of_elements)


def _of_parameter(data: Any, *_: Any) -> Any:
    return data


def value_names() -> dict[tuple[str, str], Callable[..., Any]]:
    """Return the names that a pickle of numbers, strings and containers may have."""
    return {("collections", "OrderedDict"): dict, ("torch", "Size"): tuple}


def tensor_names() -> dict[tuple[str, str], Any]:
    """Return the names that a pickle of one plain tensor may have."""
    storages = {
        (module, f"{kind}Storage"): kind for kind in (*_KINDS, "Untyped") for module in ("torch", "torch.storage")
    }
    dtypes = {("torch", name): name for name in _DTYPES}
    rebuilt = {("torch._utils", f"_rebuild_tensor_v{version}"): StoredTensor for version in (2, 3)}
    return {**value_names(), **storages, **dtypes, **rebuilt, ("torch._utils", "_rebuild_parameter"): _of_parameter}
