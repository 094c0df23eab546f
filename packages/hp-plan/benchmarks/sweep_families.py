"""Runs model families of transformers under plans against one process, in float64, and writes docs/models.md.

nox -s families                        what has no result yet of every family
nox -s families -- --again             everything anew
nox -s families -- llama bert --again  two families; the page is written from all results that there are
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
from family_cells import CELLS, TOLERANCE, judge  # noqa: E402

from hp_testing import RankError, close_pools, run_ranks  # noqa: E402

RESULTS = ROOT / ".nox" / "results" / "families.json"
PAGE = ROOT / "docs" / "models.md"
CLASSES = "\n## Every class\n"
VERDICTS = ("right", "refused", "wrong", "crash")
INTRODUCTION = """\
# Models

Written by `nox -s families` with transformers {version}; do not edit it.

Each model family of transformers, at a small size and with random weights, runs one forward and backward pass in
float64 under each plan (`styles = "auto"` or `"auto-sequence"`), on gloo ranks. The loss over all ranks and every
gradient are compared with one process that runs each data-parallel shard of the batch. *Right*: no difference exceeds
{tolerance:g} of the largest element; a number is the largest difference. *Padded* samples have different lengths,
through an attention mask and omitted labels. *Sharded* is the fraction of the weights that tensor parallelism shards
over 2 ranks; the rest is replicated, as `hyper-parallel lint` says.

"""


def run(names: list[str], cells: list[str], results: dict[str, Any], again: bool) -> None:
    """Runs cells and keeps each result in the file at once."""
    for cell_name in cells:
        for name in names:
            key = f"{name} | {cell_name}"
            if (key in results and not again) or (CELLS[cell_name].padded and not FAMILIES[name].padded):
                continue
            begin = time.monotonic()
            results[key] = run_cell(name, cell_name)
            results[key]["seconds"] = round(time.monotonic() - begin, 1)
            print(key, *(results[key].get(part, "") for part in ("verdict", "worst", "seconds", "detail")), flush=True)
            RESULTS.parent.mkdir(parents=True, exist_ok=True)
            RESULTS.write_text(json.dumps(results, indent=1))


def run_cell(name: str, cell_name: str) -> dict[str, Any]:
    """One cell on the ranks of a pool; what they found worst."""
    try:
        found = run_ranks(CELLS[cell_name].ranks, judge, name, cell_name, timeout=120.0)
    except RankError as error:
        return {"verdict": "crash", "detail": str(error)}
    for verdict in ("crash", "wrong", "refused"):
        for one in found:
            if one["verdict"] == verdict:
                return one
    return max(found, key=lambda one: one["worst"])


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", help="names; none means all")
    parser.add_argument("--cell", action="append", choices=list(CELLS), help="only this column")
    parser.add_argument("--again", action="store_true", help="run what has a result, too")
    parser.add_argument("--failed", action="store_true", help="run what is not right")
    arguments = parser.parse_args()
    unknown = set(arguments.families) - set(FAMILIES)
    if unknown:
        parser.error(f"no family {', '.join(sorted(unknown))}; there are {', '.join(FAMILIES)}")
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    if arguments.failed:
        results = {key: value for key, value in results.items() if value["verdict"] == "right"}
    for config in {family.config for family in FAMILIES.values()}:
        module = getattr(importlib.import_module("transformers"), config).__module__
        importlib.import_module(module.replace("configuration_", "modeling_"))
    try:
        run(arguments.families or list(FAMILIES), arguments.cell or list(CELLS), results, arguments.again)
    finally:
        close_pools()
    write_page(results)
    print(dict(Counter(value["verdict"] for value in results.values())))


def write_page(results: dict[str, Any]) -> None:
    """Writes the page of all results there are."""
    version = importlib.import_module("transformers").__version__
    counts = Counter(value["verdict"] for value in results.values())
    total = sum(counts.values())
    lines = [INTRODUCTION.format(version=version, tolerance=TOLERANCE)]
    said = ", ".join(f"{counts[verdict]} {verdict}" for verdict in VERDICTS)
    lines.append(f"{len(FAMILIES)} families, {total} cells: {said}.\n\n")
    lines.append(f"| family | {' | '.join(CELLS)} | sharded |\n|{' --- |' * (len(CELLS) + 2)}\n")
    notes: list[str] = []
    for name in FAMILIES:
        found = [results.get(f"{name} | {cell}") for cell in CELLS]
        part = (results.get(f"{name} | tp 2") or {}).get("sharded")
        shown = " | ".join(_shown(one) for one in found)
        lines.append(f"| {name} | {shown} | {'' if part is None else f'{100 * part:.0f}%'} |\n")
        for cell, one in zip(CELLS, found, strict=True):
            if one is not None and one["verdict"] != "right":
                notes.append(f"- {name}, {cell}: {one['detail'].strip().splitlines()[-1]}\n")
    if notes:
        lines += ["\n", *notes]
    rest = PAGE.read_text().partition(CLASSES) if PAGE.exists() else ()
    PAGE.write_text("".join([*lines, *rest[1:]]))  # what `sweep_classes.py` has added


def _shown(result: dict[str, Any] | None) -> str:
    if result is None:
        return "-"
    return f"{result['worst']:.0e}" if result["verdict"] == "right" else f"**{result['verdict']}**"


if __name__ == "__main__":
    main()
