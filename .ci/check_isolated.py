"""Checks the one package that an environment holds; the nox session `isolation` runs this there.

    python -I .ci/check_isolated.py hp-fsdp without-framework
    python -I .ci/check_isolated.py hp-fsdp with-torch
    python -I .ci/check_isolated.py hp-fsdp with-mindspore
    python -I .ci/check_isolated.py hp-fsdp with-both

Without a framework the package has to import, and whatever of it needs one has to say which command installs one.
With torch, MindSpore or both installed, importing the package must still import neither, and every public name has to
resolve, on the framework that is there; with both, on torch.
The wheel has to hold every file of the package's sources.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import sys
from pathlib import Path

INSTALL_COMMAND = "pip install"


def unresolved(module, names) -> dict[str, Exception]:
    """List the names that can't be imported from the module, each with the error that says why."""
    errors: dict[str, Exception] = {}
    for name in names:
        try:
            getattr(module, name)
        except Exception as error:
            errors[name] = error
    return errors


def left_out(package: str) -> list[str]:
    """List the files of the package's sources that its wheel lacks."""
    source = Path("packages", package, "src")
    files = {
        path.as_posix()
        for path in (found.relative_to(source) for found in source.rglob("*") if found.is_file())
        if not any(part == "__pycache__" or part.startswith(".") for part in path.parts)
    }
    return sorted(files - {path.as_posix() for path in importlib.metadata.files(package) or ()})


def check_metadata(package: str) -> None:
    """Raise SystemExit if the wheel has no licence, or takes any later version of another package of ours."""
    licences = [path for path in importlib.metadata.files(package) or () if path.name == "LICENSE"]
    if not licences or licences[0].read_text() != Path("LICENSE").read_text():
        raise SystemExit(f"{package}: the wheel has not this repository's LICENSE")
    required = importlib.metadata.requires(package) or []
    loose = [
        text
        for text in required
        if text.startswith(("hp-", "hyper-parallel")) and "~=" not in text and "extra" not in text
    ]
    if loose:
        raise SystemExit(f"{package}: inner versions need ~=, got {loose}")


def refuse_frameworks(what: str) -> None:
    """Raise SystemExit if something has imported a framework."""
    imported = [name for name in ("torch", "mindspore") if name in sys.modules]
    if imported:
        raise SystemExit(f"{what} imported {', '.join(imported)}")


def check(package: str, mode: str) -> str:
    """Return a line that says what holds; raise SystemExit with what does not."""
    if missing := left_out(package):
        raise SystemExit(f"{package}: the wheel lacks {missing}")
    check_metadata(package)
    module = importlib.import_module(package.replace("-", "_"))
    refuse_frameworks(f"{package}: importing it")
    for command in importlib.metadata.distribution(package).entry_points.select(group="console_scripts"):
        command.load()
        refuse_frameworks(f"{package}: loading the command {command.name}")

    if not hasattr(module, "__all__"):
        raise SystemExit(f"{package}: {module.__name__} has no __all__, so nobody can tell what is public")
    errors = unresolved(module, module.__all__)
    if mode != "without-framework":
        if errors:
            raise SystemExit(f"{package} {mode}: these names do not resolve: {errors}")
        expected = "mindspore" if mode == "with-mindspore" else "torch"
        chosen = importlib.import_module("hp_platform").get_platform().name
        if chosen != expected:
            raise SystemExit(f"{package} {mode}: the platform is {chosen}, expected {expected}")
        return f"{package} {mode}: {len(module.__all__)} public names resolve on {chosen}"

    unclear = {name: repr(error) for name, error in errors.items() if INSTALL_COMMAND not in str(error)}
    if unclear:
        raise SystemExit(f"{package}: without a framework these errors do not say how to install one: {unclear}")
    try:
        importlib.import_module("hp_platform").get_platform()
    except Exception as error:
        if INSTALL_COMMAND not in str(error):
            raise SystemExit(f"{package}: get_platform() does not say how to install a framework: {error!r}") from error
        return f"{package} without a framework: imports; {len(errors)} of {len(module.__all__)} names ask for one"
    raise SystemExit(f"{package}: get_platform() found a framework in an environment that should have none")


if __name__ == "__main__":
    print(check(*sys.argv[1:]))
