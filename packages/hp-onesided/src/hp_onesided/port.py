"""Protocols that a framework implements for hp-onesided: primitives, without the checks of the neutral modules."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from hp_platform.extend import load_port, platform_name

Group = Any
Tensor = Any
Dtype = Any


class Port(Protocol):
    """Tensors in the host's memory, by their addresses; `<framework>/port.py`."""

    def limit(self, group: Group) -> float | None:
        """Get the seconds that a group's backend waits for a rank; None where it is not one of the host's memory."""
        ...

    def dtype(self, tensor: Tensor) -> str | None:
        """Name the dtype of a plain tensor in the host's memory; None of any other one, as those without memory."""
        ...

    def stored_dtype(self, tensor: Tensor) -> str | None:
        """Name the dtype of a tensor in the host's memory, of whatever class; None of one elsewhere."""
        ...

    def is_plain(self, tensor: Tensor) -> bool:
        """Tell whether a tensor's values are those in its memory: of no class of its own, and no conjugate."""
        ...

    def address(self, tensor: Tensor) -> int:
        """Get where its values are, one after the other."""
        ...

    def width(self, dtype: Dtype) -> int:
        """Get the bytes of an element."""
        ...

    def view(self, memory: Any, offset: int, shape: Sequence[int], dtype: Dtype) -> Tensor:
        """Make a tensor of memory, which it keeps.

        Args:
            memory: that is mapped, a buffer of Python's.
            offset: where the tensor begins, a multiple of its element's bytes.
            shape: of the tensor.
            dtype: of the framework.
        """
        ...

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Copy values, of any device, seen by no gradient."""
        ...

    def seen(self, name: str) -> AbstractContextManager[Any] | None:
        """Make a range of that name for a profiler; None where none runs."""
        ...

    def reduce(self, target: int, parts: Sequence[int], nbytes: int, dtype: str, op: str) -> None:
        """Reduce values in the order of the parts, bfloat16 and float16 in float32 and rounded once.

        Args:
            target: address of the result, which may be that of a part.
            parts: addresses of what is reduced, at least two.
            nbytes: of each.
            dtype: one that the cores reduce.
            op: "sum", "avg", "min", "max" or "product".
        """
        ...

    def empty(self, tensor: Tensor, count: int) -> Tensor:
        """Make so many elements of a tensor's dtype, with anything in them."""
        ...

    def arranged(self, tensor: Tensor, order: Sequence[int] | None, count: int) -> Tensor:
        """Get the elements as a vector that may be overwritten only if it is a new one: see `land`.

        Args:
            tensor: contiguous.
            order: the equal piece that comes at each place; None are the elements in their order.
            count: of the vector; zeros follow the elements.
        """
        ...

    def land(self, output: Tensor, values: Tensor, order: Sequence[int] | None) -> None:
        """Fill a contiguous tensor with elements, or with their equal pieces in an order; drop what is too much."""
        ...

    def divide(self, tensor: Tensor, size: int) -> None:
        """Divide in place, outside of autograd."""
        ...


class Fused(Protocol):
    """Linear layers with the collective before or after them; `<framework>/fused.py`.

    `kind` is "kernel", "chunks" or "plain"; `op` is "gather" or "scatter"; shapes have been checked.
    """

    def plain(self, tensor: Tensor) -> bool:
        """Tell whether a tensor is the framework's own and of no class derived from it."""
        ...

    def operator(self, op: str, device: str) -> tuple[str, str | None]:
        """Name the fused operator that a kind of device has, and why it can't be called; None if it can."""
        ...

    def generation(self) -> str:
        """Tell which limits this process's NPU has: "A2" or "A3"."""
        ...

    def gathered(self, x: Tensor, w: Tensor, b: Tensor | None, group: Group, dim: int, kind: str) -> Tensor:
        """Gather an input along a dim and multiply it."""
        ...

    def scattered(self, x: Tensor, w: Tensor, b: Tensor | None, group: Group, dim: int, kind: str) -> Tensor:
        """Multiply an input and reduce-scatter the product along a dim."""
        ...


@functools.cache
def fused() -> Fused:
    """Get the fused products of the framework in use.

    Raises:
        NotImplementedError: it is not PyTorch.
    """
    if platform_name() != "torch":
        raise NotImplementedError(
            f"gathered_linear and scattered_linear are for PyTorch, got {platform_name()}; use the collective and the"
            " product one after the other"
        )
    return load_port(Fused, "fused")


@functools.cache
def port() -> Port:
    """Get what the framework in use supplies."""
    return load_port(Port)
