"""Context parallelism of everything that is called inside a ``with`` block."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from hp_dtensor import DeviceMesh
from hp_dtensor.torch.extend import backward
from hp_styles.context_rounds import Rounds
from hp_styles.torch.context.attention import ContextGroup, attend
from hp_styles.torch.context.call import Call
from hp_styles.torch.context.settling import Settling, end_round

__all__ = ["attention_over", "cut_in_place"]


class _Ring(TorchFunctionMode):
    """Computes attention over a ring, in the place of torch's function."""

    def __init__(self, group: ContextGroup) -> None:
        super().__init__()
        self.group = group

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            rounds = self.group.rounds
            settling = Settling(self.group, 0, rounds, 1, Call("context_parallel"), rounds.current)
            return attend(self.group, settling, {}, *args, **(kwargs or {}))
        if func in (torch.Tensor.backward, torch.autograd.backward):  # layers that are recomputed need the mode as well
            end_round(self.group.rounds.current, self.group.rounds)
            with self:
                return backward(func, args, _renamed(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _renamed(options: dict[str, Any]) -> dict[str, Any]:
    """The options of ``Tensor.backward`` as those of ``torch.autograd.backward``."""
    return {"grad_tensors" if name == "gradient" else name: value for name, value in options.items()}


@functools.lru_cache(maxsize=64)
def _rounds_over(mesh: DeviceMesh) -> Rounds:
    """The rounds of all blocks over a mesh, of which each compares less than the first."""
    return Rounds()


@contextlib.contextmanager
def attention_over(mesh: DeviceMesh) -> Iterator[None]:
    """Attention inside is over the ring of a mesh, of parts that are cut by head and tail."""
    rounds = _rounds_over(mesh)
    group = ContextGroup(mesh, 1, True, rounds)
    rounds.enter(mesh)
    try:
        with _Ring(group):
            yield
        end_round(rounds.current, rounds)
    finally:
        rounds.leave(mesh)


@contextlib.contextmanager
def cut_in_place(
    buffers: Sequence[torch.Tensor], parts: Sequence[torch.Tensor], restored: Sequence[torch.Tensor]
) -> Iterator[None]:
    """Buffers hold their parts, and at the end, those of ``restored``, what they held before."""
    before = [(x, x.detach().clone()) for x in restored]
    _write(zip(buffers, parts, strict=True))
    try:
        yield
    finally:
        _write(before)


def _write(pairs: Any) -> None:
    with torch.no_grad():
        for x, value in pairs:
            x.resize_(value.shape)
            x.copy_(value)
