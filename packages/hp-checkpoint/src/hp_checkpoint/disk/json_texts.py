"""Texts of JSON that others may have written: bounded in memory and time, or refused by name."""

from __future__ import annotations

import json
from typing import Any

from hp_checkpoint.errors import InvalidCheckpointError, shown

_VALUES = 4_000_000  # of any text; that beside much data may have more
_BYTES_PER_VALUE = 4  # of that data


def strict_json(content: bytes, what: str) -> dict[str, Any]:
    """Parse a JSON object.

    Args:
        content: the text.
        what: the text's name, for errors.

    Raises:
        InvalidCheckpointError: it is no JSON, no object, or has a key twice.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) != len(pairs):
            seen: set[str] = set()
            for key, _ in pairs:
                if key in seen:
                    raise InvalidCheckpointError(f"{what} has the key {shown(key)} twice")
                seen.add(key)
        return result

    try:
        value = json.loads(content.decode("utf-8"), object_pairs_hook=unique)
    except InvalidCheckpointError:
        raise
    except (ValueError, RecursionError) as error:  # also an integer with more digits than Python reads
        raise InvalidCheckpointError(f"{what} is no JSON: {str(error)[:300]}") from None
    if not isinstance(value, dict):
        raise InvalidCheckpointError(f"{what} is a JSON {type(value).__name__}, expected an object")
    return value


def check_values(content: bytes, beside: int, where: str) -> None:
    """Refuse JSON whose values take far more memory than what they describe: a value may have two bytes of the text.

    Args:
        content: the text.
        beside: bytes of the data that it describes.
        where: its place, for errors.

    Raises:
        InvalidCheckpointError: it has too many values.
    """
    if len(content) > _VALUES:
        count = sum(map(content.count, (b"[", b"{", b",")))
        if count > max(_VALUES, beside // _BYTES_PER_VALUE):
            raise InvalidCheckpointError(
                f"{where} has about {count:,} values beside {beside:,} bytes of data, expected at most {_VALUES:,}, or"
                f" one for {_BYTES_PER_VALUE} bytes. Save many numbers as an array"
            )
