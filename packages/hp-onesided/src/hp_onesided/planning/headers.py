"""What each rank tells the others of a collective before it is done, so that all refuse what they don't call alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hp_onesided.planning.steps import KINDS

OPS = ("sum", "avg", "min", "max", "product")
DTYPES: Sequence[str] = (
    "float32 float64 bfloat16 float16 int8 uint8 int16 int32 int64 bool uint16 uint32 uint64 complex64 complex128"
    " complex32 float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu"
).split()
"""The dtypes that are moved; the first nine are reduced by the cores as well, which know their numbers."""
WIDTHS = (4, 8, 2, 2, 1, 1, 2, 4, 8)
"""Bytes of an element of each of those nine."""
REDUCED_AS = {"bool": "uint8", "complex64": "float32", "complex128": "float64"}
"""Other dtypes that are reduced, and what their bytes are taken for meanwhile."""
REDUCED = frozenset({*DTYPES[: len(WIDTHS)], *REDUCED_AS})
"""All dtypes that are reduced."""
_FLOATS = ("float32", "float64", "bfloat16", "float16")
_OF_BOOL = {"sum": "max", "product": "min"}
_EXCHANGE = KINDS.index("all_to_all")
_REDUCTIONS = (KINDS.index("reduce_scatter"), KINDS.index("all_reduce"))


@dataclass(frozen=True)
class Call:
    """A collective that a rank called.

    Attributes:
        kind: of the collective.
        dtype: of the tensor.
        op: of a reduction.
        root: the sender of a broadcast, in the group.
        nbytes: of the tensor that has the same size on all ranks: of an all-gather's input, a reduce-scatter's output;
            0 for an all-to-all.
        sent: bytes to each rank of an all-to-all.
        received: bytes from each.
    """

    kind: str
    dtype: str = "uint8"
    op: str = "sum"
    root: int = 0
    nbytes: int = 0
    sent: tuple[int, ...] = ()
    received: tuple[int, ...] = ()

    def words(self, size: int) -> tuple[int, ...]:
        """Write the call as `words_of(size)` numbers of 64 bits, for a group of so many ranks."""
        numbers = KINDS.index(self.kind), DTYPES.index(self.dtype), OPS.index(self.op), self.root
        first = sum(number << 8 * place for place, number in enumerate(numbers))
        nothing = (0,) * size
        return first, self.nbytes, *(self.sent or nothing), *(self.received or nothing)

    @staticmethod
    def read(words: Sequence[int]) -> Call:
        """Read what `words` wrote."""
        kind, dtype, op, root = words[0] & 255, words[0] >> 8 & 255, words[0] >> 16 & 255, words[0] >> 24
        size = (len(words) - 2) // 2
        counts = (tuple(words[2 : 2 + size]), tuple(words[2 + size :])) if kind == _EXCHANGE else ((), ())
        return Call(KINDS[kind], DTYPES[dtype], OPS[op], root, words[1], *counts)

    def __str__(self) -> str:
        if self.kind in ("barrier", "close"):
            return f"{self.kind}()"
        if self.kind == "all_to_all":
            return f"all_to_all({self.dtype})"
        detail = {"broadcast": f", from rank {self.root} of the group"}.get(self.kind, "")
        if KINDS.index(self.kind) in _REDUCTIONS:
            detail = f", {self.op}"
        return f"{self.kind}({self.nbytes} bytes of {self.dtype}{detail})"


def reduction(dtype: str, op: str) -> tuple[str, str]:
    """Get what the cores take a dtype for in a reduction, and by what they do it: of truth values it is any, or all.

    Args:
        dtype: one that is reduced.
        op: the reduction.
    """
    return REDUCED_AS.get(dtype, dtype), _OF_BOOL.get(op, op) if dtype == "bool" else op


def reduces(dtype: str, op: str) -> bool:
    """Tell whether there is a reduction of a dtype: complex numbers have no order, whole ones no mean of their own.

    Args:
        dtype: of the tensor.
        op: the reduction, one of `OPS`.
    """
    if dtype.startswith("complex"):
        return dtype in REDUCED and op in ("sum", "avg")
    return dtype in REDUCED and (op != "avg" or dtype in _FLOATS)


def words_of(size: int) -> int:
    """Count the numbers that a call takes for a group of so many ranks."""
    return 2 + 2 * size


def disagreement(headers: Sequence[Sequence[int]]) -> str | None:
    """Tell in what ranks differ that should have called the same, in the same words on each; None where they agree.

    Args:
        headers: the words of each rank's call, by rank of the group.
    """
    for rank, words in enumerate(headers):
        if words[:2] != headers[0][:2]:
            return f"rank 0 of the group calls {Call.read(headers[0])}, rank {rank} {Call.read(words)}"
    if headers[0][0] & 255 != _EXCHANGE:
        return None
    calls = [Call.read(words) for words in headers]
    for sender, call in enumerate(calls):
        for receiver, count in enumerate(call.sent):
            expected = calls[receiver].received[sender]
            if count != expected:
                return (
                    f"in an all_to_all rank {sender} of the group sends {count} bytes to rank {receiver}, which expects"
                    f" {expected}"
                )
    return None
