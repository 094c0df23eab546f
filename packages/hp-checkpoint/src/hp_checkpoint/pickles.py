"""What pickles of other libraries may name, and what these names mean here; see `unpickling`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hp_checkpoint.errors import shown
from hp_checkpoint.files import sizes_of, whole
from hp_checkpoint.unpickling import Factory, Plain, Storage

__all__ = ["StoredTensor", "plain", "tensor_names", "value_names"]

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


def plain(name: str) -> Factory:
    """Return what stands for another library's class of this name."""
    return Factory(lambda *_: Plain(name))


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in a pickle: the record with its elements, and where in it they are, in elements.

    Attributes:
        storage: the record.
        offset: of the first element.
        size: its shape.
        stride: of each dim.
        dtype: its name in PyTorch.
    """

    storage: Storage
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str


def _empty(kind: type) -> Factory:
    def make(*arguments: Any) -> Any:
        if arguments:
            raise ValueError(f"an ordered dictionary of {shown(arguments)}")
        return kind()

    return Factory(make)


def _size(*arguments: Any) -> tuple[int, ...]:
    (sizes,) = arguments
    if not isinstance(sizes, (tuple, list)):
        raise ValueError(f"a size of {shown(sizes)}")
    return tuple(map(whole, sizes))


def _tensor(storage: Any, offset: Any, size: Any, stride: Any, *others: Any) -> StoredTensor:
    """Return a tensor of what torch makes one of: after the strides requires_grad, hooks, and the dtype of bytes."""
    if not isinstance(storage, Storage):
        raise ValueError(f"a tensor of {shown(storage)}")
    dtype = others[2] if storage.kind == "Untyped" else _KINDS[storage.kind]
    sizes, strides = sizes_of(size), tuple(map(whole, stride))
    if len(sizes) != len(strides) or not isinstance(dtype, str):
        raise ValueError(f"a tensor {shown(dtype)} of shape {shown(sizes)} and strides {shown(strides)}")
    return StoredTensor(storage, whole(offset), sizes, strides, dtype)


def _of_parameter(data: Any, *_: Any) -> StoredTensor:
    if not isinstance(data, StoredTensor):
        raise ValueError(f"a parameter of {shown(data)}")
    return data


def value_names(ordered: type = dict) -> dict[tuple[str, str], Factory]:
    """Return the names that a pickle of numbers, strings and containers may have.

    Args:
        ordered: what an ordered dictionary becomes.
    """
    return {("collections", "OrderedDict"): _empty(ordered), ("torch", "Size"): Factory(_size)}


def tensor_names(ordered: type = dict) -> dict[tuple[str, str], Any]:
    """Return the names that a pickle of tensors may have; see `value_names`."""
    storages = {
        (module, f"{kind}Storage"): kind for kind in (*_KINDS, "Untyped") for module in ("torch", "torch.storage")
    }
    dtypes = {("torch", name): name for name in _DTYPES}
    rebuilt = {("torch._utils", f"_rebuild_tensor_v{version}"): Factory(_tensor) for version in (2, 3)}
    parameter = {("torch._utils", "_rebuild_parameter"): Factory(_of_parameter)}
    return {**value_names(ordered), **storages, **dtypes, **rebuilt, **parameter}
