"""Runs torch's operator database on DTensors, ours and torch's own, and writes docs/operators.md.

nox -s sweep                            every sample of every operator
nox -s sweep -- --samples 4 --only add  a part, printed and not written
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import op_database  # noqa: E402
from op_database import Verdict  # noqa: E402

from hp_testing import close_pools  # noqa: E402

CHUNK = 20
INTRODUCTION = """\
# Operators

Written by `nox -s sweep` with torch {version} on {device}; don't edit it.

Every operator of torch's operator database (`op_db`) is called on DTensors with float32 (or, if it has no float32, with
an integer, bool or complex dtype), on two gloo ranks (four on the 2 x 2 mesh). Each argument is replicated and sharded
on each dim, with up to {limit} combinations per sample. Results, arguments written in place and gradients are compared
with those of one device; random operators use the same seed. *Right*: all are equal in every combination. *Raises*:
some combination is refused, and none is wrong. Left out are the operators of `linalg`, `fft` and `special`, sparse
ones, those without a tensor argument, and

{undefined}
"""


@dataclass(frozen=True)
class Sweep:
    """One run over the operators.

    Attributes:
        title: its row in the table.
        mesh_shape: the mesh; its ranks are the pool's.
        samples: of each operator; 0: all.
        gradients: whether they are compared.
        peer: torch's own DTensor.
    """

    title: str
    mesh_shape: tuple[int, ...]
    samples: int
    gradients: bool
    peer: bool = False

    def run(self, names: list[str], limit: int) -> list[Verdict]:
        """Runs it, a chunk of operators at a time."""
        ranks = torch.Size(self.mesh_shape).numel()
        found: list[Verdict] = []
        start = time.monotonic()
        for at in range(0, len(names), CHUNK):
            options = (self.mesh_shape, self.samples, limit, self.gradients, self.peer)
            found += op_database.judge_in_pool(names[at : at + CHUNK], ranks, *options, timeout=1800.0)
            print(f"{self.title}: {len(found)} of {len(names)}, {time.monotonic() - start:.0f} s", flush=True)
        return found


def sweeps(samples: int) -> list[Sweep]:
    """What the page shows; ``samples`` for the rows that take more than the first."""
    many = "all samples" if not samples else f"{samples} samples"
    return [
        Sweep("first sample, results", (2,), 1, False),
        Sweep("the same, torch's DTensor", (2,), 1, False, peer=True),
        Sweep(f"{many}, results and gradients", (2,), samples, True),
        Sweep(f"{many}, results and gradients, 2 x 2 mesh", (2, 2), samples, True),
    ]


def outcome(verdict: Verdict) -> str:
    """The verdict's outcome, with those that take the process along told apart."""
    return "aborts or hangs" if any("aborts or hangs" in text for text in verdict.wrong) else verdict.outcome


def page(results: list[tuple[Sweep, list[Verdict]]], limit: int, device: str) -> str:
    """The page's text."""
    undefined = "".join(f"- `{name}`: {why}\n" for name, why in op_database.UNDEFINED.items())
    text = INTRODUCTION.format(version=torch.__version__, limit=limit, undefined=undefined, device=device)
    text += "\n| sweep | operators | right | raises | wrong | aborts or hangs | combinations that are right |\n"
    text += "| --- " * 7 + "|\n"
    for sweep, verdicts in results:
        counts = Counter(map(outcome, verdicts))
        cells = [counts[kind] for kind in ("right", "raises", "wrong", "aborts or hangs")]
        row = [sweep.title, len(verdicts), *cells, sum(v.right for v in verdicts)]
        text += f"| {' | '.join(map(str, row))} |\n"
    for sweep, verdicts in results:
        rest = [v for v in verdicts if v.outcome != "right"]
        if not rest:
            continue
        text += f"\n## Not right: {sweep.title}\n\n| operator | right | not right | |\n| --- | --- | --- | --- |\n"
        for v in rest:
            first = next(iter(v.wrong or v.raised)).replace("|", "\\|").replace("\n", " ")
            text += (
                f"| `{v.name}` | {v.right} | {len(v.wrong) + sum(v.raised.values())} {outcome(v)} | {first[:160]} |\n"
            )
    return text


def main() -> None:
    """Sweeps, prints, and writes the page where nothing was left out."""
    parser = argparse.ArgumentParser(description="Sweep torch's operator database on DTensors.")
    parser.add_argument("--samples", type=int, default=0, help="of each operator in the larger sweeps; 0: all")
    parser.add_argument("--limit", type=int, default=8, help="combinations of placements for each sample")
    parser.add_argument("--only", default="", help="operators whose name has this text")
    parser.add_argument("--device", default="two CPU cores", help="the machine's name on the page")
    parser.add_argument("--output", type=Path, default=ROOT / "docs/operators.md")
    options = parser.parse_args()
    names = [name for name in op_database.operators() if options.only in name]
    results = [(sweep, sweep.run(names, options.limit)) for sweep in sweeps(options.samples)]
    close_pools()
    text = page(results, options.limit, options.device)
    if options.only:
        print(text)
    else:
        options.output.write_text(text, "utf-8")
        print(f"{options.output}: written")


if __name__ == "__main__":
    main()
