"""A program in a terminal of its own, and what a person sees there."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PROMPT = "(Pdb) "


class Terminal:
    """The other end of a program's terminal."""

    def __init__(self, number: int) -> None:
        self._number, self.shown, self.raw = number, "", ""

    def until(self, text: str) -> str:
        """Read until a text has appeared; get what came with it."""
        while text not in self.shown:
            self._read()
        found, _, self.shown = self.shown.partition(text)
        return found

    def say(self, line: str) -> str:
        """Give a command, and wait for the next prompt."""
        self.give(line)
        return self.until(PROMPT)

    def give(self, line: str) -> None:
        os.write(self._number, line.encode() + b"\n")

    def rest(self) -> str:
        try:
            while True:
                self._read()
        except OSError:  # the program has ended
            return self.shown

    def _read(self) -> None:
        read = os.read(self._number, 4096).decode(errors="replace")
        self.raw += read
        self.shown += read.replace("\r", "")


@contextmanager
def in_terminal(*command: str, folder: Path) -> Iterator[tuple[Terminal, subprocess.Popen[bytes]]]:
    """Run a program in a terminal of its own."""
    mine, its = pty.openpty()
    left_out = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    environment = {name: value for name, value in os.environ.items() if name not in left_out}
    environment |= {"HYPER_PARALLEL_DEVICE": "cpu", "OMP_NUM_THREADS": "1", "PYTHONSAFEPATH": ""}
    with subprocess.Popen(
        [sys.executable, *command], cwd=folder, env=environment, stdin=its, stdout=its, stderr=its
    ) as process:
        os.close(its)
        try:
            yield Terminal(mine), process
        finally:
            if process.poll() is None:
                process.terminate()
            os.close(mine)


_CONTROLS = re.compile(r"\x1b\[([0-9;?]*)([A-Za-z])|(\r|\n)|([^\r\n\x1b]+)")


def screen(raw: str) -> list[str]:
    """Return the lines that a terminal of any height shows of what was written to it."""
    lines, row, column = [""], 0, 0
    for number, control, end, text in _CONTROLS.findall(raw):
        if control == "A":
            row = max(0, row - int(number or 1))
        elif control == "K":
            lines[row] = ""
        elif end == "\r":
            column = 0
        elif end:
            row, lines = row + 1, [*lines, ""] if row + 1 == len(lines) else lines
        elif text:
            lines[row] = lines[row][:column].ljust(column) + text + lines[row][column + len(text) :]
            column += len(text)
    return [line.rstrip() for line in lines]
