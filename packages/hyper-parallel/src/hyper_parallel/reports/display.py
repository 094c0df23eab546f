"""Display of a run on rank 0: live, as plain lines if there is no terminal, or as JSON."""

from __future__ import annotations

import collections
import contextlib
import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Protocol, TextIO

from hp_plan import VerifyResult
from hp_platform import get_platform
from hyper_parallel.reports.output import Step, Summary, as_json
from hyper_parallel.reports.readings import Series, sparkline

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from hp_plan.extend import Setting
    from hyper_parallel.commands.doctor import Finding
    from hyper_parallel.training.evaluating import Evaluation

_COLUMNS = {"step": 6, "loss": 9, "grad norm": 10, "tokens/s": 10, "memory": 13, "": 0}
_MEMORY = {True: "peak resident", False: "peak memory"}  # on a CPU it is that of the whole process
_FIRST = 10  # steps that each have a line where there is no terminal
_SECONDS = 5.0  # between two lines after them
_SHOWN = str.maketrans(dict.fromkeys((*range(9), *range(11, 32), 127), "�"))  # a terminal may obey these


class Reporter(Protocol):
    """A display of a run."""

    def running(self, title: str, *, steps: int) -> contextlib.AbstractContextManager[None]:
        """Around all steps."""
        ...

    def step(self, step: Step) -> None:
        """After each step."""
        ...

    def finished(self, summary: Summary) -> None:
        """Once, at the end."""
        ...


class JsonReporter:
    """One line of JSON a step, and one for the run.

    Args:
        stream: where to; standard output unless given.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stdout

    @contextlib.contextmanager
    def running(self, title: str, *, steps: int) -> Iterator[None]:
        """Do nothing: there is nothing to open or close."""
        yield

    def step(self, step: Step) -> None:
        """Write the step's line."""
        self._line(as_json(step))

    def finished(self, summary: Summary) -> None:
        """Write the run's line."""
        self._line(as_json(summary))

    def _line(self, text: str) -> None:
        self._stream.write(text + "\n")
        self._stream.flush()


class RichReporter:
    """A progress bar under a table of the latest steps.

    Args:
        console: where to; standard output unless given.
    """

    def __init__(self, console: Console | None = None) -> None:
        from rich.live import Live
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

        self._console = console or make_console()
        self._latest: collections.deque[Step] = collections.deque(maxlen=8)
        self._steps = 0
        count = TextColumn("step {task.completed:.0f}/{task.total:.0f}")
        self._progress = Progress(count, BarColumn(bar_width=None), TimeElapsedColumn(), TimeRemainingColumn())
        self._live = Live(console=self._console, get_renderable=self._picture, vertical_overflow="crop")

    @contextlib.contextmanager
    def running(self, title: str, *, steps: int) -> Iterator[None]:
        """Open the live display, and close it whatever happens."""
        self._console.print(title)
        self._steps = steps
        self._progress.add_task("train", total=steps)
        with self._live:
            yield

    def step(self, step: Step) -> None:
        """Draw the step; what a validation has found stays above the table."""
        self._latest.append(step)
        if step.validation_loss is not None:
            self._live.console.print(f"step {step.step}: loss {step.loss:.4f}, {_remarks(step)}", markup=False)
        for line in _texts(step):
            self._live.console.print(line, markup=False, style="dim")
        self._progress.update(self._progress.task_ids[0], completed=step.step)

    def finished(self, summary: Summary) -> None:
        """Print the final table and the text that the model wrote."""
        print_summary(self._console, summary, title=_end(self._latest[-1] if self._latest else None, self._steps))

    def _picture(self):
        from rich.console import Group
        from rich.table import Table

        table = Table(box=None, pad_edge=False)
        for name, width in zip(_headings(), _COLUMNS.values()):
            table.add_column(name, justify="right" if name else "left", min_width=width, no_wrap=not name)
        for step in self._latest:
            table.add_row(*_cells(step))
        return Group(table, self._progress)


class LineReporter:
    """A line now and then, for output that is not a terminal.

    Args:
        console: where to; standard output unless given.
        clock: returns seconds.
    """

    def __init__(self, console: Console | None = None, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._console, self._clock = console or make_console(), clock
        self._steps, self._shown, self._at = 0, 0, -math.inf
        self._last: Step | None = None
        self._newest: Step | None = None  # that has a line

    @contextlib.contextmanager
    def running(self, title: str, *, steps: int) -> Iterator[None]:
        """Print the title and the names of the columns, and at the end the last step, if it has no line."""
        self._steps = steps
        self._console.print(title, soft_wrap=True)
        self._line(_headings())
        try:
            yield
        finally:
            if self._last is not None and self._last is not self._newest:
                self._line(_cells(self._last))

    def step(self, step: Step) -> None:
        """Print the first ten steps, then one every five seconds, and those after which the model was validated."""
        self._last = step
        now = self._clock()
        if self._shown < _FIRST or now - self._at >= _SECONDS or step.validation_loss is not None:
            self._line(_cells(step))
            self._newest, self._at, self._shown = step, now, self._shown + 1
        for line in _texts(step):
            self._console.print(line, markup=False)

    def finished(self, summary: Summary) -> None:
        """Print the final table and the text that the model wrote."""
        print_summary(self._console, summary, title=_end(self._last, self._steps))

    def _line(self, cells: Iterable[str]) -> None:
        line = " ".join(cell.rjust(width) for cell, width in zip(cells, _COLUMNS.values())).rstrip()
        self._console.print(line, soft_wrap=True)


def make_reporter(*, json_lines: bool) -> Reporter:
    """Choose a reporter: JSON if asked for, else a live display on a terminal, else lines.

    Raises:
        ImportError: rich isn't installed.
    """
    if json_lines:
        return JsonReporter()
    console = make_console()
    return RichReporter(console) if console.is_terminal else LineReporter(console)


def make_console(*, stderr: bool = False) -> Console:
    """Make a console of rich.

    Raises:
        ImportError: rich isn't installed.
    """
    try:
        from rich.console import Console
    except ImportError as error:
        raise ImportError("the display needs rich: pip install 'hyper-parallel[train]', or use --json") from error
    return Console(stderr=stderr, highlight=False)


def _end(last: Step | None, steps: int) -> str:
    """Return how a run of so many steps has ended; without a step, it had been finished before."""
    if last is None:
        return "finished before: no step was left"
    return "finished" if last.step == steps else f"stopped after step {last.step:,} of {steps:,}"


def print_summary(console: Console, summary: Summary, *, title: str) -> None:
    """Print the final table and the text that the model wrote."""
    from rich.panel import Panel
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title, show_header=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    memory = ", ".join(scaled(peak) for peak in summary.peak_memory)
    for name, value in {
        "steps": f"{summary.steps}",
        "loss": f"{summary.first_loss:.4f} at first, {summary.last_loss:.4f} at the end{_mean(summary.averaged)}",
        "tokens": f"{summary.tokens:,} in {summary.seconds:.1f} s: {summary.tokens_per_second:,.0f} a second",
        **({_memory(): f"{memory} (by rank)"} if memory else {}),
        "run folder": summary.folder,
        **({"with": ", ".join(summary.files)} if summary.files else {}),
        "checkpoint": summary.checkpoint,
        **({"not written": "\n".join(summary.missed)} if summary.missed else {}),
    }.items():
        table.add_row(name, Text(value))
    console.print(table)
    if summary.sample is not None:
        console.print(
            Panel(Text(summary.sample.translate(_SHOWN)), title="written by the model, loaded back from the checkpoint")
        )


def _mean(steps: int) -> str:
    return f" (mean of {steps} steps)" if steps > 1 else ""


def evaluation_text(result: Evaluation) -> str:
    """Say what a model is worth on some data."""
    numbers = [f"loss {result.loss:.4f}"]
    numbers += [] if result.perplexity is None else [f"perplexity {result.perplexity:,.1f}"]
    numbers += [] if result.accuracy is None else [f"accuracy {result.accuracy:.1%}", f"margin {result.margin:.3f}"]
    samples = f"{result.samples:,} samples" + (f" ({result.left_out} fill no batch)" if result.left_out else "")
    cut = f"; {result.cut}" if result.cut else ""
    return f"{result.checkpoint or 'the weights of the plan'}: {', '.join(numbers)}, of {samples}{cut}"


def diagnostics_table(rows: Iterable[tuple[str, str, str]]) -> Table:
    """Make the table of diagnostics: the key, what is wrong, what to change."""
    from rich.table import Table
    from rich.text import Text

    table = Table("key", "what is wrong", "what to change", show_lines=True)
    for row in rows:
        table.add_row(*(Text(cell, overflow="fold") for cell in row))
    return table


_MARKS = {"ok": "", "note": "[yellow]note[/yellow]", "fault": "[red]fault[/red]"}


def findings_table(findings: Iterable[Finding]) -> Table:
    """Return what `doctor` found, as a table."""
    from rich.markup import escape
    from rich.table import Table

    table = Table("", "", "found", box=None, pad_edge=False)
    table.add_column("what to do", overflow="fold")
    part = ""
    for each in findings:
        mark = f"{_MARKS[each.state]} " if _MARKS[each.state] else ""
        head = "" if each.part == part else f"[bold]{each.part}[/bold]"
        table.add_row(head, escape(each.name), f"{mark}{escape(each.value)}", escape(each.fix))
        part = each.part
    return table


def readings_table(shown: Series) -> Table:
    """Make the table of a run's readings: a line of bars for each tensor, and the numbers of the last step."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None)
    table.add_column(shown.phase, overflow="fold")
    table.add_column(f"norm, steps {shown.steps[0]} to {shown.steps[-1]}")
    for column in ("first", "last", "low", "high"):
        table.add_column(column, justify="right")
    for name, norms in shown.norms.items():
        last = (norms[0], norms[-1], shown.lows[name][-1], shown.highs[name][-1])
        table.add_row(Text(name or "loss"), sparkline(norms), *(f"{number:.4g}" for number in last))
    return table


def settings_table(settings: Iterable[Setting]) -> Table:
    """Make the table of a plan's values."""
    from rich.table import Table
    from rich.text import Text

    table = Table("key", "value", "from", box=None)
    for setting in settings:
        value = "-" if setting.value is None else repr(setting.value)
        table.add_row(
            Text(setting.key), Text(value), setting.origin, style="" if setting.origin == "default" else "bold"
        )
    return table


def verify_table(result: VerifyResult) -> Table:
    """Make the table of every module's largest relative differences."""
    from rich.table import Table
    from rich.text import Text

    table = Table(title=f"relative difference from one process (loss: {max(result.losses):.1e})")
    table.add_column("module", overflow="fold")
    for name in ("output", "gradient", "weight", "largest"):
        table.add_column(name, justify="right")
    for row in result.rows:
        numbers = [f"{number:.1e}" for number in (row.output, row.gradient, row.weight, row.largest)]
        table.add_row(Text(row.module), *numbers, style="red" if row.largest > result.tolerance else "")
    return table


def _headings() -> tuple[str, ...]:
    return tuple(_memory() if name == "memory" else name for name in _COLUMNS)


def _memory() -> str:
    return _MEMORY[get_platform().devices.kind == "cpu"]


def _cells(step: Step) -> tuple[str, ...]:
    return (
        str(step.step),
        f"{step.loss:.4f}",
        f"{step.grad_norm:.3f}",
        f"{step.tokens_per_second:,.0f}",
        scaled(step.peak_memory),
        _remarks(step),
    )


def _remarks(step: Step) -> str:
    texts = [] if step.mfu is None else [f"{step.mfu:.1%} MFU"]
    if step.accuracy is not None:
        texts.append(f"accuracy {step.accuracy:.0%}, margin {step.margin:.3f}")
    if step.validation_loss is not None:
        more = "" if step.perplexity is None else f" (perplexity {step.perplexity:,.1f})"
        if step.validation_accuracy is not None:
            more = f" (accuracy {step.validation_accuracy:.0%}, margin {step.validation_margin:.3f})"
        texts.append(f"validation loss {step.validation_loss:.4f}{more}")
    return ", ".join(texts)


def _texts(step: Step) -> Iterator[str]:
    """Yield what was found of silent corruption, then what a model has written under a line that says when."""
    yield from step.faults
    for number, text in enumerate(step.texts, start=1):
        which = f", prompt {number}" if len(step.texts) > 1 else ""
        yield f"written after step {step.step}{which}:"
        yield from (f"  {line}" for line in text.translate(_SHOWN).splitlines())


def scaled(count: int) -> str:
    """Format bytes for people.

    >>> scaled(650 << 20), scaled(3 << 30)
    ('650 MiB', '3.0 GiB')
    """
    return f"{count / 2**30:,.1f} GiB" if count >= 1 << 30 else f"{count / 2**20:,.0f} MiB"
