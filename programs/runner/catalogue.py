"""What there is to run: the programs of this folder by their headers, examples/loops, and the READMEs' programs."""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[1]  # of the programs
ROOT = FOLDER.parent
_HEADER = re.compile(r"\A# /// program\n((?:#.*\n)*?)# ///\n")
_BLOCK = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_JOINS = re.compile(r"init_process_group\(|init_device_mesh\(|dist\.|torch\.distributed\.")


@dataclass(frozen=True)
class Launch:
    """One start of a program on ranks, and how it has to end.

    Attributes:
        ranks: how many; 0 is a plain `python program.py`.
        exit: the launcher's exit status.
        failed: the exit status of each rank that has to fail first, by rank; minus a signal's number.
        error: a text that must be in what the ranks print.
        send: a signal's name, sent when all ranks have reported a step.
        to: "launcher", or a rank's number; that rank, or rank 0, waits at the step until the signal is sent.
        step: which step.
    """

    ranks: int = 2
    exit: int = 0
    failed: tuple[tuple[int, int], ...] = ()
    error: str = ""
    send: str = ""
    to: str = "launcher"
    step: int = 0


@dataclass(frozen=True)
class Program:
    """A program, and what its reports are compared with.

    Attributes:
        name: its file's, or the README and the line where it begins.
        text: its source.
        launches: one after the other, in one folder.
        framework: "torch" or "mindspore".
        losses: how the ranks' losses make one process's: their "mean" or "sum".
        tolerance: how far losses and weights may be, relative to the greater of 1 and the value.
        reports: whether it reports steps; READMEs' programs do not, and their exit status counts.
        alone: whether one process is its truth.
        constant: whether live bytes are the same in each step from the second on.
        short: whether it is one of the few that each test run has.
    """

    name: str
    text: str
    launches: tuple[Launch, ...] = (Launch(),)
    framework: str = "torch"
    losses: str = "mean"
    tolerance: float = 1e-9
    reports: bool = True
    alone: bool = True
    constant: bool = True
    short: bool = False


def programs() -> list[Program]:
    """Return all programs."""
    own = [_of_folder(path) for path in sorted(FOLDER.glob("*.py")) if path.read_text().startswith("# /// program")]
    return [*own, *_loops(), *_of_readmes()]


def _of_folder(path: Path) -> Program:
    text = path.read_text(encoding="utf-8")
    header = _HEADER.match(text)
    if header is None:
        raise ValueError(f"{path.name}: the header has no end; write '# ///' after its last line")
    values = tomllib.loads("".join(line[1:].strip() + "\n" for line in header[1].splitlines()))
    launches = values.pop("launch", None) or [{}]
    shared = {
        name: values.pop(name) for name in ("ranks", "exit", "failed", "error", "send", "to", "step") if name in values
    }
    made = []
    for each in launches:
        given = {**shared, **each}
        given["failed"] = tuple((int(rank), code) for rank, code in given.get("failed", {}).items())
        made.append(Launch(**{**given, "to": str(given.get("to", "launcher"))}))
    return Program(path.stem, text, tuple(made), **values)


def _loops() -> list[Program]:
    paths = sorted((ROOT / "examples" / "loops").glob("*.py"))
    chosen = [path for path in paths if path.stem != "ray_train"]  # it starts workers of its own
    return [Program(f"loops/{path.stem}", path.read_text(), reports=False, alone=False) for path in chosen]


def _of_readmes() -> list[Program]:
    found = []
    for path in [ROOT / "README.md", *sorted(ROOT.glob("packages/*/README.md"))]:
        content = path.read_text(encoding="utf-8")
        for block in _BLOCK.finditer(content):
            line = content.count("\n", 0, block.start()) + 1
            name = f"{path.relative_to(ROOT).parent.name or 'root'}/README:{line}"
            framework = "mindspore" if "import mindspore" in block[1] else "torch"
            launch = Launch(ranks=2 if _JOINS.search(block[1]) else 0)
            found.append(Program(name, block[1], (launch,), framework, reports=False, alone=False))
    return found
