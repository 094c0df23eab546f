"""1,000 random bits flipped in data, headers, manifest and values, and 3,000 texts changed with the right hashes.

A load of all with `verify="all"` names file, block and tensor of each flipped bit; one of some tensors does where it
has read the byte, and else loads the truth. The checkpoints were written by two ranks as rows, and as columns, where a
checksum is of strided runs of a shared file; and in files of each rank. A text that was changed loads what it says or
is refused by name, and nothing else happens.
"""

from __future__ import annotations

import argparse
import itertools
import random
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import crash_program
import flips
import hostile

from hp_checkpoint import save
from hp_checkpoint.errors import Ranks
from hp_checkpoint.layout.state import flatten
from hp_checkpoint.saving.saving import save_state
from hp_testing import close_pools, run_ranks
from hp_testing.pools.target import select

LAYOUTS: tuple[Any, ...] = ("files", "shards")


def save_sharded(folder: str, dim: int, layout: Any) -> None:
    """Save two parts from all ranks, sharded along a dim."""
    from hp_dtensor import Shard, distribute_tensor, init_device_mesh
    from hp_platform import get_platform
    from hp_testing import as_tensor

    mesh = init_device_mesh("cpu", (get_platform().groups.size(),))
    values = np.random.default_rng(0)

    def tensor(rows: int):
        return distribute_tensor(as_tensor(values.standard_normal((rows, 60)).astype("f4")), mesh, [Shard(dim)])

    state = {part: {f"w{n}": tensor(40 + 30 * n) for n in range(5)} for part in ("model", "optimizer")}
    save_state(flatten({**state, "step": 3}), Path(folder), Ranks(), block_bytes=8 << 10, layout=layout)


def main() -> None:
    """Flip and change."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--flips", type=int, default=1000)
    parser.add_argument("--texts", type=int, default=3000)
    options = parser.parse_args()
    select("torch-cpu")
    with tempfile.TemporaryDirectory() as base:
        counts: Counter[str] = Counter()
        for number, (dim, layout) in enumerate(itertools.product((0, 1), LAYOUTS)):
            folder, choice = Path(base) / str(number), random.Random(number)
            run_ranks(2, save_sharded, str(folder), dim, layout)
            for _ in range(options.flips // 4):
                was_read, in_tensor = flips.flip(folder, choice)
                counts.update(flips=1, in_tensors=in_tensor, read=was_read)
        close_pools()
        print(
            f"{counts['flips']} flips, {counts['in_tensors']} of them in tensors: all named under 'all', and the"
            f" {counts['read']} that a load of some tensors has read under 'read'",
            flush=True,
        )
        for layout in LAYOUTS:
            save(crash_program.state(1), checkpoint_id=Path(base) / layout, no_dist=True, layout=layout)
        kinds = [(kind, "files") for kind in (hostile.manifests, hostile.values, hostile.headers)]
        for kind, layout in (*kinds, (hostile.manifests, "shards")):
            whole = Path(base) / layout
            parts = ("model",) if kind is hostile.headers else ("model", "optimizer", "step")
            found = Counter(
                hostile.outcome(folder, parts=parts)
                for folder in kind(whole, Path(base) / "changed", options.texts // 4, random.Random(7))
            )
            assert set(found) <= {"same", "other", "named"}, found
            print(f"changed {kind.__name__}, {layout}: {dict(found)}", flush=True)


if __name__ == "__main__":
    main()
