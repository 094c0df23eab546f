"""What stands in the graph for a tensor that an operation saved."""

from __future__ import annotations

from typing import Protocol

import torch

T = torch.Tensor
plain_torch = torch._C.DisableTorchFunctionSubclass  # DTensors are packed by their local parts


class Packed(Protocol):
    """Stands for a saved tensor."""

    def load(self) -> T:
        """Return the tensor, at its use in backward."""
        ...


def unpack(packed: Packed) -> T:
    """Return the tensor that `packed` stands for: the second hook of `saved_tensors_hooks`."""
    return packed.load()


def address_of(tensor: T) -> int:
    """Return where a tensor's storage begins; 0 where it has none."""
    if tensor.layout is not torch.strided or tensor.device.type == "meta":
        return 0
    return tensor.untyped_storage().data_ptr()


def version_of(tensor: T) -> T:
    """Return an empty tensor that counts the writes to `tensor`, and to all that shares its memory, without holding it.

    Note [Versions without memory]
        Autograd sees a write to what it saved by a counter that a tensor shares with its views. With hooks it no longer
        looks. The counter lives on in a detached tensor whose memory is replaced.
    """
    counter = tensor.detach()
    counter.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return counter


def changed(
    what: str, writes: int, advice: str = "Write to a copy (`x = x + y` in place of `x += y`)."
) -> RuntimeError:
    """Return the error for a saved tensor that was written to in place.

    Args:
        what: names the tensor.
        writes: how often.
        advice: what to do instead.
    """
    return RuntimeError(
        f"{what} was modified in place {writes} {'time' if writes == 1 else 'times'} after an operation saved it for"
        f" backward: its gradient would be wrong. {advice}"
    )


class Kept:
    """A saved tensor that stays where it is."""

    __slots__ = ("tensor", "version")

    def __init__(self, tensor: T) -> None:
        # The hook is given the tensor itself: with its graph, which may hold this object, memory would never be freed.
        self.tensor, self.version = tensor.detach(), tensor._version

    def load(self) -> T:
        """Return the tensor, unless it was written to."""
        if self.tensor._version != self.version:
            shape = tuple(self.tensor.shape)
            raise changed(f"A tensor of shape {shape}", self.tensor._version - self.version)
        return self.tensor
