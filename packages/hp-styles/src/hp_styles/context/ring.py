"""Rings of a context axis and its Ulysses groups; the passing of keys and values, in one order for both frameworks.

Note [A ring without send and receive]
    A step is an all-to-all in which each rank has a piece for its successor alone. Backends run that as the one send
    and the one receive that it is, beside the computation, in an order that cannot deadlock, and a ring of two needs no
    case of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from hp_dtensor import DeviceMesh
from hp_platform import get_platform
from hp_styles.context.plan import Block, Degrees

Tensor = Any


@dataclass(frozen=True)
class Links:
    """The ranks that keys and values go around; Note [Rings inside a ring] in `hp_styles.context.plan`.

    Attributes:
        group: the process group.
        inner_group: that of the inner ring.
        degrees: how many ranks each has.
        rank: the place of this one.
        empty_like: allocates a tensor of the framework.
    """

    group: Any
    inner_group: Any
    degrees: Degrees
    rank: int
    empty_like: Callable[[Tensor], Tensor]

    def pass_inside(self, flat: Tensor) -> _Passing:
        """Send a one-dimensional tensor to the next rank of the inner ring, and receive as much from the previous."""
        size = self.degrees.inner
        place = self.rank % size
        return self._pass(flat, (place + 1) % size, (place - 1) % size, size, self.inner_group)

    def pass_out(self, flat: Tensor, turned: int = 0) -> _Passing:
        """Send to the next inner ring, and receive from the previous.

        Args:
            flat: a one-dimensional tensor.
            turned: how many places further it goes there.
        """
        outer, place = divmod(self.rank, self.degrees.inner)

        def at(outer: int, place: int) -> int:
            return outer % self.degrees.outer * self.degrees.inner + place % self.degrees.inner

        there, here = at(outer + 1, place + turned), at(outer - 1, place - turned)
        return self._pass(flat, there, here, self.degrees.ring, self.group)

    def pass_back(self, flat: Tensor, step: int) -> _Passing:
        """Send gradients to the rank that has their keys in the next step; after the last, to the keys' own rank."""
        inner = self.degrees.inner
        return self.pass_inside(flat) if (step + 1) % inner else self.pass_out(flat, turned=1)

    def _pass(self, flat: Tensor, to: int, source: int, size: int, group: Any) -> _Passing:
        received = self.empty_like(flat)
        there, here = [0] * size, [0] * size
        there[to] = here[source] = flat.numel()
        all_to_all = get_platform().collectives.all_to_all
        return _Passing(flat, received, all_to_all(received, flat, here, there, group=group, async_op=True))


@dataclass(frozen=True)
class _Passing:
    sent: Tensor
    received: Tensor
    handle: Any

    def wait(self) -> Tensor:
        self.handle.wait()
        return self.received


class _Tour:
    """Keys and values as they come: one transfer in the inner ring a step, one to the next inner ring for all of them.

    Args:
        links: the ranks.
        flat: this rank's own.
        steps: the number of steps.

    Attributes:
        flat: those of the step.
    """

    def __init__(self, links: Links, flat: Tensor, steps: int) -> None:
        self.flat, self._links, self._steps, self._step = flat, links, steps, 0
        self._passing: _Passing | None = None
        self._ahead: _Passing | None = None

    def send(self) -> None:
        """Send what the next steps need."""
        inner = self._links.degrees.inner
        turn = self._step % inner
        if turn == 0 and self._step + inner < self._steps:
            self._ahead = self._links.pass_out(self.flat)
        self._passing = self._links.pass_inside(self.flat) if turn + 1 < inner else None

    def arrive(self) -> None:
        """Wait for what the next step needs."""
        self._step += 1
        if self._passing is not None:
            self.flat = self._passing.wait()
        elif self._ahead is not None:
            self.flat, self._ahead = self._ahead.wait(), None


def come_around(
    links: Links, blocks: Sequence[Block | None], flat: Tensor, see: Callable[[Block, Tensor], None]
) -> None:
    """Let keys and values come around while blocks are computed.

    Args:
        links: the ranks.
        blocks: what this rank computes in each step.
        flat: its keys and values.
        see: computes a block with the keys and values of its source.
    """
    tour = _Tour(links, flat, len(blocks))
    for block in blocks:
        tour.send()
        if block is not None:
            see(block, tour.flat)
        tour.arrive()


def return_gradients(
    links: Links,
    blocks: Sequence[Block | None],
    flat: Tensor,
    gradients: Tensor,
    compute: Callable[[Block, Tensor], Any],
    add: Callable[[Tensor, Block, Any], Tensor],
) -> Tensor:
    """Let keys and values come around once more, and with them their gradients; return those of this rank's own.

    Args:
        links: the ranks.
        blocks: what this rank computes in each step.
        flat: its keys and values.
        gradients: zeros for theirs.
        compute: computes the gradients of a block with the keys and values of its source.
        add: adds them to those that came with these keys.
    """
    tour, coming = _Tour(links, flat, len(blocks)), None
    for step, block in enumerate(blocks):
        tour.send()
        own = None if block is None else compute(block, tour.flat)
        if coming is not None:  # what the ranks before saw of these keys
            gradients = coming.wait()
        if block is not None:
            gradients = add(gradients, block, own)
        coming = links.pass_back(gradients, step)
        tour.arrive()
    assert coming is not None, "a ring has steps"
    return coming.wait()


@dataclass(frozen=True)
class UlyssesAxes:
    """Between which ranks heads are exchanged for parts of the sequence, and on which dims.

    Attributes:
        group: the process group.
        size: its ranks.
        head_dim: the dim that has the heads.
        seq_dim: the dim that has the sequence.
        load_balance: each rank holds a chunk of the head and one of the tail.
    """

    group: Any
    size: int
    head_dim: int
    seq_dim: int
    load_balance: bool


class ContextRanks:
    """The ranks that a sequence is sharded over.

    Args:
        mesh: of one axis.
        load_balance: each rank holds a chunk of the head and one of the tail.
        style: the name of the style, for errors.

    Raises:
        ValueError: the ranks do not ascend along the axis, or this one is not among them.
    """

    def __init__(self, mesh: DeviceMesh, load_balance: bool, style: str) -> None:
        self.mesh = mesh
        self.load_balance = load_balance
        self.style = style
        self.ranks: list[int] = mesh.ranks.reshape(-1).tolist()
        self.size = len(self.ranks)
        if self.ranks != sorted(self.ranks):
            raise ValueError(
                f"{style}: the ranks along the context axis are {self.ranks}; they must ascend, as in a mesh made by"
                " init_device_mesh"
            )
        coordinate = mesh.get_coordinate()
        if coordinate is None:
            raise ValueError(f"{style}: this rank is not in the mesh of ranks {self.ranks}")
        self.place = coordinate[0]

    def subgroup(self, places: range) -> Any:
        """Return the process group of some places; None for one alone."""
        if len(places) == 1:
            return None
        ranks = [self.ranks[place] for place in places]
        return self.mesh.get_group() if len(places) == self.size else get_platform().groups.new_group(ranks)

    def links(self, degrees: Degrees, empty_like: Callable[[Any], Any]) -> Links:
        """Return the links of this rank's ring.

        Args:
            degrees: how the ranks are divided.
            empty_like: allocates a tensor of the framework.
        """
        whole, inner = (self.subgroup(ranks(self.place)) for ranks in (degrees.ring_ranks, degrees.inner_ranks))
        return Links(whole, inner, degrees, self.place // degrees.ulysses, empty_like)

    def check_halves(self, x: Any, name: str, seq_dim: int) -> None:
        """Refuse a part that is not a chunk of the head and one of the tail.

        Raises:
            ValueError: an odd length with ``load_balance``.
        """
        shape = tuple(x.shape)
        if self.load_balance and shape[seq_dim] % 2:
            raise ValueError(
                f"{self.style}: load_balance needs two equal chunks per rank, but {name} of shape {shape} has"
                f" length {shape[seq_dim]} (dim {seq_dim}); shard the sequence with context_parallel_shard"
            )
