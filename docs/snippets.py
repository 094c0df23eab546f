"""Check the blocks of the site's pages, and run them as a reader would.

    python docs/snippets.py                          Python and YAML parse, plans read, every block is of a known kind
    python docs/snippets.py --run                    run all pages, from top to bottom, each in an empty folder
    python docs/snippets.py --run learn/pipeline.md  run one

The kinds of blocks, by their first lines:

    ```python title="train.py"    a file that the reader saves; any language
    ```sh                         commands, run by bash; a status other than 0 fails
    ```python                     a program, run by python
    ```text                       what the commands before it print (standard output); `...` stands for anything
    ```toml                       a part of a plan
    ```console                    commands for another machine, or for a checkout: not run

A notebook is such a page, too: its cells are these blocks, files begin with %%writefile, commands with %%bash, and what
a cell has printed is the text after it. A cell without an output may print anything.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import doctest
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

DOCS = Path(__file__).resolve().parent
FOLDERS = ("learn", "how-to", "coming-from")
RUN, FILE, SHOWN = ("sh", "python"), "file", ("toml", "text", "console")
ENVIRONMENT = {
    "COLUMNS": "100",
    "HF_HUB_OFFLINE": "1",
    "HYPER_PARALLEL_DEVICE": "cpu",
    "NO_COLOR": "1",
    "OMP_NUM_THREADS": "1",
    "PYTHONUNBUFFERED": "1",
}
LIMIT = 300.0
"""Seconds for a block."""
_BLOCK = re.compile(r'^```(\w+)(?: title="([^"]+)")?\n(.*?)^```$', re.DOTALL | re.MULTILINE)
_FENCE = re.compile(r"^```[^\n]+$", re.MULTILINE)
_EQUAL = doctest.OutputChecker().check_output
_FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
_LANGUAGES = {".toml": "toml", ".py": "python", ".jsonl": "json", ".yaml": "yaml"}


@dataclass(frozen=True)
class Block:
    """A block of a page.

    Attributes:
        place: the page and the line.
        kind: the language, or "file".
        title: the name of the file; empty of others.
        text: what is between the fences.
    """

    place: str
    kind: str
    title: str
    text: str


def pages() -> list[Path]:
    """List the pages whose blocks are run."""
    paths = (path for folder in FOLDERS for path in sorted((DOCS / folder).iterdir()))
    return [path for path in paths if path.suffix in (".md", ".ipynb")]


def page_text(page: Path) -> str:
    """Read a page as Markdown, a notebook by its cells."""
    text = page.read_text("utf-8")
    if page.suffix != ".ipynb":
        return text
    return "\n\n".join(part for cell in json.loads(text)["cells"] for part in _parts(cell)) + "\n"


def printed(cell: dict) -> str:
    """Return what a cell of a notebook has printed: standard output, and the value of its last line."""
    texts = (
        each["text"] if each["output_type"] == "stream" else each["data"].get("text/plain", "")
        for each in cell["outputs"]
        if each["output_type"] == "execute_result" or each.get("name") == "stdout"
    )
    return "".join(_joined(text) for text in texts)


def _parts(cell: dict) -> Iterator[str]:
    """Write a cell of a notebook as the blocks of a page."""
    source = _joined(cell["source"])
    if cell["cell_type"] == "markdown":
        yield source
        return
    magic, _, rest = source.partition("\n")
    if magic.startswith("%%bash"):
        yield f"```sh\n{rest}\n```"
    elif magic.startswith("%%writefile "):
        name = magic.split()[1]
        yield f'```{_LANGUAGES[Path(name).suffix]} title="{name}"\n{rest}\n```'
    else:
        yield f"```python\n{source}\n```"
    if text := printed(cell).rstrip():
        yield f"```text\n{text}\n```"


def _joined(text: str | list[str]) -> str:
    return text if isinstance(text, str) else "".join(text)


def blocks(page: Path) -> list[Block]:
    """List a page's blocks from top to bottom.

    Raises:
        ValueError: a fence that opens no block that is understood.
    """
    text = page_text(page)
    found = list(_BLOCK.finditer(text))
    strange = {match.start() for match in _FENCE.finditer(text)} - {match.start() for match in found}
    name = page.relative_to(DOCS).as_posix()
    listed = []
    for match in found:
        place = f"docs/{name}:{text.count(chr(10), 0, match.start()) + 1}"
        kind = FILE if match[2] else match[1]
        if kind not in (*RUN, *SHOWN, FILE):
            raise ValueError(f"{place}: a block of the kind {kind!r}; docs/snippets.py lists those there are")
        listed.append(Block(place, kind, match[2] or "", match[3]))
    if strange:
        line = text.count("\n", 0, min(strange)) + 1
        raise ValueError(f'docs/{name}:{line}: a fence that is neither ```kind nor ```kind title="file"')
    return listed


def faults(page: Path) -> Iterator[str]:
    """Say what is wrong with a page's blocks, without running them."""
    import yaml  # of mkdocs

    from hp_plan import ParallelPlan, PlanError

    for block in blocks(page):
        try:
            if block.title.endswith(".py") or block.kind == "python":
                ast.parse(block.text)
            elif block.title.endswith(".toml") or block.kind == "toml":
                ParallelPlan.from_dict(tomllib.loads(block.text))
            elif block.title.endswith(".yaml"):
                yaml.safe_load(block.text)
        except (SyntaxError, tomllib.TOMLDecodeError, PlanError, yaml.YAMLError) as error:
            yield f"{block.place}: {error}"


def run(page: Path, folder: Path) -> Iterator[str]:
    """Do what a page says in an empty folder, and say what fails, or prints something else than the page says."""
    if page.suffix == ".ipynb":
        yield from _run_notebook(page, folder)
        return
    told = ""
    for block in blocks(page):
        if block.kind == FILE:
            (folder / block.title).parent.mkdir(parents=True, exist_ok=True)
            (folder / block.title).write_text(block.text, "utf-8")
        elif block.kind in RUN:
            command = ["bash", "-e"] if block.kind == "sh" else [sys.executable, "-"]
            status, told, errors = _execute(command, block.text, folder)
            if status:
                yield f"{block.place}: exit status {status}\n{told}{errors}"
                return
        elif block.kind == "text":
            yield from _differences(block.text, told, block.place)


def _differences(shown: str, got: str, place: str) -> Iterator[str]:
    """Compare what a page shows with what was printed."""
    if not _EQUAL(shown, got, _FLAGS):
        yield "\n".join(difflib.unified_diff(shown.splitlines(), got.splitlines(), place, "printed", "", ""))


def _run_notebook(page: Path, folder: Path) -> Iterator[str]:
    """Execute a notebook in an empty folder; say which cell raises, or prints something else than is saved with it."""
    import nbformat
    from nbclient import NotebookClient
    from nbclient.exceptions import CellExecutionError

    notebook = nbformat.read(page, as_version=4)
    saved = [printed(cell) if cell["cell_type"] == "code" else "" for cell in notebook.cells]
    client = NotebookClient(notebook, timeout=int(LIMIT), resources={"metadata": {"path": str(folder)}})
    try:
        client.execute(env=_environment())
    except CellExecutionError as error:
        yield f"docs/{page.relative_to(DOCS)}: {error.ename}: {error.evalue}\n{error.traceback}"
        return
    for place, (cell, shown) in enumerate(zip(notebook.cells, saved, strict=True)):
        if shown:
            yield from _differences(shown, printed(cell), f"docs/{page.relative_to(DOCS)}, cell {place}")


def _environment() -> dict[str, str]:
    """Return the environment in which the pages' programs run."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    return {**os.environ, **ENVIRONMENT, "PATH": path}


def _execute(command: list[str], text: str, folder: Path) -> tuple[int, str, str]:
    """Run a block; return its exit status, standard output and standard error."""
    try:
        done = subprocess.run(
            command,
            input=text.encode(),
            timeout=LIMIT,
            check=False,
            cwd=folder,
            env=_environment(),
            capture_output=True,
        )
    except subprocess.TimeoutExpired as error:
        return 124, (error.stdout or b"").decode(errors="replace"), (error.stderr or b"").decode(errors="replace")
    return done.returncode, done.stdout.decode(errors="replace"), done.stderr.decode(errors="replace")


def main() -> int:
    """Check or run pages."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", action="store_true", help="run them, which takes minutes")
    parser.add_argument("names", nargs="*", help="pages below docs/; none are all")
    options = parser.parse_args()
    chosen = [DOCS / name for name in options.names] or pages()
    status = 0
    for page in chosen:
        start = time.monotonic()
        wrong = list(faults(page))
        if options.run and not wrong:
            with tempfile.TemporaryDirectory() as folder:
                wrong = list(run(page, Path(folder)))
            print(f"{page.relative_to(DOCS)}: {time.monotonic() - start:.0f} s", flush=True)
        for each in wrong:
            print(each, flush=True)
            status = 1
    return status


if __name__ == "__main__":
    sys.exit(main())
