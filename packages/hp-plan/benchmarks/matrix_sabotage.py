"""Verifies a model in 42 ways in which a plan may compute something else than one process; adds to docs/products.md.

nox -s products                                         after the products
python packages/hp-plan/benchmarks/matrix_sabotage.py rank   those whose description contains a text
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from typing import Any

from matrix_products import RESULTS, write_page
from product_runs import judge_sabotage
from sabotage import KINDS, LOSSES

from hp_testing import RankError, close_pools, run_ranks

AXES = ("dp_shard", "tp", "cp", "pp")
SABOTAGE = RESULTS.with_name("sabotage.json")


def verdict_of(kind: str, axis: str) -> tuple[str, str]:
    """What `verify` makes of a kind on an axis, beside what training does; and why."""
    try:
        said = run_ranks(2, judge_sabotage, kind, axis, timeout=120.0)
    except RankError as error:
        return "crash", str(error).strip().splitlines()[-1]
    one: dict[str, Any] = next((each for each in said if each["verdict"] != "right"), said[0])
    different = one["verdict"] in ("wrong", "refused", "warned")
    why = f"{one['verdict']} ({one['detail']}), verify {one['verify']} ({one['verify_detail']})"
    if any(each["verify"] == "crash" or each["verdict"] == "crash" for each in said):
        return "crash", why
    if any(each["verify"] != "passed" for each in said):
        return "caught" if different else "false alarm", why
    if one["verdict"] == "wrong":
        return "missed", why
    return {"right": "the same", "refused": "missed", "warned": "warned"}[one["verdict"]], why


def main() -> None:
    """Run all; end with an error where `verify` misses a difference, or sees one that training has not."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("only", nargs="*", help="parts of descriptions; none means all")
    options = parser.parse_args()
    results = json.loads(SABOTAGE.read_text()) if SABOTAGE.exists() else {}
    try:
        for kind in (*KINDS, *LOSSES):
            if options.only and not any(part in kind for part in options.only):
                continue
            for axis in AXES:
                verdict, why = verdict_of(kind, axis)
                results[f"{kind} | {axis}"] = verdict
                print(kind, axis, verdict, why, sep=" | ", flush=True)
    finally:
        close_pools()
    SABOTAGE.parent.mkdir(parents=True, exist_ok=True)
    SABOTAGE.write_text(json.dumps(results, indent=1))
    if RESULTS.exists():
        write_page(json.loads(RESULTS.read_text()), results)
    counts = Counter(results.values())
    print(dict(counts))
    if counts.keys() - {"caught", "the same", "warned"}:
        sys.exit(1)


if __name__ == "__main__":
    main()
