"""Checkpoints of strangers: texts changed at random, with the right hashes, and what a load makes of them."""

from __future__ import annotations

import json
import random
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import xxhash
from crash_program import empty, state

from hp_checkpoint import CheckpointError, InvalidCheckpointError, load
from hp_checkpoint.disk.manifest import sealed

ODD: tuple[Any, ...] = (
    None, True, -1, 0, 1, 1.5, -0.0, float("inf"), 2**31, 2**63, 2**200, "", "x", "../x", [], {}, [1], {"a": 1},
    "F32", "F64", [-1], [0], [2**62, 2], "model.safetensors", "manifest.json", [[0, 1, 1, 0, "0"]],
)  # fmt: skip
_RAW = re.compile(r"failed: (?!InvalidCheckpointError)[A-Z]\w*(Error|Exception): ")


def changed(tree: Any, choice: random.Random) -> Any:
    """Return a copy of JSON values with one change: a value replaced, removed, doubled, moved or a little larger."""
    tree = json.loads(json.dumps(tree))
    places = [path for path in _paths(tree) if path]
    path = choice.choice(places)
    node, key = _at(tree, path[:-1]), path[-1]
    kind = choice.choice(["replace", "replace", "remove", "double", "nudge", "move"])
    if kind == "remove":
        del node[key]
    elif kind == "double":
        copy = json.loads(json.dumps(node[key]))
        if isinstance(node, list):
            node.insert(key, copy)
        else:
            node[choice.choice(["x", "../y", "w1", "model", ""])] = copy
    elif kind == "nudge" and type(node[key]) is int:
        node[key] += choice.choice([-1, 1, 4, -4, 8, 4096])
    elif kind == "move":
        node[key] = json.loads(json.dumps(_at(tree, choice.choice(places))))
    else:
        node[key] = choice.choice(ODD)
    return tree


def outcome(folder: Path, *, parts: tuple[str, ...] = ("model", "optimizer", "step")) -> str:
    """Load a folder: "same", "other", "named" for an error that says what is wrong, else the error's text."""
    new = {part: value for part, value in empty().items() if part in parts}
    try:
        load(new, checkpoint_id=folder, no_dist=True)
    except (CheckpointError, InvalidCheckpointError, ValueError, FileNotFoundError) as error:
        return str(error) if _RAW.search(str(error)) else "named"
    except Exception as error:  # no caller expects it
        return f"{type(error).__name__}: {error}"
    return "same" if _equal(new, {part: value for part, value in state(1).items() if part in parts}) else "other"


def manifests(folder: Path, target: Path, count: int, choice: random.Random) -> Iterator[Path]:
    """Make folders that differ from a checkpoint in the manifest alone, and give it the right hash."""
    tree = _manifest(folder)
    for _ in range(count):
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(folder, target)
        (target / "manifest.json").write_bytes(sealed(changed(tree, choice)))
        yield target


def values(folder: Path, target: Path, count: int, choice: random.Random) -> Iterator[Path]:
    """The same in the values beside the tensors."""
    tree, of_values = _manifest(folder), json.loads((folder / "state.json").read_bytes())
    for _ in range(count):
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(folder, target)
        content = json.dumps(changed(of_values, choice)).encode()
        (target / "state.json").write_bytes(content)
        row = [0, len(content), 1, 0, f"{xxhash.xxh3_64_intdigest(content):016x}"]
        tree["files"]["state.json"] = {"size": len(content), "sums": [row]}
        (target / "manifest.json").write_bytes(sealed(tree))
        yield target


def headers(folder: Path, target: Path, count: int, choice: random.Random) -> Iterator[Path]:
    """The same in the header of a model's folder that has no manifest."""
    content = (folder / "model.safetensors").read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:start])
    for _ in range(count):
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir()
        text = json.dumps(changed(header, choice)).encode()
        (target / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + content[start:])
        yield target


def _manifest(folder: Path) -> dict[str, Any]:
    tree = json.loads((folder / "manifest.json").read_bytes())
    del tree["hash"]
    return tree


def _paths(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    for key in tree if isinstance(tree, dict) else range(len(tree)) if isinstance(tree, list) else ():
        yield from _paths(tree[key], (*path, key))


def _at(tree: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        tree = tree[key]
    return tree


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return (
            isinstance(other, dict) and one.keys() == other.keys() and all(_equal(one[key], other[key]) for key in one)
        )
    return bool((one == other).all()) if hasattr(one, "all") else one == other
