"""A run as one page of HTML, which holds all that it shows: `hyper-parallel report RUN`."""

from __future__ import annotations

import importlib
import io
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from hp_checkpoint.extend import steps_in, summary
from hp_plan import ParallelPlan
from hp_plan.extend import settings
from hyper_parallel.reports.display import scaled
from hyper_parallel.reports.output import (
    CHECKPOINTS,
    METRICS,
    RECORD,
    TEXTS,
    WARNINGS,
    OutputError,
    make_figure,
    steps_at_end,
)

_POINTS = 2000  # of a curve; more become means of neighbours
_RANKS = 64  # of which each has a cell
_STYLE = """
:root { --ink: #1b2230; --soft: #5b6575; --line: #d9dee6; --back: #f6f7f9; --card: #ffffff; --mark: #2f6f9f; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e9ef; --soft: #9aa4b2; --line: #333b48; --back: #12161d; --card: #1a2029; --mark: #7db7e0; }
  figure svg { filter: invert(0.88) hue-rotate(180deg); }
}
* { box-sizing: border-box; }
body { margin: 0; padding: 1.5rem; background: var(--back); color: var(--ink); font: 15px/1.45 system-ui, sans-serif; }
main { max-width: 1080px; margin: auto; }
h1 { font-size: 1.5rem; margin: 0; }
h2 { font-size: 1.1rem; margin: 2rem 0 .6rem; }
p.state { color: var(--soft); margin: .3rem 0 1.2rem; }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 440px), 1fr)); gap: 1rem; }
figure, .numbers div, .wide { background: var(--card); border: 1px solid var(--line); border-radius: 8px; }
figure { margin: 0; padding: .8rem; }
figure svg { width: 100%; height: auto; display: block; }
.numbers { display: grid; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); gap: .8rem; margin: 0 0 1rem; }
.numbers div { padding: .6rem .8rem; }
.numbers b { display: block; font-size: 1.15rem; font-variant-numeric: tabular-nums; }
.numbers span { color: var(--soft); font-size: .85rem; }
.wide { overflow-x: auto; padding: .4rem .8rem; }
table { border-collapse: collapse; width: 100%; font-size: .9rem; }
th { text-align: left; color: var(--soft); font-weight: 500; }
th, td { padding: .3rem .8rem .3rem 0; border-bottom: 1px solid var(--line); vertical-align: top; }
tr:last-child td { border-bottom: 0; }
td.number { font-variant-numeric: tabular-nums; white-space: nowrap; }
.ranks { margin-bottom: .6rem; }
.ranks { display: grid; grid-template-columns: repeat(auto-fill, minmax(108px, 1fr)); gap: .4rem; }
.ranks div { border: 1px solid var(--line); border-radius: 6px; padding: .3rem .5rem; font-size: .8rem; }
.ranks b { color: var(--mark); }
pre { margin: .4rem 0; overflow-x: auto; font-size: .82rem; white-space: pre-wrap; overflow-wrap: anywhere; }
"""


def report_page(folder: Path) -> str:
    """Return the page of a run: its curves, numbers, mesh, checkpoints, starts, warnings, texts and plan.

    Args:
        folder: of the run.

    Raises:
        OutputError: there is no run in it.
        ImportError: matplotlib isn't installed.
    """
    record, steps = _record(folder), list(_lines(folder / METRICS))
    start = record["starts"][-1]
    plan = ParallelPlan.from_dict(start["plan"])
    name = str(plan.model.path or plan.model.config or plan.model.function)
    mesh = plan.mesh.described
    done = steps[-1]["step"] if steps else 0
    state = "finished" if done >= plan.run.steps else f"{done:,} of {plan.run.steps:,} steps"
    parts = [
        f"<h1>{escape(Path(name).name)} on {escape(mesh)}</h1>",
        f'<p class="state">{escape(folder.name)}: {state}, begun {escape(record["starts"][0]["time"])}</p>',
        _numbers(plan, steps),
        f'<div class="figures">{"".join(_figures(steps))}</div>' if steps else "<p>No step is done.</p>",
        _section("Mesh", _mesh(plan, start["hosts"])),
        _section("Checkpoints", _checkpoints(folder)),
        _section("Starts", _starts(record["starts"])),
        _section("Data", _data(start["data"])),
        *_warnings(folder),
        *_texts(folder),
        *_shortages(folder),
        _section("Plan", _plan(plan, start["plan"])),
        _section("Versions", _table(("package", "version"), start["versions"].items())),
    ]
    head = (
        '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(folder.name)}</title><style>{_STYLE}</style>"
    )
    body = "\n".join(parts)
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body><main>\n{body}\n</main></body></html>\n'


def _record(folder: Path) -> dict[str, Any]:
    try:
        record = json.loads((folder / RECORD).read_text(encoding="utf-8"))
        _ = record["starts"][-1]["plan"]
        return record
    except FileNotFoundError:
        fix = "name the folder that hyper-parallel train has written (--out)"
        raise OutputError(f"{folder} has no run: there is no {RECORD}; {fix}") from None
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise OutputError(f"{folder / RECORD} can't be read: {error!r}") from error


def _lines(path: Path) -> Iterable[dict[str, Any]]:
    """Read lines of JSON; the last one of a run that is going on may be half written."""
    if path.exists():
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                yield json.loads(line)
            except ValueError:
                return


def _section(title: str, content: str) -> str:
    return f"<section><h2>{title}</h2>\n{content}</section>"


def _table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    cells = "".join(f"<th>{escape(each)}</th>" for each in head)
    lines = [f"<tr>{''.join(map(_cell, row))}</tr>" for row in rows]
    return f'<div class="wide"><table><tr>{cells}</tr>{"".join(lines)}</table></div>'


def _cell(value: Any) -> str:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    text = f"{value:,}" if isinstance(value, int) else f"{value:.4g}" if number else str(value)
    return f'<td class="number">{text}</td>' if number else f"<td>{escape(text)}</td>"


def _numbers(plan: ParallelPlan, steps: Sequence[Mapping[str, Any]]) -> str:
    if not steps:
        return ""
    seconds = math.fsum(step["seconds"] for step in steps)
    tokens = sum(round((step["tokens_per_second"] or 0) * step["seconds"]) for step in steps)
    last = [step["loss"] for step in steps[-steps_at_end(len(steps)) :] if step["loss"] is not None]
    validated = [step for step in steps if step.get("validation_loss") is not None]
    shown = {
        "steps": f"{len(steps):,}",
        "loss at the end": f"{math.fsum(last) / len(last):.4f}" if last else "no number",
        "tokens": f"{tokens:,}",
        "tokens a second": f"{tokens / seconds:,.0f}" if seconds else "",
        "time in steps": _duration(seconds),
        "peak memory": scaled(max(int(step["peak_memory"] or 0) for step in steps)),
    }
    if validated:
        shown["validation loss"] = f"{validated[-1]['validation_loss']:.4f}"
    boxes = (f"<div><b>{escape(value)}</b><span>{escape(name)}</span></div>" for name, value in shown.items())
    return f'<div class="numbers">{"".join(boxes)}</div>'


def _duration(seconds: float) -> str:
    """Format a time for people.

    >>> _duration(1.4), _duration(75.0), _duration(7_260.0)
    ('1.4 s', '1 min 15 s', '2 h 1 min')
    """
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes = int(seconds // 60)
    return f"{minutes} min {seconds % 60:.0f} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


_CURVES = {
    "loss": ("loss", "validation_loss"),
    "accuracy of pairs": ("accuracy", "validation_accuracy"),
    "norm of the gradients": ("grad_norm",),
    "tokens a second": ("tokens_per_second",),
    "learning rate": ("lr",),
    "peak memory, MiB": ("peak_memory",),
    "model FLOPs utilization": ("mfu",),
}


def _figures(steps: Sequence[Mapping[str, Any]]) -> Iterable[str]:
    """Draw the curves of the metrics that there are."""
    for title, names in _CURVES.items():
        curves = {name: _curve(steps, name) for name in names}
        curves = {name: curve for name, curve in curves.items() if curve[0]}
        if curves:
            yield f'<figure aria-label="{escape(title)}">{_drawn(title, curves)}</figure>'


def _curve(steps: Sequence[Mapping[str, Any]], name: str) -> tuple[list[float], list[float]]:
    """Return steps and values; of long runs means of neighbours."""
    scale = 1 / 2**20 if name == "peak_memory" else 1.0
    points = [(step["step"], step[name] * scale) for step in steps if step.get(name) is not None]
    each = -(-len(points) // _POINTS) if points else 1
    groups = [points[first : first + each] for first in range(0, len(points), each)]
    means = [tuple(math.fsum(column) / len(group) for column in zip(*group, strict=True)) for group in groups]
    return [x for x, _ in means], [y for _, y in means]


def _drawn(title: str, curves: Mapping[str, tuple[list[float], list[float]]]) -> str:
    figure, stream = make_figure(5.6, 2.6), io.StringIO()
    axes = figure.add_subplot()
    for number, (name, (x, y)) in enumerate(curves.items()):
        few = {"marker": "o", "markersize": 3} if number or len(x) == 1 else {}
        axes.plot(x, y, linewidth=1.2, color=("#2f6f9f", "#c4622d")[number], label=name.replace("_", " "), **few)
    if len(curves) > 1:
        axes.legend(frameon=False)
    axes.set_title(title, loc="left")
    axes.set_xlabel("step")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    matplotlib = importlib.import_module("matplotlib")
    with matplotlib.rc_context({"svg.hashsalt": title}):  # the same page of the same run
        figure.savefig(stream, format="svg", transparent=True, metadata={"Date": None})
    _, begin, rest = stream.getvalue().partition("<svg")
    return begin + rest


def _mesh(plan: ParallelPlan, hosts: Sequence[Mapping[str, Any]]) -> str:
    axes, ranks = plan.mesh.axes, plan.mesh.world_size
    shards = math.prod(size for axis, size in axes.items() if axis in (*plan.mesh.shard_axes, "tp", "pp"))
    what = f"Each of {ranks} ranks holds about 1/{shards} of the weights, gradients and optimizer states"
    groups = plan.mesh.data_parallel
    what += f"; samples are divided over {groups}." if groups > 1 else "."
    named = _table(
        ("host", "ranks", "device"), [(each["name"], each["ranks"], each["device"]["name"]) for each in hosts]
    )
    if ranks > _RANKS:
        return f"<p>{what}</p>{_table(('axis', 'ranks'), axes.items())}{named}"
    return f'<p>{what}</p><div class="ranks">{"".join(_rank(plan, each) for each in range(ranks))}</div>{named}'


def _rank(plan: ParallelPlan, rank: int) -> str:
    places = plan.mesh.coordinate(rank).items()
    return f"<div><b>rank {rank}</b>{''.join(f'<br>{axis} {place}' for axis, place in places)}</div>"


def _checkpoints(folder: Path) -> str:
    rows = []
    for step in steps_in(folder / CHECKPOINTS):
        place = folder / CHECKPOINTS / f"step-{step:08d}"
        try:
            content: dict[str, Any] = summary(place)
        except (OSError, ValueError) as error:
            rows.append((place.name, "", f"can't be read: {error}", ""))
            continue
        metric = "" if content["metric"] is None else content["metric"]
        rows.append((place.name, scaled(sum(content["files"].values())), ", ".join(content["parts"]), metric))
    return _table(("folder", "size", "parts", "validation loss"), rows) if rows else "<p>There is none yet.</p>"


def _starts(starts: Sequence[Mapping[str, Any]]) -> str:
    rows = []
    for each in starts:
        mesh, git = ParallelPlan.from_dict(each["plan"]).mesh.described, each.get("git")
        commit = "" if git is None else git["commit"][:10] + (" and changes" if git["changed"] else "")
        rows.append((each["time"], f"after step {each['step']:,}", mesh, commit))
    return _table(("when", "from", "mesh", "commit"), rows)


def _data(contents: Sequence[Mapping[str, Any]]) -> str:
    rows = [(each["path"], each["tokens"], each.get("documents") or "") for each in contents]
    return _table(("path", "tokens", "documents"), rows)


def _texts(folder: Path) -> Iterable[str]:
    """Show what the model wrote last."""
    lines = list(_lines(folder / TEXTS))
    if lines:
        last = [line for line in lines if line["step"] == lines[-1]["step"]]
        shown = "".join(f'<div class="wide"><pre>{escape(line["text"])}</pre></div>' for line in last)
        yield _section(f"Written after step {lines[-1]['step']:,}", shown)


def _warnings(folder: Path) -> Iterable[str]:
    """Show what the ranks were warned of, each text once."""
    ranks: dict[str, set[int]] = {}
    for line in _lines(folder / WARNINGS):
        ranks.setdefault(line["text"], set()).add(line["rank"])
    if ranks:
        rows = [(text, ", ".join(map(str, sorted(each)))) for text, each in ranks.items()]
        yield _section("Warnings", _table(("warning", "ranks"), rows))


def _shortages(folder: Path) -> Iterable[str]:
    """Show the reports of ranks that ran out of memory."""
    for path in sorted(folder.glob("out-of-memory-rank-*.txt")):
        text = path.read_text(encoding="utf-8", errors="replace")
        yield _section(escape(path.stem.replace("-", " ")), f'<div class="wide"><pre>{escape(text)}</pre></div>')


def _plan(plan: ParallelPlan, tables: Mapping[str, Any]) -> str:
    default = ParallelPlan().to_dict()
    rows = [
        (each.key, json.dumps(each.value))
        for each in settings(plan, tables, ())
        if each.value not in (None, (), {}, []) and each.value != _at(default, each.key)
    ]
    whole = f"<details><summary>All of it</summary><pre>{escape(plan.to_toml())}</pre></details>"
    return _table(("key", "value"), rows) + whole


def _at(tables: Any, key: str) -> Any:
    for part in key.split("."):
        tables = tables.get(part) if isinstance(tables, Mapping) else None
    return tables
