"""Files on a POSIX file system: written in place by many processes, complete once renamed; JSON read within limits.

Note [Commit]
    A save writes into ``<name>.part-<nonce>``. Each rank syncs the files that it wrote to. Then rank 0 writes the
    manifest last, syncs it and the folder, renames the folder, and syncs its parent. At any moment before the rename
    the old checkpoints are untouched; a folder without a manifest whose own hash is right is no checkpoint. The nonce
    keeps what an interrupted save left from meeting the next one, which removes it once no process locks it.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import json
import mmap
import os
import re
import secrets
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

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


# ---- snapshots ----
_ALIGNMENT = 64


class Arena:
    """Memory that this process and its writer share; it grows as needed and never shrinks.

    Args:
        descriptor: of the arena of another process. Default: a new one.
    """

    def __init__(self, descriptor: int | None = None) -> None:
        self.descriptor = _create() if descriptor is None else descriptor
        self._array = np.empty(0, np.uint8)

    def reserve(self, size: int) -> np.ndarray:
        """Return the arena's bytes, at least ``size``; what it had before is undefined."""
        if len(self._array) < size:
            if os.fstat(self.descriptor).st_size < size:
                os.ftruncate(self.descriptor, size)
            mapped = mmap.mmap(self.descriptor, size)
            if hasattr(mmap, "MADV_HUGEPAGE"):
                with suppress(OSError):  # a kernel without them: 512 times the page faults
                    mapped.madvise(mmap.MADV_HUGEPAGE)
            self._array = np.frombuffer(mapped, np.uint8)
        return self._array

    def store(self, sizes: Sequence[int], source: Callable[[int], np.ndarray]) -> list[int]:
        """Copy arrays into the arena, one after the other; return where each starts.

        Args:
            sizes: bytes of each array.
            source: returns the array of a number; one at a time, since it may be a copy from a device.
        """
        starts = [0, *np.cumsum([-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes]).tolist()]
        memory = self.reserve(starts[-1])
        for number, size in enumerate(sizes):
            memory[starts[number] : starts[number] + size] = source(number)
        return starts

    def close(self) -> None:
        """Give the memory back; the writer keeps its own view of it as long as it writes."""
        self._array = np.empty(0, np.uint8)
        os.close(self.descriptor)


def _create() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("hp-checkpoint")
    with tempfile.TemporaryFile() as file:  # a system without them: a file without a name
        return os.dup(file.fileno())


MANIFEST = "manifest.json"
_PART = ".part-"
_NONCE = re.compile(r".+\.part-[0-9a-f]{12}")  # a folder of a similar name is not ours to remove
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.\-]+):/+")  # one slash is left of two in a Path
_WRITTEN_BYTES = 1 << 20
_NEW = 60.0  # seconds in which a save has surely locked its folder
_EXCHANGE = 2  # RENAME_EXCHANGE
_AT_FDCWD = -100


def local_folder(place: str | os.PathLike[str]) -> Path:
    """Return the absolute path of a folder or a file.

    Raises:
        TypeError: it is no path.
        ValueError: it is a URL, as that of an object store; as a path it would be a local folder of that name.
    """
    if not isinstance(place, str | os.PathLike):
        raise TypeError(f"a folder of checkpoints is a path, got {place!r}")
    text = os.fspath(place)
    if _URL.match(text):
        url = _URL.sub(r"\1://", text, count=1)
        raise ValueError(
            f"{url} is a URL; checkpoints are read and written in folders alone. Mount the object store as a file"
            " system and save with layout='shards', or copy a checkpoint's folder there once it is complete"
        )
    return Path(text).absolute()


def followed(target: Path) -> Path:
    """Return where a checkpoint is that is saved under a name; a link stays, and so does the disk that it leads to."""
    return Path(os.path.realpath(target)) if target.is_symlink() else target


def new_nonce() -> str:
    """Return an unused nonce of a save."""
    return secrets.token_hex(6)


def part_folder(target: Path, nonce: str) -> Path:
    """Return the folder that a save writes into before it is renamed to ``target``."""
    return target.with_name(f"{target.name}{_PART}{nonce}")


@contextmanager
def in_progress(part: Path) -> Iterator[None]:
    """Lock the folder of a save, so that it is not taken for an interrupted one's, and remove it if the save fails."""
    descriptor = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise
    finally:
        os.close(descriptor)


def remove_rests(part: Path) -> None:
    """Remove what interrupted saves left beside a new save's folder; a save in progress is new or has locked its own.

    Args:
        part: the folder that was made just now: it has the time of the file system, whose clock may not be this one's.
    """
    now = part.stat().st_mtime
    for folder in part.parent.glob(f"*{_PART}*"):
        if not _NONCE.fullmatch(folder.name) or folder == part:
            continue
        with suppress(OSError):
            if now - folder.lstat().st_mtime < _NEW:
                continue
            if folder.is_symlink():
                folder.unlink()
                continue
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder)
            finally:
                os.close(descriptor)


def make_folder(folder: Path) -> None:
    """Create a folder and those above it, and sync those that have a new one: what is saved below has to be found."""
    missing = [each for each in (folder, *folder.parents) if not each.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for each in reversed(missing):
        sync_folder(each.parent)


def check_space(folder: Path, needed: int) -> None:
    """Raise ``OSError`` (ENOSPC) if a file system has less than ``needed`` bytes left, and says how many it has."""
    usage = os.statvfs(folder)
    free = usage.f_bavail * usage.f_frsize
    if usage.f_blocks and free < needed:
        text = f"{needed:,} bytes are needed and {free:,} are free"
        raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)}: {text}", str(folder))


@contextmanager
def opened(path: Path, *, write: bool = False) -> Iterator[int]:
    """Open a regular file, which is created for writing.

    A link is followed in a folder without a manifest, such as a snapshot in the hub's cache. No checkpoint has one.

    Raises:
        InvalidCheckpointError: to be read, it is a link of a checkpoint, a pipe or another special file.
        OSError: it can't be opened.
    """
    flags = os.O_WRONLY | os.O_CREAT if write else os.O_RDONLY | os.O_NONBLOCK
    try:
        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        if write or os.path.lexists(path.with_name(MANIFEST)):
            raise InvalidCheckpointError(f"{path} is a link; expected a regular file") from None
        descriptor = os.open(path, flags | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise InvalidCheckpointError(f"{path} is no regular file")
        yield descriptor
    finally:
        os.close(descriptor)


def write_at(descriptor: int, data: np.ndarray | memoryview, offset: int, path: Path) -> None:
    """Write bytes at an offset.

    Raises:
        OSError: with the file's name.
    """
    view = data if isinstance(data, memoryview) else data.data
    while True:
        try:
            done = os.pwrite(descriptor, view[:_WRITTEN_BYTES], offset)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(path)) from error
        if done == len(view):
            return
        view, offset = view[done:], offset + done


def read_at(descriptor: int, data: np.ndarray, offset: int, path: Path) -> None:
    """Fill ``data`` from an offset of a file.

    Raises:
        InvalidCheckpointError: the file is too short.
        OSError: with the file's name.
    """
    view = data.data
    while view:
        try:
            done = os.preadv(descriptor, [view], offset)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(path)) from error
        if not done:
            raise InvalidCheckpointError(f"{path} ends at byte {offset:,}: it was cut off")
        view, offset = view[done:], offset + done


def write_small(path: Path, content: bytes) -> None:
    """Write a small file and sync it."""
    with opened(path, write=True) as descriptor:
        write_at(descriptor, np.frombuffer(content, np.uint8), 0, path)
        sync(descriptor, path)


def read_small(path: Path, limit: int = 1 << 30) -> bytes:
    """Read a complete file.

    Raises:
        InvalidCheckpointError: it is longer than ``limit``, or not a regular file.
        OSError: it can't be read.
    """
    with opened(path) as descriptor:
        size = os.fstat(descriptor).st_size
        if size > limit:
            raise InvalidCheckpointError(f"{path} has {size:,} bytes, at most {limit:,} were expected")
        data = np.empty(size, np.uint8)
        read_at(descriptor, data, 0, path)
    return data.tobytes()


def bytes_beside(path: Path) -> int:
    """Return how many bytes the other files of a file's folder have."""
    with os.scandir(path.parent) as found:
        return sum(each.stat().st_size for each in found if each.name != path.name and each.is_file())


def read_json(path: Path) -> bytes:
    """Read a complete file of JSON, which may have many values only where it describes much data.

    Raises:
        InvalidCheckpointError: as `read_small`, or it has too many values.
        OSError: it can't be read.
    """
    content = read_small(path)
    check_values(content, bytes_beside(path), str(path))
    return content


def sync(descriptor: int, path: Path) -> None:
    """Wait until a file's content is on the disk."""
    try:
        os.fsync(descriptor)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def commit(part: Path, target: Path) -> None:
    """Rename a folder that is complete, and sync; a checkpoint at ``target`` is exchanged for it and then removed.

    Raises:
        OSError: the file system can't exchange folders.
    """
    sync_folder(part)
    if target.exists():
        _exchange(part, target)
        sync_folder(target.parent)
        shutil.rmtree(part, ignore_errors=True)
    else:
        os.rename(part, target)
        sync_folder(target.parent)


def sync_folder(folder: Path) -> None:
    """Sync the names that a folder has: a file that is synced may still lose its own."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        sync(descriptor, folder)
    finally:
        os.close(descriptor)


def _exchange(part: Path, target: Path) -> None:
    """Exchange two folders in one step, which Linux can and POSIX can't."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        number = errno.ENOSYS
    elif rename(_AT_FDCWD, os.fsencode(part), _AT_FDCWD, os.fsencode(target), _EXCHANGE) == 0:
        return
    else:
        number = ctypes.get_errno()
    text = "this file system can't exchange folders; save under a new name"
    raise OSError(number, f"{os.strerror(number)}: {text}", str(target))
