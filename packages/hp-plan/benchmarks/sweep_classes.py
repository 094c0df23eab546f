"""Trains every text model of transformers that is built small under four plans, and adds a table to docs/models.md.

nox -s families                                              the families of the first table, and then these
python packages/hp-plan/benchmarks/sweep_classes.py Llama    those whose configuration's name contains a text

What has a result that is right or refused is not run again.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import warnings
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from product_runs import judge_training
from small_models import TASKS, Swept, all_configs, build
from sweep_families import CLASSES as HEADING
from sweep_families import PAGE, RESULTS

from hp_testing import RankError, close_pools, run_ranks

CLASSES = RESULTS.with_name("classes.json")
CELLS: dict[str, dict[str, Any]] = {
    "fsdp 2": {"mesh": {"dp_shard": 2}},
    "tp 2": {"mesh": {"tp": 2}},
    "cp 2": {"mesh": {"cp": 2}},
    "pp 2": {"mesh": {"pp": 2}, "pipeline": {"micro_batches": 2}},
}
INTRODUCTION = """
The configuration classes of all models of transformers for the tasks {tasks}
are made small by the names of their settings. {built} of {all} have a loss of text alone then, and draw nothing at
random; the others want pictures, sound, a library, or settings of their own. Each is trained for two steps under four
plans, on two ranks, in float64: losses, gradients and weights are compared with one process.

{counts}. *Refused*: by name, before the first step.

"""


def run(made: Swept, tables: dict[str, Any]) -> dict[str, Any]:
    """Judge a model under a plan on the ranks of a pool."""
    product = replace(
        made,
        tables={
            **tables,
            "run": {"dtype": "float64"},
            "data": {"sequence_length": 8, "batch_size": 4},
            "optimizer": {"name": "sgd", "lr": 0.1},
        },
    )
    try:
        said = run_ranks(2, judge_training, product, timeout=120.0)
    except RankError as error:
        return {"verdict": "crash", "detail": str(error).strip().splitlines()[-1]}
    one = next((each for each in said if each["verdict"] not in ("right", "refused")), said[0])
    if len({each["verdict"] for each in said}) > 1:
        return {"verdict": "differs", "detail": "; ".join(each["detail"] for each in said)}
    return one


def main() -> None:
    """Run what is asked for; end with an error where anything is neither right nor refused."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("only", nargs="*", help="parts of names of configuration classes; none means all")
    parser.add_argument("--again", action="store_true", help="run what is right or refused, too")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    results: dict[str, Any] = json.loads(CLASSES.read_text()) if CLASSES.exists() else {}
    try:
        for task, name in all_configs():
            key, known = f"{name} | {task}", results.get(f"{name} | {task}", {})
            if options.only and not any(part in name for part in options.only):
                continue
            done = key in results and all(one["verdict"] in ("right", "refused") for one in known.values())
            if done and not options.again:
                continue
            try:
                made = build(task, name)
            except Exception as error:  # whatever a model's code raises
                results[key] = {}
                print(key, f"{type(error).__name__}: {' '.join(str(error).split())[:150]}", sep=" | ", flush=True)
                continue
            results[key] = {cell: run(made, tables) for cell, tables in CELLS.items()}
            said = (f"{cell}: {one['verdict']} {one['detail'][:300]}" for cell, one in results[key].items())
            print(key, *said, sep=" | ", flush=True)
            CLASSES.parent.mkdir(parents=True, exist_ok=True)
            CLASSES.write_text(json.dumps(results, indent=1))
    finally:
        close_pools()
    write_section(results)
    counts = Counter(one["verdict"] for row in results.values() for one in row.values())
    print(dict(counts))
    if counts.keys() - {"right", "refused"}:
        sys.exit(1)


def write_section(results: dict[str, Any]) -> None:
    """Write the table into the page, after that of the families."""
    built = {key: row for key, row in results.items() if row}
    counts = Counter(one["verdict"] for row in built.values() for one in row.values())
    said = ", ".join(f"{count} {verdict}" for verdict, count in counts.most_common())
    numbers = {"built": len(built), "all": len(results), "counts": f"{4 * len(built)} cells: {said}"}
    lines = [HEADING, INTRODUCTION.format(tasks=", ".join(TASKS), **numbers)]
    lines.append(f"| configuration | task | {' | '.join(CELLS)} |\n|{' --- |' * (len(CELLS) + 2)}\n")
    refusals: Counter[str] = Counter()
    for key, row in built.items():
        lines.append(f"| {key} | {' | '.join(row[cell]['verdict'] for cell in CELLS)} |\n")
        for cell, one in row.items():
            if one["verdict"] == "refused":
                refusals[f"{cell}: {_kind(one['detail'])}"] += 1
    lines.append("\nWhy, for more than one class:\n\n")
    lines += [f"- {text}: {count}\n" for text, count in refusals.most_common() if count > 1]
    before = PAGE.read_text().split(HEADING)[0] if PAGE.exists() else ""
    PAGE.write_text(before + "".join(lines))


def _kind(detail: str) -> str:
    """A refusal without the names in it."""
    text = " ".join(detail.split()).split(" (")[0].split(";")[0]
    words = [word for word in text.split(" ") if not any(mark in word for mark in "._0123456789'") or len(word) < 3]
    return " ".join(words)[:110]


if __name__ == "__main__":
    importlib.import_module("transformers")
    main()
