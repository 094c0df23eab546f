"""Experts over ranks against one process: families x products of axes x routings, in float64.

nox -s experts                       all runs
nox -s experts -- --only Mixtral     those whose description contains a text
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "hp-moe" / "tests"))

from moe_runs import FAMILIES, PRODUCTS, ROUTINGS, Run, judge_all

from hp_testing import close_pools, run_ranks

CHUNK = 16
EXPERTS = {"ep4": (6, 8), "ep2 x fsdp2": (2, 3, 8), "ep2 x fsdp2 on dim 1": (3,), "ep4 x fsdp4": (6, 8)}

WITHOUT_LOSS = ("DeepseekV3Config", "Glm4MoeConfig")
"""Families whose models add no load balancing loss."""


def runs_of(product: str) -> list[Run]:
    """List all runs of a product: uneven numbers of experts, and fewer than ranks, where whole experts are spread."""
    return [
        Run(family, product, routing, combine, experts, checkpointed)
        for family, experts in itertools.product(FAMILIES, EXPERTS.get(product, (6,)))
        for routing, combine in itertools.product(ROUTINGS, ("fast", "exact"))
        for checkpointed in ((False, True) if combine == "fast" else (False,))
    ] + [Run(family, product, auxiliary=True) for family in FAMILIES if family not in WITHOUT_LOSS]


def main() -> None:
    """Run all; print the counts; end with an error where one is neither right nor refused by all ranks alike."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="take the runs whose description contains this")
    options = parser.parse_args()
    total: Counter[str] = Counter()
    bad = []
    for product, size in PRODUCTS.items():
        runs = [run for run in runs_of(product) if options.only in str(run)]
        counts: Counter[str] = Counter()
        began = time.perf_counter()
        for at in range(0, len(runs), CHUNK):
            some = runs[at : at + CHUNK]
            for run, said in zip(some, zip(*run_ranks(size, judge_all, some, timeout=600.0), strict=True), strict=True):
                kinds = {text.split(":")[0] for text in said}
                verdict = kinds.pop() if len(kinds) == 1 else "differs between ranks"
                counts[verdict] += 1
                if verdict != "right":
                    bad.append((run, said))
        total += counts
        print(f"{product:20} {size} ranks, {len(runs)} runs, {time.perf_counter() - began:.0f} s: {dict(counts)}")
    close_pools()
    for text, some in itertools.groupby(sorted(bad, key=lambda each: each[1][0]), key=lambda each: each[1][0]):
        runs = [run for run, _ in some]
        print(f"{len(runs)} runs, the first {runs[0]}: {text}")
    print(", ".join(f"{count} {verdict}" for verdict, count in total.most_common()))
    if set(total) - {"right", "refused"}:
        sys.exit(1)


if __name__ == "__main__":
    main()
