"""Context parallelism against one process: families x ways x batches x load balance x ranks, in float64.

nox -s context                       all cases
nox -s context -- --only gemma3      those whose description contains a text
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from context_cases import BATCHES, FAMILIES, LENGTH, Case, judge_all

from hp_testing import close_pools, run_ranks

CHUNK = 24


def cases_of(size: int) -> list[Case]:
    """All cases on so many ranks. Windows are shorter than a rank's part, longer, and longer than the sequence."""
    part = LENGTH // size
    degrees = {2: [(None, None), (1, None)], 8: [(2, 2), (1, 4)]}.get(
        size, [(None, None), (1, None), (2, None), (2, 1), (1, 2)]
    )
    windows = {family: [part - 1, part + 3, LENGTH + 4] for family in FAMILIES} | {"llama": [None]}
    return [
        Case(family, window, degree, balance, batch, inner)
        for family in FAMILIES
        for window, (degree, inner), balance, batch in itertools.product(
            windows[family], degrees, (False, True), BATCHES
        )
    ]


def verdict_of(said: list[str]) -> str:
    """One word for what the ranks said."""
    kinds = {text.split(":")[0].split(" ")[0] for text in said}
    return kinds.pop() if len(kinds) == 1 else "differs between ranks"


def main() -> None:
    """Runs the cases, prints the counts; ends with an error where one is neither right nor refused by all ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="run the cases whose description contains this")
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 4, 8], help="numbers of ranks; default 2 4 8")
    options = parser.parse_args()
    total: Counter[str] = Counter()
    bad = []
    for size in options.ranks:
        cases = [case for case in cases_of(size) if options.only in str(case)]
        counts: Counter[tuple[str, str]] = Counter()
        began = time.perf_counter()
        for at in range(0, len(cases), CHUNK):
            chunk = cases[at : at + CHUNK]
            for case, said in zip(
                chunk, zip(*run_ranks(size, judge_all, chunk, timeout=600.0), strict=True), strict=True
            ):
                verdict = verdict_of(list(said))
                counts[case.family, verdict] += 1
                total[verdict] += 1
                if verdict not in ("right", "refused"):
                    bad.append((size, case, said))
        print(f"{size} ranks, {len(cases)} cases, {time.perf_counter() - began:.0f} s")
        for (family, verdict), count in sorted(counts.items()):
            print(f"  {family:8} {verdict:10} {count}")
    close_pools()
    for size, case, said in bad:
        print(f"{size} ranks: {case}: {said}")
    print(", ".join(f"{count} {verdict}" for verdict, count in total.most_common()))
    if bad:
        sys.exit(1)


if __name__ == "__main__":
    main()
