"""Division of attention over the ranks of a sharded sequence, and the rings of these ranks: plain arithmetic.

Note [Head and tail]
    Under a causal mask a query's work grows with its place, so that of ranks with consecutive pieces the last has the
    most. With ``2 n`` chunks and chunks ``i`` and ``2 n - 1 - i`` on rank ``i``, every rank has the same. The layout
    nests: what ``u`` neighbours hold together, ordered, is chunk ``j`` and chunk ``2 r - 1 - j`` of ``2 r``, where
    ``r = n / u``; so after an exchange inside groups of ``u`` ranks, the ring over the groups is balanced the same way.

Note [Rings inside a ring]
    A ring over several hosts sends all blocks of keys over the one link between two of them. With inner rings, keys
    come around the ranks of a host before they go on: while the blocks of an inner ring pass, each of its ranks sends
    the one that it began with to the rank of the same place in the next. So all ranks of a host send to the next one
    at once, and once per inner ring. In backward the gradients of the keys, which come around with them, go there
    after the last step, one place further, where their keys are by then.

Note [A ring without send and receive]
    A step is an all-to-all in which each rank has a piece for its successor alone. Backends run that as the one send
    and the one receive that it is, beside the computation, in an order that cannot deadlock, and a ring of two needs no
    case of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from hp_dtensor import DeviceMesh
from hp_platform import get_platform


@dataclass(frozen=True)
class Settings:
    """Settings of a context parallel style.

    Attributes:
        ulysses_degree: ranks of a Ulysses group; None is all.
        inner_ring_degree: ranks of an inner ring; None is all that Ulysses leaves.
        load_balance: each rank holds a chunk of the head and one of the tail.
        seq_dim: the dim of the sequence in q, k and v, where these are a module's inputs or a projection's output.
        head_dim: the dim of the heads there.
        qkv_indices: positions of q, k and v among a module's inputs; empty where they are none.
        qkv_kwarg_names: their names.
        projections: for q, k and v, the submodule whose output is sent at once.
        head_size: elements of a head, where such an output has the heads one after the other in its last dim.
        use_local_output: DTensors that the module returns become plain tensors.
    """

    ulysses_degree: int | None
    load_balance: bool
    seq_dim: int
    head_dim: int
    qkv_indices: tuple[int, ...]
    qkv_kwarg_names: tuple[str, ...]
    use_local_output: bool
    projections: Mapping[str, str] = field(default_factory=dict)
    head_size: int | None = None
    inner_ring_degree: int | None = None

    @property
    def takes_qkv(self) -> bool:
        """True if q, k and v are the module's inputs."""
        return bool(self.qkv_indices or self.qkv_kwarg_names)


@dataclass(frozen=True)
class Degrees:
    """A context group as ``outer`` times ``inner`` groups of ``ulysses`` neighbours.

    Attributes:
        outer: inner rings that keys pass through, one after the other.
        inner: ranks of an inner ring: neighbours among those with the same place inside their Ulysses group.
        ulysses: ranks of a Ulysses group, neighbours in the context group.
    """

    outer: int
    inner: int
    ulysses: int

    @property
    def ring(self) -> int:
        """Number of ranks of the whole ring."""
        return self.outer * self.inner

    def ulysses_ranks(self, place: int) -> range:
        """List the Ulysses group of ``place``, by its places in the context group."""
        first = place - place % self.ulysses
        return range(first, first + self.ulysses)

    def ring_ranks(self, place: int) -> range:
        """List the ring of ``place``, by its places in the context group."""
        return range(place % self.ulysses, self.ring * self.ulysses, self.ulysses)

    def inner_ranks(self, place: int) -> range:
        """List the inner ring of ``place``, by its places in the context group."""
        first = place // self.ulysses // self.inner * self.inner
        return self.ring_ranks(place)[first : first + self.inner]


class DegreeError(ValueError):
    """A degree of a context parallel style that the ranks or the heads do not divide by.

    Args:
        text: the error's.
        name: the option.
        problem: what does not divide by what.
        choices: degrees that the ranks, and the heads, divide by.
    """

    def __init__(self, text: str, name: str, problem: str, choices: Sequence[int]) -> None:
        super().__init__(text)
        self.text, self.name, self.problem, self.choices = text, name, problem, choices

    def __reduce__(self) -> tuple[type[DegreeError], tuple[str, str, str, Sequence[int]]]:
        return type(self), (self.text, self.name, self.problem, self.choices)


def split_degrees(size: int, ulysses_degree: int | None, inner_ring_degree: int | None = None) -> Degrees:
    """Divide a context group of ``size`` ranks into Ulysses groups and rings.

    Args:
        size: ranks of the group.
        ulysses_degree: ranks of a Ulysses group; None is all.
        inner_ring_degree: ranks of an inner ring; None is all that are left.

    Raises:
        DegreeError: ``size`` is not a multiple of the first, or what is left not of the second.
    """
    degree = size if ulysses_degree is None else ulysses_degree
    _check_divides("ulysses_degree", degree, size, f"the {size} ranks of the context axis")
    ring = size // degree
    inner = ring if inner_ring_degree is None else inner_ring_degree
    _check_divides(
        "inner_ring_degree", inner, ring, f"the {ring} ranks of a ring, which ulysses_degree={degree} leaves"
    )
    return Degrees(ring // inner, inner, degree)


def _check_divides(name: str, degree: int, size: int, ranks: str) -> None:
    if size % degree:
        divisors = [d for d in range(1, size + 1) if size % d == 0]
        text = f"ContextParallel: {name}={degree} does not divide {ranks}; choose one of {divisors}"
        raise DegreeError(text, name, f"{name} = {degree} does not divide {ranks}", divisors)


def kv_copies(heads: int | None, kv_heads: int | None, degree: int, size: int) -> int:
    """Return how often a Ulysses exchange sends each key and value head: once, or to all ranks that share it.

    Args:
        heads: query heads of this rank, before the exchange; None where only keys or values are at hand.
        kv_heads: key and value heads of this rank; None where only queries are at hand.
        degree: the Ulysses degree.
        size: ranks of the context axis, for the error.

    Raises:
        DegreeError: the heads do not divide over the ranks.
    """

    def fits(d: int) -> bool:
        shared = kv_heads is None or kv_heads % d == 0 or d % kv_heads == 0
        return shared and (heads is None or heads % d == 0)

    if fits(degree):
        return 1 if kv_heads is None else max(1, degree // kv_heads)
    have = [f"{n} {kind} heads" for n, kind in ((heads, "query"), (kv_heads, "key/value")) if n is not None]
    problem = (
        f"{' and '.join(have)} do not divide over a Ulysses group of {degree} ranks (the context axis has {size}):"
        " query heads must be a multiple of the degree, key/value heads a multiple or a divisor of it"
    )
    choices = [d for d in range(1, size + 1) if size % d == 0 and fits(d)]
    text = f"ContextParallel: {problem}. Pass ulysses_degree= one of {choices}"
    raise DegreeError(text, "ulysses_degree", problem, choices)


@dataclass(frozen=True)
class Block:
    """Computation of a rank of a ring with the keys of one rank.

    Attributes:
        source: the rank of the ring that the keys are from.
        queries: its queries that see any of them: all, or the second half.
        keys: the keys that are seen: all, or the first half.
        causal: query i of those sees only the keys up to place i.
    """

    source: int
    queries: Literal["all", "tail"] = "all"
    keys: Literal["all", "head"] = "all"
    causal: bool = False


def ring_blocks(
    size: int, rank: int, *, causal: bool, load_balance: bool, inner: int | None = None
) -> tuple[Block | None, ...]:
    """List what a rank computes as the keys come around, its own first; None where it sees none of them.

    Args:
        size: ranks of the ring.
        rank: its place in the ring.
        inner: ranks of an inner ring, see Note [Rings inside a ring]; None is all.
        causal: a query sees the keys up to its own place in the full sequence.
        load_balance: rank i holds chunks i and 2 size - 1 - i, see Note [Head and tail]; else the i-th piece.
    """

    def block(source: int) -> Block | None:
        if not causal:
            return Block(source)
        if source == rank:
            return Block(source, causal=True)
        if load_balance:
            return Block(source, keys="head") if source < rank else Block(source, queries="tail")
        return Block(source) if source < rank else None

    return tuple(block(source) for source in _sources(size, rank, inner or size))


def _sources(size: int, rank: int, inner: int) -> list[int]:
    """List the ranks whose keys come, in their order."""
    outer, place = divmod(rank, inner)
    cycles = range(outer, outer - size // inner, -1)
    return [cycle * inner % size + (place - step) % inner for cycle in cycles for step in range(inner)]


def chunk_order(size: int, load_balance: bool) -> list[int]:
    """List the chunks of the sequence in the order in which the ranks hold them, rank after rank."""
    if not load_balance:
        return list(range(size))
    return [chunk for rank in range(size) for chunk in (rank, 2 * size - 1 - rank)]


def chunks_of(rank: int, size: int, load_balance: bool) -> list[int]:
    """List the chunks that a rank holds."""
    return [rank, 2 * size - 1 - rank] if load_balance else [rank]


def divided(length: int, size: int, load_balance: bool, shape: Sequence[int], dim: int) -> int:
    """Return the length of a chunk.

    Raises:
        ValueError: the sequence does not divide into chunks.
    """
    chunks = 2 * size if load_balance else size
    if length % chunks:
        balanced = f", with load_balance into {chunks} chunks" if load_balance else ""
        raise ValueError(
            f"ContextParallel: a sequence of length {length} (dim {dim} of shape {tuple(shape)}) does not divide over"
            f" {size} ranks{balanced}; pad it to {-(-length // chunks) * chunks}"
        )
    return length // chunks


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
