"""Messages between a training process and its writer: JSON texts with their lengths before them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

from hp_checkpoint.storage import read_small

__all__ = ["failed_file", "failures", "receive", "send"]

_LENGTH = 8


def send(stream: BinaryIO, message: Mapping[str, Any]) -> None:
    """Write a message."""
    content = json.dumps(message).encode()
    stream.write(len(content).to_bytes(_LENGTH, "little") + content)
    stream.flush()


def receive(stream: BinaryIO) -> dict[str, Any] | None:
    """Read a message; None at the end of the stream."""
    length = stream.read(_LENGTH)
    if len(length) < _LENGTH:
        return None
    content = stream.read(int.from_bytes(length, "little"))
    return json.loads(content)


def failures(part: Path) -> list[str]:
    """List the ranks that failed, with their errors; none of a folder that is committed or removed meanwhile."""
    try:
        files = sorted(part.glob("rank-*.failed"))
        return [f"{path.stem.replace('-', ' ')}: {read_small(path).decode()}" for path in files]
    except FileNotFoundError:
        return []


def failed_file(part: Path, rank: int) -> Path:
    """Return the file that says that a rank failed."""
    return part / f"rank-{rank}.failed"
