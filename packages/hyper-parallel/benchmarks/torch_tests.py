"""Run torch's own tests of DTensor, FSDP2, tensor parallelism, pipelines and checkpoints on these packages.

python packages/hyper-parallel/benchmarks/torch_tests.py --source PATH [--out FILE] [--area dtensor] [--only test_api]

`--source` is a tree of torch's sources; nothing of it is kept. The imports of the tests are replaced (torch_swap.py);
the ranks are processes of gloo on CPUs. A test that fails on a number of collectives is run again with any number
right. An outcome is judged by `torch_outcomes`; where no rule fits, the test is run with torch's own library. Exits
with 1 where one is a `bug` or `not judged`.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parent))
import torch_worker
from torch_outcomes import CLASSES, judge

FILES = {  # below test/distributed; a number: every how many tests one is run
    "dtensor": (
        *("_tensor/test_api.py", "_tensor/test_dtensor.py", "_tensor/test_redistribute.py", "_tensor/test_math_ops.py"),
        *("_tensor/test_pointwise_ops.py", "_tensor/test_matrix_ops.py", "_tensor/test_view_ops.py"),
        *("_tensor/test_embedding_ops.py", "_tensor/test_tensor_ops.py", "_tensor/test_init.py"),
        *("_tensor/test_experimental_ops.py", "_tensor/test_convolution_ops.py", "_tensor/test_random_ops.py"),
        *("_tensor/experimental/test_local_map.py", "_tensor/experimental/test_register_sharding.py"),
        *("_tensor/test_optimizers.py", "test_device_mesh.py", "_tensor/test_attention.py", "_tensor/test_utils.py"),
        *("_tensor/debug/test_comm_mode.py", "_tensor/debug/test_comm_mode_features.py"),
        *("_tensor/test_common_rules.py", "_tensor/test_op_strategy.py", "_tensor/experimental/test_tp_transform.py"),
    ),
    "fsdp": ("_composable/fsdp", "_composable/test_composability/test_2d_composability.py"),
    "tensor parallel": ("tensor/parallel",),
    "pipelining": ("pipelining", "_composable/test_composability/test_pp_composability.py"),
    "checkpoint": ("checkpoint",),
    "operators": ("_tensor/test_dtensor_ops.py",),
}
COUNTS = re.compile(r"comm_counts|total_counts|comm_mode|comm count|OpOverloadPacket|Scalars are not equal")
EVERY = {"operators": 8}


def files_of(source: Path, area: str) -> list[str]:
    """Return the test files of an area, below test/distributed."""
    root = source / "test" / "distributed"
    found: list[Path] = []
    for name in FILES[area]:
        path = root / name
        found += sorted(path.rglob("test_*.py")) if path.is_dir() else [path] if path.exists() else []
    return [str(path.relative_to(root)) for path in found]


def outcomes(
    path: Path, library: str, limit: float, *, every: int = 1, only: list[str] | None = None
) -> list[dict[str, Any]]:
    """Run a file's tests in a fork of this process, and return an outcome a test."""
    if only == []:
        return []
    torch_worker.preload()
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        with os.fdopen(write, "w", buffering=1) as lines:
            torch_worker.run_file(path, library, limit, every, only, lines)
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as lines:
        found = [json.loads(line) for line in lines]
    os.waitpid(child, 0)
    return found


def run_file(root: Path, area: str, name: str, limit: float) -> list[dict[str, Any]]:
    """Run a file on these packages, then what did not pass on torch's library."""
    found = outcomes(root / name, "hp", limit, every=EVERY.get(area, 1))
    rows = [{"area": area, "file": name, **each} for each in found]
    counts = [row["test"] for row in rows if row["outcome"] == "failed" and COUNTS.search(row["text"])]
    uncounted = {each.get("test"): each for each in outcomes(root / name, "uncounted", limit, only=counts)}
    for row in rows:
        if row["test"] in uncounted:
            row.update(uncounted[row["test"]], counted=row["text"][-600:])
    again = [row["test"] for row in rows if judge(row)[0] == "not judged"]
    torchs = {each.get("test"): each for each in outcomes(root / name, "torch", limit, only=again)}
    for row in rows:
        torch = torchs.get(row["test"]) or torchs.get("")
        row["torch"] = torch and {"outcome": torch["outcome"], "text": torch["text"][-1500:]}
    return rows


def table(rows: Sequence[dict[str, Any]], by: str) -> Table:
    """Return the counts of classes by area or by file."""
    counts: dict[str, Counter[str]] = {}
    for row in rows:
        counts.setdefault(row[by], Counter())[row["class"]] += 1
    shown = Table("tests", *CLASSES, "all")
    for name, count in [*counts.items(), ("all", Counter(row["class"] for row in rows))]:
        shown.add_row(name, *(str(count[each] or "") for each in CLASSES), str(sum(count.values())))
    return shown


def main() -> int:
    """Run the files, print the tables, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--source", type=Path, help="a tree of torch's sources, with test/distributed")
    out = Path(tempfile.gettempdir()) / "torch_tests.json"
    parser.add_argument("--out", type=Path, default=out, help=f"an outcome a test; default {out}")
    parser.add_argument("--area", choices=list(FILES), action="append")
    parser.add_argument("--only", default="", help="only files whose path contains this")
    parser.add_argument("--limit", type=float, default=60.0, help="seconds a test")
    parser.add_argument("--minutes", type=float, default=60.0, help="no file is begun after this many")
    parser.add_argument("--add", action="store_true", help="keep the outcomes of other files in --out")
    parser.add_argument("--judge", action="store_true", help="judge the outcomes in --out again, and run nothing")
    arguments = parser.parse_args()
    if not arguments.judge and arguments.source is None:
        parser.error("--source PATH is needed: a tree of torch's sources")
    if arguments.judge:
        rows = json.loads(arguments.out.read_text())
    else:
        rows, root = [], arguments.source / "test" / "distributed"
        work = [(area, name) for area in arguments.area or FILES for name in files_of(arguments.source, area)]
        work = [(area, name) for area, name in work if arguments.only in name]
        if arguments.add and arguments.out.exists():
            files = {name for _, name in work}
            rows = [row for row in json.loads(arguments.out.read_text()) if row["file"] not in files]
        start = time.monotonic()
        for number, (area, name) in enumerate(work, 1):
            begun = time.monotonic()
            if begun - start > 60 * arguments.minutes:
                print(f"not run: {', '.join(name for _, name in work[number - 1 :])}")
                break
            rows += run_file(root, area, name, arguments.limit)
            here = Counter(judge(row)[0] for row in rows if row["file"] == name)
            told = ", ".join(f"{here[each]} {each}" for each in CLASSES if here[each])
            print(f"{number}/{len(work)} {name}: {told}; {time.monotonic() - begun:.0f} s", flush=True)
            arguments.out.write_text(json.dumps(rows))
    for row in rows:
        row["class"], row["why"] = judge(row)
    arguments.out.write_text(json.dumps(rows, indent=1))
    console = Console(width=None if sys.stdout.isatty() else 200)
    console.print(table(rows, "file"))
    console.print(table(rows, "area"))
    wrong = [row for row in rows if row["class"] in ("bug", "not judged")]
    for row in wrong:
        last = re.findall(r"\n(\w[\w.]*(?:Error|Exception|Warning)?: .*)", row["text"]) or [row["text"][-200:]]
        print(f"{row['class']}: {row['file']} {row['test']}: {row['outcome']}: {last[0][:300]}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
