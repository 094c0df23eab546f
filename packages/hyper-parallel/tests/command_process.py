"""A process that runs the command again and again, with its libraries loaded once."""

from __future__ import annotations

import json
import subprocess
from multiprocessing.connection import wait
from pathlib import Path

# Runs the command for each line of arguments that it reads, and answers with its exit status; what the command and its
# ranks write is appended to two files.
_PROGRAM = """
import json, multiprocessing, multiprocessing.forkserver, os, signal, sys
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup has it ignored, which ranks would inherit
answers = os.fdopen(os.dup(1), "w")
for number, name in ((1, "out"), (2, "err")):
    os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
{preparation}
from hyper_parallel.commands import cli
for line in sys.stdin:
    status = 0
    try:
        cli.main(json.loads(line))
    except SystemExit as ended:
        status = ended.code or 0
    sys.stdout.flush()
    print(status, file=answers, flush=True)
"""


def program(preparation: str) -> str:
    """Return the program of a `CommandProcess`; it runs statements before its first command."""
    return _PROGRAM.format(preparation=preparation)


class CommandProcess:
    """The side that asks a process for commands, and reads what they wrote.

    Args:
        process: of `program`, with pipes to its input and from its output, in the folder.
        folder: where it runs.
    """

    def __init__(self, process: subprocess.Popen[str], folder: Path) -> None:
        self.process, self.folder, self._read = process, folder, {"out": 0, "err": 0}

    def begin(self, *arguments: str) -> None:
        """Begin a command."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(arguments) + "\n")
        self.process.stdin.flush()

    def written(self, name: str) -> str:
        """Return what "out" or "err" has got since the last command ended."""
        path = self.folder / name
        return path.read_text(encoding="utf-8", errors="replace")[self._read[name] :] if path.exists() else ""

    def finish(self, limit: float) -> tuple[int, str, str]:
        """Wait for the command's end; return its exit status and what it wrote.

        Raises:
            TimeoutError: it did not end within so many seconds.
            RuntimeError: the process ended.
        """
        assert self.process.stdout is not None
        if not wait([self.process.stdout], limit):
            raise TimeoutError(f"the command did not end in {limit:.0f} s: {self.written('err')}")
        answer = self.process.stdout.readline()
        out, err = self.written("out"), self.written("err")
        if not answer:
            raise RuntimeError(f"the process ended: {err[-2000:]}")
        self._read = {"out": self._read["out"] + len(out), "err": self._read["err"] + len(err)}
        return int(answer), out, err
