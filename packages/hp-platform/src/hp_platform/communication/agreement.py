"""Short texts and numbers from each rank of a group to all, and errors of one rank that all of them raise.

Note [Ranks tell each other host numbers]
    A number that the host knows, and that the host of another rank is to know, goes through `share_numbers` or
    `reduce_numbers`, and not through a tensor that a package makes on a device of its choice.

Note [All raise what one raises]
    A rank that raises before a collective leaves the others waiting in it. So ranks do what may fail first, and then
    tell each other what came of it: an action's result, or its error. If any failed, each rank raises, and knows the
    texts of all; if none did, each has all results.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from hp_platform import collectives, groups
from hp_platform.failures.peers import LostRankError
from hp_platform.port import Group, Tensor, port

_DIGEST = 16
_SHORT = 64  # bytes of a payload that is sent with its digest

Failed = Callable[[Mapping[int, str], "Exception | None"], Exception]


def agree(
    action: Callable[[], bytes | Exception],
    failed: Failed,
    share: Callable[[bytes], list[bytes]],
    text: Callable[[Exception], str] | None = None,
) -> list[bytes]:
    """Run an action on every rank and return all ranks' results: Note [All raise what one raises].

    Example:
        >>> agree(read, lambda texts, own: ValueError(f"reading failed: {texts}"), partial(share_bytes, group=group))

    Args:
        action: what may fail; its result is short, or an error that there was before.
        failed: called with the texts of the ranks that failed, by rank, and this rank's error or None; returns what
            this rank raises.
        share: returns all ranks' bytes for this rank's, as `share_bytes` does.
        text: of an error, as the others are told; None is `describe`.

    Returns:
        The results in the order of the ranks.

    Raises:
        Exception: what ``failed`` returned, on all ranks.
        LostRankError: of the action; the others hear of the lost rank themselves.
    """
    error: Exception | None = None
    try:
        result = action()
    except LostRankError:
        raise
    except Exception as problem:  # whatever it is, the others have to hear of it
        result = problem
    if isinstance(result, Exception):
        error, result = result, b"-" + (text or describe)(result).encode(errors="replace")
    else:
        result = b"+" + result
    everyone = share(result)
    texts = {rank: each[1:].decode() for rank, each in enumerate(everyone) if each[:1] == b"-"}
    if not texts:
        results = {each: each[1:] for each in set(everyone)}  # one for all ranks that say the same: it may be long
        return [results[each] for each in everyone]
    raised = failed(texts, error)
    try:
        if raised is error:
            raise raised
        raise raised from error
    finally:  # an error whose traceback has a frame that holds it would live on
        del raised, error


def describe(error: Exception) -> str:
    """Return an error's text; of one that is neither a ValueError nor a TypeError, with its class.

    Args:
        error: of an action.
    """
    return str(error) if type(error) in (ValueError, TypeError) else f"{type(error).__name__}: {error}"


def share_bytes(payload: bytes, group: Group | None) -> list[bytes]:
    """Return the payloads of a group's ranks; each different one is sent once.

    Args:
        payload: this rank's, of any length.
        group: the ranks, all of which call this; None is this process alone.
    """
    if group is None or groups.size(group) == 1:
        return [payload]
    digest = hashlib.blake2b(payload, digest_size=_DIGEST).digest()
    own = digest + len(payload).to_bytes(8, "little") + payload[:_SHORT].ljust(_SHORT, b"\0")
    records = gather_bytes(own, group)
    known = {own: payload}
    sources: dict[bytes, int] = {}  # the first rank of each
    for rank, record in enumerate(records):
        sources.setdefault(record, rank)
    for record, source in sources.items() if len(sources) > 1 else ():
        length, short = int.from_bytes(record[_DIGEST:-_SHORT], "little"), record[-_SHORT:]
        if length <= _SHORT:
            known[record] = short[:length]
        else:
            known[record] = _broadcast(payload if record == own else bytes(length), source, group)
    return [known[record] for record in records]


def gather_bytes(record: bytes, group: Group | None) -> list[bytes]:
    """Return the records of a group's ranks.

    Args:
        record: this rank's, as long as that of every other rank.
        group: the ranks, all of which call this; None is this process alone.
    """
    size = 1 if group is None else groups.size(group)
    if size == 1 or not record:
        return [record] * size
    own = port().collectives
    output = own.from_bytes(bytes(size * len(record)), group)
    collectives.all_gather(output, own.from_bytes(record, group), group=group)
    data = own.to_bytes(output)
    return [data[at : at + len(record)] for at in range(0, len(data), len(record))]


def share_numbers(numbers: Sequence[int | float], group: Group | None) -> list[list[Any]]:
    """Return the numbers of each of a group's ranks, in the order of the ranks.

    Example:
        >>> share_numbers([rank, 0.5], group)  # on each of two ranks
        [[0, 0.5], [1, 0.5]]

    Args:
        numbers: this rank's, as many on every rank and of the same types: 64-bit integers, and floats, which stay
            float64.
        group: the ranks, all of which call this; None is this process alone.
    """
    record = struct.Struct("<" + "".join("d" if isinstance(each, float) else "q" for each in numbers))
    return [list(record.unpack(each)) for each in gather_bytes(record.pack(*numbers), group)]


def reduce_numbers(numbers: Sequence[int | float], op: Literal["sum", "max", "min"], group: Group | None) -> list[Any]:
    """Reduce the numbers of a group's ranks, place by place.

    Example:
        >>> reduce_numbers([rank, 10 - rank], "max", group)  # on each of two ranks
        [1, 10]

    Args:
        numbers: this rank's, as many on every rank: 64-bit integers, or floats, which are reduced in float64. If any
            number is a float, all are taken as floats, on every rank alike.
        op: ``"sum"``, ``"max"`` or ``"min"``.
        group: the ranks, all of which call this; None is this process alone.
    """
    if group is None or groups.size(group) == 1 or not numbers:
        return list(numbers)
    own = port().collectives
    tensor = own.from_numbers(numbers, group)
    collectives.all_reduce(tensor, op, group=group)
    return own.to_numbers(tensor)


def bytes_to_tensor(data: bytes, group: Group) -> Tensor:
    """Return a tensor of bytes where a group communicates, to be sent to one rank or received from it.

    Args:
        data: what is sent, or as many bytes as are received.
        group: the group.
    """
    return port().collectives.from_bytes(data, group)


def tensor_to_bytes(tensor: Tensor) -> bytes:
    """Return the bytes of a tensor of `bytes_to_tensor`.

    Args:
        tensor: that has been received.
    """
    return port().collectives.to_bytes(tensor)


def _broadcast(payload: bytes, sender: int, group: Group) -> bytes:
    own = port().collectives
    tensor = own.from_bytes(payload, group)
    collectives.broadcast(tensor, sender, group=group)
    return own.to_bytes(tensor)
