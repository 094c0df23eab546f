"""Random pairs of layouts on 1, 2, 3, 4 and 8 ranks: each state is saved in one and loaded in the other, bit for bit.

Layouts are products of pp, dp and tp or ep; placements any: shards of any dim, strided, ragged, uneven, empty; states
of AdamW and Muon; files that all ranks share, or files of each rank. They are compared with the arrays, what is loaded
with the truth on each rank, and a save from the second layout with the arrays again, or with the files of the first.
With `--mindspore PYTHON`, an interpreter that has MindSpore, it loads what PyTorch saved as well, in the second layout,
saves it, and PyTorch loads that in the first one.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import layout_pairs

from hp_testing import close_pools, run_ranks
from hp_testing.pools.target import select

TIMEOUT = 1200.0


def run_phase(phase: str, count: int, folders: list[str]) -> None:
    """Save or load all pairs: "save" the first side, "load" the second one, or load "back" the first one."""
    pairs = [layout_pairs.pair(number) for number in range(count)]
    side = 1 if phase == "load" else 0
    for ranks in layout_pairs.WORLDS:
        own = [each for each in pairs if each.sides[side].ranks == ranks]
        function = layout_pairs.save_pairs if phase == "save" else layout_pairs.load_pairs
        run_ranks(ranks, function, own, *folders, side=side, timeout=TIMEOUT)
        close_pools()


def main() -> None:
    """Run all phases, those of MindSpore in processes of its interpreter."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=300)
    parser.add_argument("--mindspore", metavar="PYTHON", help="an interpreter that has MindSpore")
    parser.add_argument("--phase", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.phase:
        select("mindspore-cpu")
        run_phase(options.phase[0], options.pairs, options.phase[1:])
        return
    select("torch-cpu")
    with tempfile.TemporaryDirectory() as base:
        saved, begin = f"{base}/saved", time.monotonic()
        run_phase("save", options.pairs, [saved])
        run_phase("load", options.pairs, [saved, f"{base}/loaded"])
        print(f"{options.pairs} pairs of layouts: bit-equal, {time.monotonic() - begin:.0f} s", flush=True)
        if options.mindspore:
            begin = time.monotonic()
            command = [options.mindspore, __file__, "--pairs", str(options.pairs), "--phase", "load"]
            subprocess.run([*command, saved, f"{base}/mindspore"], check=True)
            run_phase("back", options.pairs, [f"{base}/mindspore", f"{base}/back"])
            print(f"{options.pairs} to MindSpore and back: bit-equal, {time.monotonic() - begin:.0f} s", flush=True)


if __name__ == "__main__":
    main()
