"""Runs MindSpore's operators on DTensors and prints how many are right, refused and wrong.

nox -s sweep_mindspore                     every operator, on two ranks and on a 2 x 2 mesh
nox -s sweep_mindspore -- --only conv      those whose name has this text
"""

from __future__ import annotations

import argparse
import math
import sys
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests/mindspore"))

import mindspore_operators
from mindspore_operator_table import OPERATORS

from hp_testing import close_pools

CHUNK = 12


def main() -> None:
    """Sweep and print; the exit status is 1 where an operator is wrong."""
    parser = argparse.ArgumentParser(description="Sweep MindSpore's operators on DTensors.")
    parser.add_argument("--limit", type=int, default=12, help="combinations of placements for each operator")
    parser.add_argument("--only", default="", help="operators whose name has this text")
    parser.add_argument("--mesh", default="2,2x2", help="meshes, such as 2,2x2")
    options = parser.parse_args()
    names, wrong = [name for name in OPERATORS if options.only in name], 0
    for text in options.mesh.split(","):
        shape = tuple(map(int, text.split("x")))
        verdicts = []
        for at in range(0, len(names), CHUNK):
            verdicts += mindspore_operators.judge_in_pool(names[at : at + CHUNK], shape, options.limit)
        for verdict in verdicts:
            if verdict.outcome != "right":
                first = verdict.missing or next(iter(verdict.wrong or verdict.raised), "no combination ran")
                print(f"  {verdict.outcome:8} {verdict.name}: {verdict.right} right; {first[:220]}")
        counts = Counter(verdict.outcome for verdict in verdicts)
        there = len(verdicts) - counts["missing"]
        told = ", ".join(f"{counts[kind]} {kind}" for kind in ("right", "refused", "wrong"))
        tried = sum(verdict.right for verdict in verdicts)
        print(
            f"{text} mesh of {math.prod(shape)} ranks: of {len(verdicts)} operators MindSpore's CPU has {there}:"
            f" {told}; {tried} combinations of placements are right",
            flush=True,
        )
        wrong += counts["wrong"]
    close_pools()
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
