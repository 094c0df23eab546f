"""Runs random products of families, axes, options and habits against one process, and writes docs/products.md.

nox -s products                        1,000 products; what has no result yet
nox -s products -- --again             everything anew
nox -s products -- --numbers 17 23     some, and what each rank said
nox -s products -- --only "cp 2"       those whose description contains a text
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from families import FAMILIES  # noqa: E402
from product_runs import STEPS, TOLERANCE, judge_number  # noqa: E402
from products import AXES, TEXT, draw  # noqa: E402

from hp_testing import RankError, close_pools, run_ranks  # noqa: E402

RESULTS = ROOT / ".nox" / "results" / "products.json"
PAGE = ROOT / "docs" / "products.md"
VERDICTS = ("right", "refused", "wrong", "crash", "differs")
FAULTS = {
    "lint refuses what trains": lambda one: bool(one["lint"]) and one["verdict"] == "right",
    "lint is silent where training without a habit refuses": lambda one: (
        not one["lint"] and one["verdict"] == "refused" and (not one["habits"] or one["verify"] == "refused")
    ),
    "verify fails where training is right": lambda one: one["verdict"] == "right" and one["verify"] != "passed",
    "verify passes where training without a habit is wrong": lambda one: (
        one["verdict"] == "wrong" and one["verify"] == "passed" and not one["habits"]
    ),
    "verify crashes": lambda one: one["verify"] == "crash",
}
INTRODUCTION = """\
# Products

Written by `nox -s products` with transformers {version}; do not edit it.

A product is drawn at random from its number: one of {families} model families of transformers, one of {axes} meshes of
2 or 4 ranks, options of the plan (styles, sharding, schedule, experts, recomputation, accumulation, optimizer,
clipping), padding, and up to two habits of users (hooks, writes in place, losses of their own, frozen parts, reads and
writes between steps). It trains {steps} steps in float64 on gloo ranks and in one process. *Right*: losses, gradients
and weights differ by at most {tolerance:g} of the largest element. *Refused*: every rank raises an error of these
packages, by name. `lint` and `verify` judge each plan beside.

"""
SABOTAGE = """
## Models that a plan computes otherwise

{kinds} changes to a small Llama, as code of models does them, on four axes of 2 ranks: {counts}. *Caught*: training
differs from one process, or is refused, and `verify` says so. *The same*: the change makes no difference on this axis,
and `verify` passes. *Warned*: under `cp` a model that changes from call to call cannot be compared, which a warning
says.

"""


def run(number: int) -> dict[str, Any]:
    """Judge a product on the ranks of a pool; what they say, as one."""
    product = draw(number)
    begin = time.monotonic()
    try:
        said = run_ranks(product.ranks, judge_number, number, timeout=120.0)
    except RankError as error:
        one = {"verdict": "crash", "detail": str(error), "lint": [], "verify": "", "verify_detail": ""}
    else:
        one = next((each for each in said if each["verdict"] not in ("right", "refused")), said[0])
        if len({each["verdict"] for each in said}) > 1:
            one = {**one, "verdict": "differs", "detail": "; ".join(each["detail"] for each in said)}
        one = {**one, "verify": next((each["verify"] for each in said if each["verify"] != "passed"), "passed")}
    seconds = round(time.monotonic() - begin, 1)
    return {**one, "name": str(product), "habits": list(product.habits), "seconds": seconds}


def main() -> None:
    """Run what is asked for; end with an error where anything is neither right nor refused, or is judged wrongly."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=1000, help="products; default 1000")
    parser.add_argument("--numbers", type=int, nargs="*", help="these alone")
    parser.add_argument("--only", default="", help="those whose description contains this")
    parser.add_argument("--again", action="store_true", help="run what has a result, too")
    parser.add_argument("--failed", action="store_true", help="run what has a fault again")
    options = parser.parse_args()
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for config in {FAMILIES[name].config for name in TEXT}:
        module = getattr(importlib.import_module("transformers"), config).__module__
        importlib.import_module(module.replace("configuration_", "modeling_"))
    chosen = range(options.count) if options.numbers is None else options.numbers
    again = options.again or options.numbers is not None
    todo = [number for number in chosen if options.only in str(draw(number))]
    if not again:
        todo = [n for n in todo if str(n) not in results or (options.failed and faults_of(results[str(n)]))]
    try:
        for number in sorted(todo, key=lambda number: draw(number).ranks):  # one pool after the other
            results[str(number)] = one = run(number)
            said = [f"{one['seconds']:.1f} s", one["name"], one["verdict"], f"verify {one['verify']}"]
            print(number, " | ".join([*said, *(f"{fault}: {_why(one)}" for fault in faults_of(one))]), flush=True)
            RESULTS.parent.mkdir(parents=True, exist_ok=True)
            RESULTS.write_text(json.dumps(results, indent=1))
    finally:
        close_pools()
    sabotage = RESULTS.with_name("sabotage.json")
    write_page(results, json.loads(sabotage.read_text()) if sabotage.exists() else {})
    faults = Counter(fault for one in results.values() for fault in faults_of(one))
    print(dict(Counter(one["verdict"] for one in results.values())), dict(faults))
    if faults:
        sys.exit(1)


def faults_of(one: dict[str, Any]) -> list[str]:
    """What is wrong about a result."""
    own = [one["verdict"]] if one["verdict"] not in ("right", "refused") else []
    return own + [fault for fault, is_one in FAULTS.items() if is_one(one)]


def _why(one: dict[str, Any]) -> str:
    details = one["detail"], one["verify_detail"], *one["lint"]
    return " / ".join(detail.strip().splitlines()[-1][:500] for detail in details if detail.strip())


def write_page(results: dict[str, dict[str, Any]], sabotage: dict[str, str]) -> None:
    """Write the page of all results, and of what `verify` makes of models that a plan computes otherwise."""
    version = importlib.import_module("transformers").__version__
    counted = {"families": len(TEXT), "axes": len(AXES), "steps": STEPS, "tolerance": TOLERANCE}
    lines = [INTRODUCTION.format(version=version, **counted)]
    counts = Counter(one["verdict"] for one in results.values())
    lines.append(f"{len(results)} products: {', '.join(f'{counts[verdict]} {verdict}' for verdict in VERDICTS)}.\n\n")
    judged = {fault: [number for number, one in results.items() if is_one(one)] for fault, is_one in FAULTS.items()}
    lines += [f"- {fault}: {len(numbers)}\n" for fault, numbers in judged.items()]
    groups = {
        "axes": lambda one: [_axes(one["name"])],
        "habit": lambda one: one["habits"] or ["none"],
    }
    for title, of in groups.items():
        lines.append(f"\n| {title} | {' | '.join(VERDICTS)} |\n|{' --- |' * (len(VERDICTS) + 1)}\n")
        rows: dict[str, Counter[str]] = {}
        for one in results.values():
            for row in of(one):
                rows.setdefault(row, Counter())[one["verdict"]] += 1
        for row in sorted(rows):
            lines.append(f"| {row} | {' | '.join(str(rows[row][verdict] or '-') for verdict in VERDICTS)} |\n")
    refused: Counter[str] = Counter()
    for one in results.values():
        if one["verdict"] == "refused":
            refused[_why(one).split(" / ")[0].split(" (")[0].split(";")[0][:160]] += 1
    lines.append("\nThe refusals that came more than twice:\n\n")
    lines += [f"- {count}: {text}\n" for text, count in refused.most_common() if count > 2]
    PAGE.write_text("".join([*lines, *_of_sabotage(sabotage)]))


def _of_sabotage(verdicts: dict[str, str]) -> list[str]:
    """Lines of a table: kinds by axes."""
    if not verdicts:
        return []
    pairs = [tuple(key.split(" | ")) for key in verdicts]
    kinds, axes = (list(dict.fromkeys(pair[place] for pair in pairs)) for place in range(2))
    counts = ", ".join(f"{count} {verdict}" for verdict, count in Counter(verdicts.values()).most_common())
    lines = [SABOTAGE.format(kinds=len(kinds), counts=counts)]
    lines.append(f"| change | {' | '.join(f'{axis} 2' for axis in axes)} |\n|{' --- |' * (len(axes) + 1)}\n")
    for kind in kinds:
        lines.append(f"| {kind} | {' | '.join(verdicts[f'{kind} | {axis}'] for axis in axes)} |\n")
    return lines


def _axes(name: str) -> str:
    axes = ("dp_replicate", "dp_shard", "cp", "tp", "pp", "ep")
    return ", ".join(part for part in name.split(", ") if part.split(" ")[0] in axes)


if __name__ == "__main__":
    main()
