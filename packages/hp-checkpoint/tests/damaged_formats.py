"""Checkpoints of every format with one or several changes, of their bytes or of what these mean."""

from __future__ import annotations

import io
import json
import pickletools
import random
import shutil
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hostile
import numpy as np
import torch
import torch.distributed.checkpoint as dcp
import xxhash

from hp_checkpoint import save
from hp_checkpoint.disk.files import Kind, lay_out
from hp_checkpoint.disk.manifest import sealed
from hp_checkpoint.formats.hugging_face import write_files

FORMATS = ("files", "shards", "dcp", "pt", "safetensors", "hub", "ckpt")
SEALED = ("files", "shards")
"""Those with checksums: without the right ones no changed byte is taken."""

_DEEP = json.loads("[" * 500 + "]" * 500)
ODD = [
    *hostile.ODD,
    -(2**63),
    2**64,
    1e308,
    -1.5,
    "1" * 5000,
    "\ud7ff",
    [[]] * 50,
    {"a": {"b": []}},
    [2**40] * 70,
    _DEEP,
]


def tensors() -> dict[str, np.ndarray]:
    values = np.random.default_rng(3)
    return {f"w{n}": values.standard_normal((3 + n, 5)).astype(np.float32) for n in range(2)}


def state() -> dict[str, Any]:
    own = {name: torch.from_numpy(array) for name, array in tensors().items()}
    moments = {name: {"exp_avg": each + 1, "step": torch.tensor(2.0)} for name, each in own.items()}
    values = {"step": 7, "rates": [0.5, {"a": None}], "pair": (1, "x"), "more": [own["w0"] * 2]}
    return {"model": own, "optimizer": moments, **values}


def write(kind: str, folder: Path) -> Path:
    """Write a checkpoint of a format, and return its folder or its file."""
    place = folder / kind
    if kind in SEALED:
        save(state(), checkpoint_id=place, no_dist=True, layout=kind)  # type: ignore[arg-type]
    elif kind == "dcp":
        dcp.save(state(), checkpoint_id=place, no_dist=True)
    elif kind == "pt":
        place.mkdir()
        torch.save({**state(), "parameter": torch.nn.Parameter(torch.ones(3))}, place / "x.pt")
        place = place / "x.pt"
    elif kind == "ckpt":
        place.mkdir()
        (place / "x.ckpt").write_bytes(_mindspore(tensors()))
        place = place / "x.ckpt"
    else:
        place.mkdir()
        kinds = {name: Kind("F32", array.shape) for name, array in tensors().items()}
        files = lay_out("model", kinds, limit=160 if kind == "hub" else 10**9)
        write_files(place, files, lambda name: iter([tensors()[name].reshape(-1).view(np.uint8)]))
    return place


def mutate(kind: str, whole: Path, target: Path, choice: random.Random) -> bool:
    """Copy a checkpoint with changes; tell whether what has checksums has the right ones.

    Args:
        kind: the format.
        whole: its folder or file, as `write` returns it.
        target: of the same form, replaced.
        choice: of the changes.
    """
    folder, source = (target, whole) if whole.is_dir() else (target.parent, whole.parent)
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(source, folder)
    resealed = False
    for _ in range(choice.choice([1, 1, 1, 2, 4])):
        if kind in SEALED and choice.random() < 0.6:
            resealed = _texts(folder, choice)
            continue
        path = choice.choice(sorted(folder.iterdir()))
        content = path.read_bytes()
        change = _change_of(path, choice)
        path.write_bytes(change(content, choice))
    return resealed


def _change_of(path: Path, choice: random.Random) -> Callable[[bytes, random.Random], bytes]:
    if choice.random() < 0.3:
        return any_bytes
    if path.name == ".metadata":
        return any_pickle
    if path.suffix == ".json":
        return any_json
    if path.suffix == ".safetensors":
        return _header
    return {".pt": _archive, ".ckpt": _numbers}.get(path.suffix, _numbers)


def any_bytes(content: bytes, choice: random.Random) -> bytes:
    """Flip bits, overwrite, cut, double or insert bytes."""
    changed = bytearray(content or b"\0")
    at = choice.randrange(len(changed))
    way = choice.randrange(6)
    if way == 0:
        for _ in range(choice.choice([1, 1, 4])):
            changed[choice.randrange(len(changed))] ^= 1 << choice.randrange(8)
    elif way == 1:
        changed[at : at + choice.choice([1, 4, 8])] = choice.randbytes(choice.choice([1, 4, 8]))
    elif way == 2:
        del changed[at:]
    elif way == 3:
        del changed[at : at + choice.choice([1, 4, 100])]
    elif way == 4:
        changed[at:at] = changed[at : at + choice.choice([1, 16, 500])]
    else:
        changed[at:at] = choice.randbytes(choice.choice([1, 16]))
    return bytes(changed)


def _numbers(content: bytes, choice: random.Random) -> bytes:
    """Replace a number by a large, a negative or a random one."""
    changed = bytearray(content)
    form = choice.choice(["<I", "<Q", "<q", "<H", ">d", "B"])
    size = struct.calcsize(form)
    if len(changed) < size:
        return content
    limits = {"<I": 2**32, "<Q": 2**64, "<q": 2**63, "<H": 2**16, "B": 256}
    top = limits.get(form, 0)
    value = choice.choice([float("nan"), 1e308, -1.5]) if form == ">d" else choice.choice([0, 1, top - 1, top // 2])
    struct.pack_into(form, changed, choice.randrange(len(changed) - size + 1), value)
    return bytes(changed)


def any_json(content: bytes, choice: random.Random) -> bytes:
    """Change a value, double a key, or nest."""
    try:
        tree = json.loads(content)
    except (ValueError, RecursionError):  # changed before
        return any_bytes(content, choice)
    way = choice.randrange(6)
    if way == 0:  # a key twice
        text = content.decode()
        at = text.find('"', choice.randrange(len(text)))
        return (text[:at] + '"w0": 1, "w0": 2, ' + text[at:]).encode()
    if way == 1:
        deep = choice.choice([900, 100_000])
        return b'{"a": ' + b"[" * deep + b"]" * deep + b"}"
    if way == 2:
        return content.replace(b"1", b"1" * choice.choice([30, 5000]), choice.choice([1, 3]))
    return json.dumps(_changed(tree, choice)).encode()


def _changed(tree: Any, choice: random.Random) -> Any:
    if choice.random() < 0.5:
        return hostile.changed(tree, choice)
    places = [path for path in hostile._paths(tree) if path]
    path = choice.choice(places)
    hostile._at(tree, path[:-1])[path[-1]] = choice.choice(ODD)
    return tree


def _texts(folder: Path, choice: random.Random) -> bool:
    """Change the manifest or the values beside the tensors, with the right hashes."""
    try:
        tree = json.loads((folder / "manifest.json").read_bytes())
        tree.pop("hash", None)
        if choice.random() < 0.4:
            content = any_json((folder / "state.json").read_bytes(), choice)
            (folder / "state.json").write_bytes(content)
            row = [0, len(content), 1, 0, f"{xxhash.xxh3_64_intdigest(content):016x}"]
            tree["files"]["state.json"] = {"size": len(content), "sums": [row]}
        else:
            tree = json.loads(json.dumps(_changed(tree, choice)))
        (folder / "manifest.json").write_bytes(sealed(tree))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):  # changed before
        return False
    return True


def _header(content: bytes, choice: random.Random) -> bytes:
    """Change the header of a file of safetensors."""
    start = 8 + int.from_bytes(content[:8], "little")
    text = any_json(content[8:start], choice)
    return len(text).to_bytes(8, "little") + text + content[start:]


def _archive(content: bytes, choice: random.Random) -> bytes:
    """Change a pickle in an archive, which stays one."""
    result = io.BytesIO()
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as old, zipfile.ZipFile(result, "w") as new:
            for info in old.infolist():
                data = old.read(info)
                new.writestr(info.filename, any_pickle(data, choice) if info.filename.endswith("data.pkl") else data)
    except (zipfile.BadZipFile, ValueError, EOFError, OSError, NotImplementedError):
        return any_bytes(content, choice)
    return result.getvalue()


def _bomb(first: bytes, times: int) -> bytes:
    """Return a value that has two of another one, which has two of another one, and so on."""
    numbers = [struct.pack("<I", 7000 + number) for number in range(times)]
    return first + b"".join(b"r" + each + b"0" + 2 * (b"j" + each) + b"\x86" for each in numbers)


_NAMES = ["os\nsystem", "builtins\neval", "torch._utils\n_rebuild_tensor_v2", "collections\nOrderedDict"]
_VALUES = [b"N", b"\x88", b"]", b"}", b")", b"]]a]a]a", b"X\x02\0\0\0zz", b"X\x04\0\0\0../x"]
_VALUES += [b"K\xff", b"J\xff\xff\xff\xff", b"J\0\0\0\x80", b"\x8a\x09" + b"\xff" * 8 + b"\0", b"\x8b\xff\xff\xff\x7f"]
_VALUES += [b"G\x7f\xf8" + b"\0" * 6, b"G@\x0f333333", b"\x8b" + struct.pack("<i", 3000) + b"\x7f" * 3000]
_VALUES += [b"I" + b"9" * 6000 + b"\n", b"\x8e" + b"\xff" * 7 + b"\x3f", b"]" * 3000 + b"a" * 2999]
_VALUES += [_bomb(b"N\x85", 40), _bomb(b"]", 40), _bomb(b"X\x02\0\0\0zz", 34), b"]r\x10\x27\0\0j\x10\x27\0\0a"]
_VALUES += [b"Nr\xff\xff\xff\x0f", b"Np268435455\n", *(f"c{name}\n".encode() for name in _NAMES)]
_INSTRUCTIONS = [bytes([each]) for each in b"012(tldaesuRbQ.\x81\x92\x93\x85\x86\x94"]
_INSTRUCTIONS += [
    b"N}X\x08\0\0\0__init__Ns\x86b",
    b"}" + _bomb(b")", 40) + b"Ns0",
    b"h\0",
    b"h\5",
    b"j\xff\xff\xff\x7f",
]
_NUMBERS = tuple(bytes([each]) for each in b"KMJNGX\x8c\x8a")


def any_pickle(content: bytes, choice: random.Random) -> bytes:
    """Remove, double, move, replace or insert instructions of a pickle."""
    try:
        starts = [at for _, _, at in pickletools.genops(content) if at is not None]
    except Exception:  # changed before
        return any_bytes(content, choice)
    parts = [content[a:b] for a, b in zip(starts, [*starts[1:], len(content)])]
    for _ in range(choice.choice([1, 1, 2, 5])):
        at = choice.randrange(len(parts))
        way = choice.randrange(7)
        if way == 0:
            del parts[at]
        elif way == 1:
            parts.insert(at, choice.choice(parts))
        elif way == 2:
            parts[at] = choice.choice(parts)
        elif way in (3, 4):
            pushes = [number for number, part in enumerate(parts) if part[:1] in _NUMBERS]
            parts[choice.choice(pushes or [at])] = choice.choice(_VALUES)
        elif way == 5:
            parts.insert(at, choice.choice(_VALUES))
        else:
            parts.insert(at, choice.choice(_INSTRUCTIONS))
        if not parts:
            return b""
    return b"".join(parts)


def _mindspore(arrays: dict[str, np.ndarray]) -> bytes:
    """Return a file of `mindspore.save_checkpoint`."""

    def number(value: int) -> bytes:
        digits = []
        while value > 127:
            digits.append(value & 127 | 128)
            value >>= 7
        return bytes([*digits, value])

    def field(key: int, content: bytes) -> bytes:
        return number(key << 3 | 2) + number(len(content)) + content

    values = []
    for name, array in arrays.items():
        dims = b"".join(number(1 << 3) + number(size) for size in array.shape)
        tensor = dims + field(2, b"Float32") + field(3, array.tobytes())
        values.append(field(1, field(1, name.encode()) + field(2, tensor)))
    return b"".join(values)
