"""Frames: what a model's heavy operations do with what they compute, save and owe.

The operations that take the time and the memory of a model (linear maps, attention, grouped products, convolutions,
embeddings, exchanges) are few. Each asks the frame that it runs in:

- `outputs`: compute, keep what was computed, or hand back what was kept, when a block is computed again;
- `inputs`: where to put what backward needs, and get it back from there;
- `weights`: whether the weight's gradient is computed in backward, or put off until the caller asks for it.

Note [Why frames]
    Selective recomputation, activations on the host and split backward are known as dispatch modes or saved-tensor
    hooks, which pay for each of the hundreds of operations of a block (48 to 101 us in Python). A frame is asked by the
    few that matter, and costs the others nothing.

Note [A frame belongs to the forward]
    Backward may run in another thread, so an operation takes its frame along from forward. Who computes a block again
    in backward enters, with its own, the frame that the block was computed in: `frame(like=..., outputs=...)`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol

Tensor = Any
Edge = Any


class Outputs(Protocol):
    """The way in which an operation gets its output."""

    def output(self, site: str | None, compute: Callable[[], Tensor]) -> Tensor:
        """Return the output at a site: `compute()`, or what it gave when the block was computed before.

        Sites come in the order of the program; None is an operation that no module names.
        """
        ...


class Inputs(Protocol):
    """A store for what operations save for backward, parameters excepted."""

    def save(self, site: str | None, tensor: Tensor) -> Any:
        """Take a tensor in and return what it is known by."""
        ...

    def load(self, handle: Any) -> Tensor:
        """Return a tensor, the same values and layout, at its use in backward."""
        ...


class WeightGradients(Protocol):
    """A receiver of the parameters' gradients that are put off."""

    def put_off(self, edges: Sequence[Edge], compute: Callable[[], Sequence[Tensor]]) -> None:
        """Take the edges of a graph that gradients go into, and what computes them, one for each edge."""
        ...


@dataclass(frozen=True, slots=True)
class Frame:
    """Behaviour of heavy operations; None stands for the behaviour without a frame.

    Attributes:
        outputs: returns the outputs of operations; None computes them.
        inputs: where inputs are kept for backward; None keeps them on the device, in the graph.
        weights: takes the weights' gradients that are put off; None computes them in backward.
    """

    outputs: Outputs | None = None
    inputs: Inputs | None = None
    weights: WeightGradients | None = None


class _Local(threading.local):
    frame: Frame | None = None
    site: str | None = None


_local = _Local()


def current_frame() -> Frame | None:
    """Return the frame of this thread, or None outside of all."""
    return _local.frame


def current_site() -> str | None:
    """Return the name of the module whose operation runs, or None where no module names it."""
    return _local.site


@contextmanager
def at_site(site: str) -> Iterator[None]:
    """Name the operations that run."""
    outer, _local.site = _local.site, site
    try:
        yield
    finally:
        _local.site = outer


@contextmanager
def frame(
    *,
    like: Frame | None = None,
    outputs: Outputs | None = None,
    inputs: Inputs | None = None,
    weights: WeightGradients | None = None,
) -> Iterator[Frame]:
    """Run operations in a frame: `like`, or the current one, with what is given in place of its own.

    Args:
        like: the frame to begin with; default the current one.
        outputs: see `Frame`.
        inputs: see `Frame`.
        weights: see `Frame`.
    """
    outer = _local.frame
    parts = {"outputs": outputs, "inputs": inputs, "weights": weights}
    _local.frame = replace(
        like or outer or Frame(), **{name: value for name, value in parts.items() if value is not None}
    )
    try:
        yield _local.frame
    finally:
        _local.frame = outer
