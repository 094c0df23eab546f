"""Draw the pictures of the site's pages, docs/pictures/, from what the pages' own commands and programs do.

    python docs/pictures.py                all of them, some five minutes
    python docs/pictures.py memory lint    some

Screens are what a command writes to a terminal; its plan and data are the blocks of its page. It needs an environment
with all packages, as `nox -s docs -- --run` has it.
"""

from __future__ import annotations

import json
import os
import pty
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import snippets

DOCS = Path(__file__).resolve().parent
OUT = DOCS / "pictures"
WIDTH = 100
RANKS = ("#4c78a8", "#f58518", "#54a24b", "#b279a2")
"""Colours of ranks."""
# rich's own format without the frame of a window, and without fonts from another host.
SCREEN = """<svg viewBox="0 0 {terminal_width} {terminal_height}" xmlns="http://www.w3.org/2000/svg">
<style>
.{unique_id}-matrix {{ font-family: "Fira Code", "DejaVu Sans Mono", Menlo, Consolas, monospace;
  font-size: {char_height}px; line-height: {line_height}px; }}
{styles}
</style>
<defs><clipPath id="{unique_id}-clip-terminal">
<rect x="0" y="0" width="{terminal_width}" height="{terminal_height}" /></clipPath>
{lines}
</defs>
<rect fill="#292929" width="{terminal_width}" height="{terminal_height}" rx="8" />
<g transform="translate(9, 5)" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}
<g class="{unique_id}-matrix">
{matrix}
</g></g></svg>
"""
_MOVE = re.compile(r"\x1b\[(\d*)([A-Za-z])|\x1b\[\?\d+[hl]|\r?\n|\r")


def save_files(page: str, folder: Path) -> None:
    """Save the files of a page as its reader does."""
    for block in snippets.blocks(DOCS / page):
        if block.kind == snippets.FILE:
            (folder / block.title).write_text(block.text, "utf-8")


def environment(**more: str) -> dict[str, str]:
    """Return the environment in which the pages' commands run."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    return {**os.environ, **snippets.ENVIRONMENT, "PATH": path, **more}


def run(command: str, folder: Path) -> None:
    """Run a command of a page."""
    subprocess.run(["bash", "-e", "-c", command], cwd=folder, env=environment(), check=True, capture_output=True)


def terminal(command: str, folder: Path) -> str:
    """Run a command in a terminal; return the lines that are left on it, with their colours."""
    here, there = pty.openpty()
    own = environment(TERM="xterm-256color", COLORTERM="truecolor", COLUMNS=str(WIDTH), LINES="60")
    own.pop("NO_COLOR")
    process = subprocess.Popen(["bash", "-c", command], cwd=folder, env=own, stdin=there, stdout=there, stderr=there)
    os.close(there)
    written = b""
    while True:
        try:
            written += (part := os.read(here, 65536))
        except OSError:  # Linux says so where the other end is closed.
            break
        if not part:
            break
    process.wait()
    os.close(here)
    return on_screen(written.decode(errors="replace"))


def on_screen(written: str) -> str:
    """Follow a program's moves of the cursor and erased lines; colours stay where they are."""
    lines, row, end = [""], 0, 0
    for match in _MOVE.finditer(written):
        lines[row] += written[end : match.start()]
        end = match.end()
        count, kind = match[1], match[2]
        if match[0].endswith("\n"):
            row += 1
            lines += [""] * (row + 1 - len(lines))
        elif kind == "A":
            row = max(0, row - int(count or 1))
        elif kind == "K":
            lines[row] = ""
        elif kind == "m":
            lines[row] += match[0]
    lines[row] += written[end:]
    return "\n".join(lines) + "\n"


def screen(name: str, page: str, command: str, before: str = "") -> None:
    """Export a command's screen."""
    from rich.console import Console
    from rich.text import Text

    with tempfile.TemporaryDirectory() as folder:
        save_files(page, Path(folder))
        if before:
            run(before, Path(folder))
        shown = terminal(command, Path(folder)).strip("\n")
    console = Console(record=True, width=WIDTH + 2, file=open(os.devnull, "w"), force_terminal=True)
    console.print(Text.from_ansi(f"\x1b[1m$ {command}\x1b[0m\n{shown}\n"))
    console.save_svg(str(OUT / f"{name}.svg"), code_format=SCREEN, unique_id=name)


def train() -> None:
    """Show a run of the first plan."""
    screen("train", "learn/first-run.md", "hyper-parallel train plan.toml --out run")


def init() -> None:
    """Show the plan that init writes."""
    screen("init", "learn/first-run.md", "hyper-parallel init --model Qwen3Config --ranks 8 --memory 64GiB")


def lint() -> None:
    """Show what lint says of a wrong plan."""
    screen("lint", "learn/first-run.md", "hyper-parallel lint wrong.toml")


def verify() -> None:
    """Show verify's table of the own model."""
    screen("verify", "learn/own-model.md", "hyper-parallel verify plan.toml")


def data_show() -> None:
    """Show conversations, and what of them is trained."""
    command = "hyper-parallel data show plan.toml --count 3"
    screen("data-show", "learn/fine-tuning.ipynb", command, before="python make_model.py")


def doctor() -> None:
    """Show doctor's table of the machine that draws."""
    screen("doctor", "how-to/launch.md", "hyper-parallel doctor")


def report() -> None:
    """Show the page of a run in a browser, at the width of a desk."""
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        raise FileNotFoundError("the picture of a page takes Chromium, which is not on the PATH")
    with tempfile.TemporaryDirectory() as folder:
        save_files("how-to/watch.md", Path(folder))
        text = "python -c 'print(\"def add(one, other):\\n    return one + other\\n\" * 60)' > valid.txt"
        run(f"{text}; hyper-parallel train plan.toml --out run; hyper-parallel report run", Path(folder))
        options = ("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--window-size=1000,1150")
        shot = f"--screenshot={OUT / 'report.png'}"
        page = (Path(folder) / "run" / "report.html").as_uri()
        subprocess.run([browser, *options, f"--user-data-dir={folder}/browser", shot, page], check=True)


def fully_sharded() -> None:
    """Draw the time line of a step that ran."""
    with tempfile.TemporaryDirectory() as folder:
        save_files("learn/fully-sharded.md", Path(folder))
        run("torchrun --standalone --nproc-per-node 2 train.py", Path(folder))
        (OUT / "fully-sharded.svg").write_bytes((Path(folder) / "step.svg").read_bytes())


def dry_run() -> None:
    """Show what a dry run prints, and draw memory over its step."""
    command = "hyper-parallel dryrun plan.toml --ranks 1024"
    screen("dryrun", "how-to/fit.md", f"{command} --picture memory.png")
    with tempfile.TemporaryDirectory() as folder:
        save_files("how-to/fit.md", Path(folder))
        run(f"{command} --picture memory.png", Path(folder))
        (OUT / "dryrun-memory.png").write_bytes((Path(folder) / "memory.png").read_bytes())


def pipeline() -> None:
    """Draw the time lines of two schedules."""
    with tempfile.TemporaryDirectory() as folder:
        save_files("learn/pipeline.md", Path(folder))
        for schedule in ("1f1b", "zbv"):
            run(f"hyper-parallel schedule plan.toml --set pipeline.schedule={schedule} --svg line.svg", Path(folder))
            line = (Path(folder) / "line.svg").read_text("utf-8")
            line = re.sub(r'width="(\d+)" height="(\d+)"', r'viewBox="0 0 \1 \2"', line, count=1)
            line = line.replace('font-size="11"', 'font-size="15"')  # the page shows it at half its size
            (OUT / f"pipeline-{schedule}.svg").write_text(line, "utf-8")


def memory() -> None:
    """Draw what is kept and computed again for each budget."""
    with tempfile.TemporaryDirectory() as folder:
        program = next(each.text for each in snippets.blocks(DOCS / "learn/memory.ipynb") if each.kind == "python")
        done = subprocess.run(
            [sys.executable, "-c", program], cwd=folder, env=environment(), check=True, capture_output=True, text=True
        )
    rows = [[float(each) for each in re.findall(r"[\d.]+", line)] for line in done.stdout.splitlines()]
    figure, axes = _figure(6, 2.4)
    for place, (_, total, peak, again) in enumerate(rows):
        axes.barh(place, total - again, color=RANKS[0], label="" if place else "kept")
        axes.barh(place, again, left=total - again, color="#d0d0d0", label="" if place else "computed again")
        ends = [place - 0.4, place + 0.4]
        axes.plot([peak, peak], ends, color="black", label="" if place else "peak that is predicted")
    axes.set_yticks(range(len(rows)), [f"{row[0]:.0f} %" for row in rows])
    axes.invert_yaxis()
    axes.set_xlabel("MiB of saved activations")
    axes.set_ylabel("budget")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, 1.22), ncols=3, frameon=False)
    _save(figure, "memory")


def checkpoints() -> None:
    """Draw the losses of a run that stopped and one that did not."""
    with tempfile.TemporaryDirectory() as folder:
        save_files("learn/checkpoints.md", Path(folder))
        run(
            next(each.text for each in snippets.blocks(DOCS / "learn/checkpoints.md") if each.kind == "sh"),
            Path(folder),
        )
        metrics = {name: (Path(folder) / name / "metrics.jsonl").read_text("utf-8") for name in ("run", "whole")}
    losses = {name: [json.loads(line)["loss"] for line in text.splitlines()] for name, text in metrics.items()}
    figure, axes = _figure(6, 2.6)
    steps = range(1, len(losses["whole"]) + 1)
    axes.plot(steps, losses["whole"], color="#d0d0d0", linewidth=6, label="without a stop")
    axes.plot(steps[:20], losses["run"][:20], color=RANKS[0], label="dp_shard 2")
    axes.plot(steps[19:], losses["run"][19:], color=RANKS[1], label="goes on with tp 2")
    axes.set_xlabel("step")
    axes.set_ylabel("loss")
    axes.legend(frameon=False)
    _save(figure, "checkpoints")


def context_parallel() -> None:
    """Draw which rank computes which block of a causal mask, from the layout of `context_parallel_shard`."""
    layouts = {"load_balance=False": [0, 0, 0, 0, 1, 1, 1, 1], "load_balance=True": [0, 0, 1, 1, 1, 1, 0, 0]}
    figure, both = _figure(6, 3.1, columns=2)
    for axes, (title, ranks) in zip(both, layouts.items()):
        for query, rank in enumerate(ranks):
            for key in range(query + 1):
                axes.add_patch(_box(key, query, 1, 1, RANKS[rank]))
        work = [sum(query + 1 for query, each in enumerate(ranks) if each == rank) for rank in (0, 1)]
        axes.set_title(f"{title}: {work[0]} and {work[1]} blocks", fontsize=9)
        axes.set_xlim(0, 8)
        axes.set_ylim(8, 0)
        axes.set_aspect("equal")
        axes.set_xlabel("keys")
        axes.set_ylabel("queries")
        axes.set_xticks([])
        axes.set_yticks([])
    _legend(both[0], 2)
    _save(figure, "context-parallel")


def tensor_parallel() -> None:
    """Draw how two matrices are cut."""
    figure, axes = _figure(7, 2.6)
    axes.set_xlim(0, 15)
    axes.set_ylim(6.2, -0.6)
    axes.axis("off")
    parts = [("x", 0, 1.2, None), ("first weight", 2.6, 2.4, "row"), ("GELU(...)", 6.4, 2.0, "row")]
    parts += [("second weight", 9.6, 2.4, "column"), ("sum", 13.4, 1.2, None)]
    for label, left, width, cut in parts:
        if cut is None:
            axes.add_patch(_box(left, 1.2, width, 2.6, "#d0d0d0"))
        for rank in (0, 1) if cut else ():
            if cut == "row":
                axes.add_patch(_box(left, 2.5 * rank, width, 2.5, RANKS[rank]))
            else:
                axes.add_patch(_box(left + width / 2 * rank, 0, width / 2, 5, RANKS[rank]))
        axes.text(left + width / 2, 5.6, label, ha="center", fontsize=9)
    for left in (1.3, 5.1, 8.5, 12.1):
        axes.annotate("", (left + 1.0, 2.5), (left, 2.5), arrowprops={"arrowstyle": "->"})
    _legend(axes, 2)
    _save(figure, "tensor-parallel")


def mesh() -> None:
    """Draw a mesh of four ranks."""
    figure, axes = _figure(6, 2.6)
    axes.set_xlim(-2.6, 8)
    axes.set_ylim(4.4, -0.8)
    axes.axis("off")
    for row in (0, 1):
        axes.text(-0.2, 2 * row + 1, f"dp_shard {row}", ha="right", va="center", fontsize=9)
        for column in (0, 1):
            axes.add_patch(_box(4 * column, 2 * row, 3.8, 1.8, RANKS[2 * row + column]))
            text = f"rank {2 * row + column}\nsamples {row}\nhalf {column} of each matrix,\nits shard {row}"
            axes.text(4 * column + 1.9, 2 * row + 0.9, text, ha="center", va="center", fontsize=8, color="white")
    for column in (0, 1):
        axes.text(4 * column + 1.9, -0.3, f"tp {column}", ha="center", fontsize=9)
    _save(figure, "mesh")


def experts() -> None:
    """Draw two tokens of each rank and the experts that they go to."""
    chosen = {0: (1, 6), 1: (0, 3), 2: (2, 5), 3: (4, 7)}
    figure, axes = _figure(7, 3)
    axes.set_xlim(-1, 16)
    axes.set_ylim(4.4, -0.8)
    axes.axis("off")
    for token, goals in chosen.items():
        left = 2 + 4 * token
        axes.add_patch(_box(left - 0.7, 0, 1.4, 0.7, RANKS[token // 2]))
        axes.text(left, 0.35, f"token {token}", ha="center", va="center", fontsize=8, color="white")
        for goal in goals:
            arrow = {"arrowstyle": "->", "color": RANKS[token // 2]}
            axes.annotate("", (2 * goal + 0.85, 2.9), (left, 0.75), arrowprops=arrow)
    for expert in range(8):
        axes.add_patch(_box(2 * expert, 3, 1.7, 0.7, RANKS[expert // 4]))
        axes.text(2 * expert + 0.85, 3.35, f"expert {expert}", ha="center", va="center", fontsize=8, color="white")
    _legend(axes, 2)
    _save(figure, "experts")


def _figure(width: float, height: float, *, columns: int = 1) -> Any:
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams.update({"svg.hashsalt": "pictures", "font.size": 9, "svg.fonttype": "none"})
    from matplotlib import pyplot

    return pyplot.subplots(1, columns, figsize=(width, height), layout="constrained")


def _box(left: float, top: float, width: float, height: float, colour: str) -> Any:
    from matplotlib.patches import Rectangle

    return Rectangle((left, top), width, height, facecolor=colour, edgecolor="white", linewidth=1)


def _legend(axes: Any, ranks: int) -> None:
    handles = [_box(0, 0, 1, 1, RANKS[rank]) for rank in range(ranks)]
    labels = [f"rank {rank}" for rank in range(ranks)]
    axes.figure.legend(handles, labels, loc="outside upper right", ncols=ranks, frameon=False)


def _save(figure: Any, name: str) -> None:
    figure.savefig(OUT / f"{name}.svg", metadata={"Date": None}, facecolor="white")


PICTURES: dict[str, Callable[[], None]] = {
    "train": train,
    "init": init,
    "lint": lint,
    "verify": verify,
    "data-show": data_show,
    "doctor": doctor,
    "report": report,
    "fully-sharded": fully_sharded,
    "dryrun": dry_run,
    "pipeline": pipeline,
    "memory": memory,
    "checkpoints": checkpoints,
    "context-parallel": context_parallel,
    "tensor-parallel": tensor_parallel,
    "mesh": mesh,
    "experts": experts,
}


def main() -> None:
    """Draw the pictures that are named, or all."""
    OUT.mkdir(exist_ok=True)
    for name in sys.argv[1:] or PICTURES:
        print(name, flush=True)
        PICTURES[name]()


if __name__ == "__main__":
    main()
