"""Runs random programs on random layouts against one device in float64: values, gradients, gradients of gradients.

nox -s fuzz                                 5,200 programs on meshes of 2, 3, 4 and 2 x 2 ranks; writes docs/fuzz.md
nox -s fuzz -- --programs 200 --first 9000  fewer, others; printed and not written
"""

from __future__ import annotations

import argparse
import functools
import math
import re
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import program_runs  # noqa: E402
from program_grammar import Program  # noqa: E402
from program_runs import Counts, Verdict  # noqa: E402

from hp_testing import close_pools, run_ranks  # noqa: E402
from hp_testing.pools.pool import RankError  # noqa: E402

MESHES = ((2,), (3,), (4,), (2, 2))
CHUNK = 25
SECONDS = 3.0
"""A program's share of a chunk's time limit."""


def judge(programs: list[Program], mesh_shape: tuple[int, ...], counts: Counts) -> None:
    """Run programs on ranks; one at which a rank dies, hangs or raises alone is counted, and the others run again."""
    if not programs:
        return
    with tempfile.TemporaryDirectory() as folder:
        progress = Path(folder) / "done"
        try:
            by_rank = run_ranks(
                math.prod(mesh_shape),
                program_runs.judge_all,
                programs,
                mesh_shape,
                str(progress),
                timeout=30 + SECONDS * len(programs),
            )
        except RankError as error:
            done = int(progress.read_text()) if progress.exists() else 0
            counts.programs += 1
            notes = [f"rank {file.suffix[1:]}: {file.read_text()}" for file in sorted(Path(folder).glob("done.*"))]
            refused = "\n".join(["refused before:", *notes, ""]) if notes else ""
            counts.hung.append(f"program {programs[done].seed}: {refused}{error}")
            for others in (programs[:done], programs[done + 1 :]):
                judge(others, mesh_shape, counts)
            return
    for verdicts in zip(*by_rank, strict=True):
        counts.add(functools.reduce(_worse, verdicts))


def _worse(a: Verdict, b: Verdict) -> Verdict:
    if len(a.refused) != len(b.refused):
        return Verdict(a.program, wrong=f"program {a.program} raises on one rank alone: {a.refused} and {b.refused}")
    return max(a, b, key=lambda verdict: (verdict.wrong is not None, verdict.unsteady))


def shortened(text: str, mesh_shape: tuple[int, ...], options: tuple[Any, ...]) -> str:
    """A wrong program's text, with what `shorten` leaves of it."""
    seed = re.search(r"^# seed (\d+)$", text, re.MULTILINE)
    if seed is None:
        return text
    program = program_runs.drawn(int(seed[1]), len(mesh_shape), *options)
    try:
        return (
            text.splitlines()[0]
            + "\n"
            + run_ranks(math.prod(mesh_shape), program_runs.shorten, program, mesh_shape, timeout=90.0)[0]
        )
    except RankError:
        return text


def kind_of(refusal: str) -> str:
    """A refusal with its numbers, layouts and line left out, to count it under."""
    text = re.sub(r"\[[^\[\]]*\]$", "", refusal)
    text = re.sub(r"\((Shard|Replicate|Partial)\(.*", "...", text)
    return re.sub(r"\(?-?\d[\d, ]*\)?", "#", text)[:110].strip()


def page(rows: list[tuple[tuple[int, ...], Counts]], seconds: float) -> str:
    """The counts as Markdown."""
    lines = [
        "# Random programs",
        "",
        f"Written by `nox -s fuzz` with torch {torch.__version__}; don't edit it.",
        "",
        "Programs of 14 random lines (operations, redistributions, writes in place and through views, hooks,",
        "checkpoints, nested gradients) run on DTensors with random layouts and on one device, in float64. Every value",
        f"and every gradient is compared, to {program_runs.TOLERANCE} of the largest element. If a line is refused by",
        "an error, it is left out with everything that depends on it, and the rest is compared. *Crashed* counts",
        "errors that a user cannot act on. *Unsteady* counts programs whose results differ, but also differ on one",
        "device when their inputs change by 1e-13, because a value lies at a discontinuity.",
        "",
        "| mesh | programs | right | wrong | hang or die | crashed | unsteady | values and gradients compared | lines"
        " refused |",
        ("| " + "--- | " * 9).rstrip(),
    ]
    for mesh_shape, counts in rows:
        lines.append(
            f"| {' x '.join(map(str, mesh_shape))} | {counts.programs:,} | {counts.right:,} | {len(counts.wrong)} |"
            f" {len(counts.hung)} | {len(counts.crashed)} | {counts.unsteady} | {counts.compared:,} |"
            f" {counts.refused.total():,} |"
        )
    total: dict[str, int] = {}
    for _, counts in rows:
        for text, number in counts.refused.items():
            total[kind_of(text)] = total.get(kind_of(text), 0) + number
    lines += ["", f"The run took {seconds:.0f} s. Refusals, most frequent first:", ""]
    lines += [f"- {number}: `{text}`" for text, number in sorted(total.items(), key=lambda item: -item[1])[:25]]
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--programs", type=int, default=0, help="programs on each mesh (default 1,300, and the page is written)"
    )
    parser.add_argument("--first", type=int, default=0, help="number of the first program")
    parser.add_argument("--steps", type=int, default=14, help="lines of a program")
    parser.add_argument("--mesh", action="append", help="2, 3, 4 or 2x2 (default all)")
    parser.add_argument("--calm", action="store_true", help="nothing is written in place")
    parser.add_argument("--whole", action="store_true", help="show wrong programs as drawn, not shortened")
    options = parser.parse_args()
    begun = time.monotonic()
    chosen = [tuple(map(int, mesh.split("x"))) for mesh in options.mesh] if options.mesh else MESHES
    number, rows = options.programs or 1300, []
    for mesh_shape in chosen:
        counts = Counts()
        for start in range(options.first, options.first + number, CHUNK):
            seeds = list(range(start, min(start + CHUNK, options.first + number)))
            programs = [program_runs.drawn(seed, len(mesh_shape), options.steps, options.calm) for seed in seeds]
            judge(programs, mesh_shape, counts)
        close_pools()
        for text in counts.wrong:
            if not options.whole:
                text = shortened(text, mesh_shape, (options.steps, options.calm))
            print(f"WRONG on {mesh_shape}: {text}\n", flush=True)
        for text in [*counts.hung, *counts.crashed]:
            print(f"CRASHED on {mesh_shape}: {text}\n", flush=True)
        close_pools()
        rows.append((mesh_shape, counts))
    text = page(rows, time.monotonic() - begun)
    print(text)
    bad = sum(len(counts.wrong) + len(counts.hung) + len(counts.crashed) for _, counts in rows)
    if options == parser.parse_args([]) and not bad:
        (ROOT / "docs" / "fuzz.md").write_text(text)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
