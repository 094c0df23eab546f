"""Writes docs/backends.md: which feature runs on which backend, counted from the results of test runs.

    nox -t torch-cpu torch-npu-sim mindspore-cpu    leaves .nox/results/<backend>.xml
    nox -s backends                                 python docs/make_backends.py .nox/results

What a feature is, which tests show it, and why a backend lacks it stands in docs/features.toml.
"""

from __future__ import annotations

import argparse
import sys
import tomllib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[1]
CI = ("torch-cpu", "torch-npu-sim", "mindspore-cpu")
# A backend on hardware, and those of CI that run the same code.
HARDWARE = {
    "torch-cuda": ("torch-cpu",),
    "torch-npu": ("torch-cpu", "torch-npu-sim"),
    "mindspore-ascend": ("mindspore-cpu",),
}
ELSEWHERE = "no framework in it: run on torch-cpu"  # as the pytest plugin says
FAILING = "FAILING"
COMMAND = "nox -t torch-cpu torch-npu-sim mindspore-cpu && nox -s backends"
INTRODUCTION = f"""\
# Backends

Written by `docs/make_backends.py` from the results of complete test runs and from `docs/features.toml`, which lists the
tests of each feature. Do not edit it; run

    {COMMAND}

Counts are of passed tests: one test on three numbers of ranks counts as three, and a test may cover several features.
torch-npu-sim is the released torch_npu on a stand-in for CANN
([its limits](../packages/hp-testing/README.md#a-simulated-npu)). A backend on hardware counts as tested only
if there are results of its own run.
"""


class DeclarationError(Exception):
    """features.toml says what isn't so; one line for each fault."""


@dataclass(frozen=True)
class Feature:
    """A row of the table.

    Args:
        package: the package that it is part of.
        name: the row's title.
        tests: patterns of test modules below packages/, each with a `::` pattern of test names or without; `*` matches
            any text, a `/` too. Empty: nobody has it.
        missing: why it isn't there, by backend, or by framework for all backends of one.
    """

    package: str
    name: str
    tests: tuple[str, ...]
    missing: Mapping[str, str]

    def reason(self, backend: str) -> str | None:
        """Why the backend lacks it; None where nothing is declared."""
        return self.missing.get(backend, self.missing.get(backend.split("-")[0]))

    def shown_by(self, test: str) -> bool:
        """Whether a test, `packages/hp-plan/tests/test_lint.py::test_a`, is one of its own."""
        return any(_matches(test, pattern) for pattern in self.tests)


def _matches(test: str, pattern: str) -> bool:
    module, _, name = test.partition("::")
    modules, _, names = pattern.partition("::")
    return fnmatchcase(module, f"packages/{modules}") and fnmatchcase(name, names or "*")


@dataclass(frozen=True)
class Results:
    """What one test run left.

    Args:
        outcomes: how often each test (its parameters cut off) has "passed", "failed", was "skipped", or is run
            "elsewhere", where nothing of the backend is in it.
        skipped: how many tests were skipped, by the reason that they gave.
        left_out: the modules that weren't collected, as the plugin tells them.
        seconds: how long the tests of each package took.
    """

    outcomes: Counter[tuple[str, str]]
    skipped: Counter[str]
    left_out: tuple[str, ...]
    seconds: Counter[str]

    def count(self, outcome: str, feature: Feature | None = None) -> int:
        """Count the tests with an outcome, of a feature or of all."""
        return sum(
            count
            for (test, had), count in self.outcomes.items()
            if had == outcome and (feature is None or feature.shown_by(test))
        )


def read_features(text: str) -> list[Feature]:
    """Read features.toml.

    Raises:
        DeclarationError: a reason for what is neither a backend nor a framework.
    """
    known = {*CI, *HARDWARE, "torch", "mindspore"}
    features = []
    for table in tomllib.loads(text)["feature"]:
        feature = Feature(table["package"], table["name"], tuple(table["tests"]), table.get("missing", {}))
        if unknown := sorted(feature.missing.keys() - known):
            raise DeclarationError(f"{feature.name!r}: missing on {unknown}; there are {sorted(known)}")
        features.append(feature)
    return features


def read_results(text: str) -> Results:
    """Read what `pytest --junitxml` wrote."""
    outcomes: Counter[tuple[str, str]] = Counter()
    skipped: Counter[str] = Counter()
    seconds: Counter[str] = Counter()
    suites = list(ElementTree.fromstring(text).iter("testsuite"))
    for case in (case for suite in suites for case in suite.iter("testcase")):
        children = {child.tag: child for child in case}
        outcome = "passed"
        if "failure" in children or "error" in children:
            outcome = "failed"
        elif "skipped" in children:
            outcome = "skipped"
            reason = children["skipped"].get("message", "")
            skipped[reason] += 1
            outcome = "elsewhere" if ELSEWHERE in reason else outcome
        test = _test(case.get("classname", ""), case.get("name", ""))
        outcomes[test, outcome] += 1
        seconds["".join(test.split("/")[1:2])] += float(case.get("time", "0"))  # type: ignore[assignment]
    properties = [entry for suite in suites for entry in suite.iter("property") if entry.get("name") == "left out"]
    return Results(outcomes, skipped, tuple(entry.get("value", "") for entry in properties), seconds)


def _test(classname: str, name: str) -> str:
    """("packages.hp-plan.tests.test_lint", "test_a[1]") -> "packages/hp-plan/tests/test_lint.py::test_a"."""
    parts = (classname or name).split(".")  # a module that couldn't be collected has no classname
    module = next((i for i, part in enumerate(parts) if part.startswith("test_")), len(parts) - 1)
    names = [*parts[module + 1 :], *([name.partition("[")[0]] if classname else [])]
    return f"{'/'.join(parts[: module + 1])}.py::{'::'.join(names)}"


def cells_of(feature: Feature, results: Mapping[str, Results]) -> dict[str, str]:
    """One row: the text of each backend's cell.

    Raises:
        DeclarationError: nothing shows the feature on a backend and nothing says why, or both.
    """
    cells, faults = {}, []
    for backend in (*CI, *(name for name in HARDWARE if name in results)):
        passed, reason = results[backend].count("passed", feature), feature.reason(backend)
        if results[backend].count("failed", feature):
            cells[backend] = FAILING
        elif passed and reason:
            faults.append(f"{feature.name!r} is declared missing on {backend} ({reason}), and {passed} tests pass")
        elif passed:
            where = "in CI" if backend in CI else "on hardware"
            cells[backend] = f"tested {where} ({passed} {'test' if passed == 1 else 'tests'})"
        elif results[backend].count("elsewhere", feature):
            cells[backend] = ELSEWHERE
        elif reason:
            cells[backend] = f"not supported: {reason}"
        else:
            faults.append(f"{feature.name!r}: no test of it passed on {backend}, and no reason is declared")
    if faults:
        raise DeclarationError("\n".join(faults))
    for backend, siblings in HARDWARE.items():
        if backend not in results:
            cells[backend] = _untested(feature.reason(backend), {name: cells[name] for name in siblings})
    return cells


def _untested(reason: str | None, siblings: Mapping[str, str]) -> str:
    """Return the cell of a backend without results."""
    if reason:
        return f"not supported: {reason}"
    failing = [name for name, cell in siblings.items() if cell == FAILING]
    if failing:
        return f"{FAILING} on {failing[0]}"
    if any(cell.startswith("tested") for cell in siblings.values()):
        return "code present, untested on hardware"
    return next(iter(siblings.values()))


def make_page(features: list[Feature], results: Mapping[str, Results], budgets: Mapping[str, list[int]]) -> str:
    """Return the page's text.

    Args:
        features: the rows.
        results: by backend; all of CI's, and those on hardware that there are.
        budgets: seconds for the tests of each package on the backends of CI.

    Raises:
        DeclarationError: patterns without a test and cells that `cells_of` can't fill, all of them.
    """
    backends = (*CI, *HARDWARE)
    rows, faults = [], []
    known = {test for found in results.values() for test, _ in found.outcomes}
    for feature in features:
        for pattern in feature.tests:
            if not any(_matches(test, pattern) for test in known):
                faults.append(f"{feature.name!r}: {pattern!r} matches no test of any run")
        try:
            cells = cells_of(feature, results)
        except DeclarationError as error:
            faults.append(str(error))
        else:
            rows.append([feature.package, feature.name, *(cells[backend] for backend in backends)])
    if faults:
        raise DeclarationError("\n".join(faults))
    lines = [["package", "feature", *backends], ["---"] * (2 + len(backends)), *rows]
    table = "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |\n" for line in lines)
    runs = "".join(_run(backend, results[backend]) for backend in backends if backend in results)
    return f"{INTRODUCTION}\n{table}\n{_seconds(results, budgets)}\n## The runs\n{runs}"


def _seconds(results: Mapping[str, Results], budgets: Mapping[str, list[int]]) -> str:
    rows = []
    for package, budget in budgets.items():
        measured = [results[backend].seconds[package] for backend in CI]
        rows.append([package, *(f"{took:.0f} of {most}" for took, most in zip(measured, budget, strict=True))])
    totals = [(sum(results[name].seconds.values()), sum(most)) for name, most in zip(CI, zip(*budgets.values()))]
    rows.append(["all", *(f"{took:.0f} of {most}" for took, most in totals)])
    lines = [["package", *CI], ["---"] * (1 + len(CI)), *rows]
    table = "".join(f"| {' | '.join(line)} |\n" for line in lines)
    return (
        "## Seconds\n\nSeconds that the tests took in these runs, and their budgets on two otherwise idle cores."
        "\nTwo tests run at a time, so a run takes about half of its column's sum."
        f"\nExceeding a budget is not a failure: a machine may be slower, or busy.\n\n{table}"
    )


def over_budget(results: Mapping[str, Results], budgets: Mapping[str, list[int]]) -> list[str]:
    """Return a line for each package and backend whose tests took longer than their budget."""
    return [
        f"{package} on {backend}: {results[backend].seconds[package]:.0f} s, the budget is {most} s"
        for package, budget in budgets.items()
        for backend, most in zip(CI, budget, strict=True)
        if results[backend].seconds[package] > most
    ]


def _run(backend: str, results: Results) -> str:
    failed = results.count("failed")
    counts = f"{results.count('passed')} tests passed" + (f", {failed} FAILED" if failed else "")
    lines = [f"left out, {line}" for line in results.left_out]
    lines += [f"skipped, {count}: {' '.join(reason.split())}" for reason, count in sorted(results.skipped.items())]
    return f"\n{backend}: {counts}.\n" + ("\n" + "".join(f"- {line}\n" for line in lines) if lines else "")


def failing_rows(page: str) -> list[str]:
    """List the features of a page, as "package: feature", of which a test failed."""
    rows = [[cell.strip() for cell in line.split(" | ")] for line in page.splitlines() if line.startswith("| ")]
    return [f"{row[0].removeprefix('| ')}: {row[1]}" for row in rows if any(FAILING in cell for cell in row[2:])]


def main() -> int:
    """Write the page, or report what is wrong and return 1."""
    parser = argparse.ArgumentParser(description="Write docs/backends.md from the results of test runs.")
    parser.add_argument("results", type=Path, nargs="?", default=ROOT / ".nox/results", help="folder of <backend>.xml")
    parser.add_argument("--output", type=Path, default=ROOT / "docs/backends.md")
    parser.add_argument("--check", action="store_true", help="write nothing; fail where the page has a failing row")
    options = parser.parse_args()
    if options.check:
        failing = failing_rows(options.output.read_text("utf-8"))
        for row in failing:
            print(f"{options.output}: {row} is FAILING: mend it, then {COMMAND}", file=sys.stderr)
        return 1 if failing else 0
    files = {name: options.results / f"{name}.xml" for name in (*CI, *HARDWARE)}
    absent = [str(files[name]) for name in CI if not files[name].exists()]
    if absent:
        print(f"{', '.join(absent)}: not there; first run {COMMAND.partition(' && ')[0]}", file=sys.stderr)
        return 1
    results = {name: read_results(path.read_text("utf-8")) for name, path in files.items() if path.exists()}
    declared = (ROOT / "docs/features.toml").read_text("utf-8")
    budgets = tomllib.loads(declared)["seconds"]
    try:
        page = make_page(read_features(declared), results, budgets)
    except DeclarationError as error:
        print(f"{error}\n(docs/features.toml says which tests show a feature, and why it is missing)", file=sys.stderr)
        return 1
    options.output.write_text(page, "utf-8")
    counts = ", ".join(f"{name} {found.count('passed')}" for name, found in results.items())
    print(f"{options.output}: tests passed: {counts}")
    for line in over_budget(results, budgets):
        print(f"over budget: {line}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
