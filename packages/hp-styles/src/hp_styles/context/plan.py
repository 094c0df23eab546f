"""Division of attention over the ranks of a sharded sequence: plain arithmetic, for any number of ranks.

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
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal


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
