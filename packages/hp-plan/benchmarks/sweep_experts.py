"""Verifies plans for mixtures of experts of transformers, families x products of axes, and writes docs/experts.md.

nox -s expert_plans                     everything
nox -s expert_plans -- Mixtral GptOss   some families; the page is written from all results that there are
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from expert_families import CELLS, FAMILIES, TOLERANCE, Cell, judge  # noqa: E402

from hp_testing import RankError, close_pools, run_ranks  # noqa: E402

RESULTS = ROOT / ".nox" / "results" / "experts.json"
PAGE = ROOT / "docs" / "experts.md"
VERDICTS = ("right", "refused", "wrong", "crash")
NUMBERS = ("loss", "gradient", "weight")
INTRODUCTION = """\
# Experts

Written by `nox -s expert_plans` with transformers {version}; do not edit it.

Mixtures of experts of transformers, unmodified, at a small size and with random weights, are trained for two steps in
float64 under plans with `[mesh] ep`, on gloo ranks, and in one process (`hp_plan.verify`). The three numbers of a cell
are the largest relative differences of the loss, of a gradient and of a weight; *right* is at most {tolerance:g} for
these and for the outputs of all modules. Every layer has 8 experts, *uneven* ones 6 or 7, two of which a token chooses.

`ep` spreads experts over ranks that share a copy of the model, and adds none: *tp 2, ep 2* has 2 ranks. In *ep 2 x
fsdp 2* 4 ranks share a copy, and each expert is sharded over 2 of them; in *ep 2 x tp 2* its features are.

"""


def run_cell(config: str, cell: Cell) -> dict[str, Any]:
    """Verify a plan on the ranks of a pool; what they say is the same."""
    try:
        said = run_ranks(cell.ranks, judge, config, cell, timeout=300.0)
    except RankError as error:
        return {"verdict": "crash", "detail": str(error)}
    return said[0] if all(each == said[0] for each in said) else {"verdict": "crash", "detail": f"ranks differ: {said}"}


def main() -> None:
    """Run what is asked for; end with an error where anything is neither right nor refused."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", help="names of configurations, or parts of them; none means all")
    parser.add_argument("--cell", action="append", choices=list(CELLS), help="only this product")
    arguments = parser.parse_args()
    chosen = [name for name in FAMILIES if not arguments.families or any(part in name for part in arguments.families)]
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    try:
        for cell in sorted(arguments.cell or CELLS, key=lambda name: CELLS[name].ranks):  # one pool after the other
            for name in chosen:
                results[f"{name} | {cell}"] = result = run_cell(name, CELLS[cell])
                print(name, cell, *result.values(), flush=True)
                RESULTS.parent.mkdir(parents=True, exist_ok=True)
                RESULTS.write_text(json.dumps(results, indent=1))
    finally:
        close_pools()
    write_page(results)
    counts = Counter(value["verdict"] for value in results.values())
    print(dict(counts))
    if counts["wrong"] or counts["crash"]:
        sys.exit(1)


def write_page(results: Mapping[str, Mapping[str, Any]]) -> None:
    """Write the page of all results."""
    version = importlib.import_module("transformers").__version__
    counts = Counter(value["verdict"] for value in results.values())
    names = [name.removesuffix("Config") for name in FAMILIES]
    lines = [INTRODUCTION.format(version=version, tolerance=TOLERANCE)]
    lines.append(f"{len(results)} cells: {', '.join(f'{counts[verdict]} {verdict}' for verdict in VERDICTS)}.\n\n")
    lines.append(f"| axes | ranks | {' | '.join(names)} |\n|{' --- |' * (len(names) + 2)}\n")
    notes: dict[str, list[str]] = {}
    for cell in CELLS:
        row = {name: results.get(f"{name} | {cell}") for name in FAMILIES}
        lines.append(f"| {cell} | {CELLS[cell].ranks} | {' | '.join(map(_shown, row.values()))} |\n")
        for name, result in row.items():
            if result is not None and result["verdict"] != "right":
                detail = result["detail"].strip().splitlines()[-1]
                notes.setdefault(f"{name.removesuffix('Config')}: {detail}", []).append(cell)
    lines += ["\n"] if notes else []
    lines += [f"- {note} ({'; '.join(cells)})\n" for note, cells in notes.items()]
    PAGE.write_text("".join(lines))


def _shown(result: Mapping[str, Any] | None) -> str:
    if result is None:
        return "-"
    if result["verdict"] != "right":
        return f"**{result['verdict']}**"
    return " ".join(f"{result[number]:.0e}" for number in NUMBERS)


if __name__ == "__main__":
    main()
