"""The pytest plugin: `--backend`, test modules of other frameworks left out, ranks that follow warning filters."""

from __future__ import annotations

import ast
import contextlib
import copy
import gc
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
from _pytest.junitxml import xml_key

from hp_platform.platforms.ports import platform_name
from hp_testing.pools import pool, target
from hp_testing.pools.worker import BODY

# What a test module imports at its top that only exists with a framework.
IMPORTS = {"torch": {"torch", "torch_npu", "transformers"}, "mindspore": {"mindspore"}}
TITLES = {"torch": "PyTorch", "mindspore": "MindSpore"}
NEUTRAL = "torch-cpu"  # where tests are run that no framework takes part in
ELSEWHERE = f"no framework in it: run on {NEUTRAL}"
TIERS = ("smoke", "device", "usual", "all")
EXAMPLES = 400  # of a test of hypothesis where all tests run; else an eighth
LEFT_OUT = "hp_testing left out"  # in what a worker of pytest-xdist tells
# How many tests the tier left out.
_OTHER_TIER = pytest.StashKey[int]()
# The test modules that were left out, by their framework and folder.
_LEFT_OUT = pytest.StashKey[Counter[tuple[str, str]]]()


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    """Add `--backend`, and select what it says at once: a conftest that is loaded next may import the framework."""
    parser.addoption(
        "--backend",
        default=target.TARGETS[0],
        choices=target.TARGETS,
        help="framework and device of the tests that run on ranks (default: %(default)s)",
    )
    parser.addoption(
        "--tier",
        choices=TIERS,
        help="all tests, those that are not marked `thorough`, those marked `device` and the first of each module, or a"
        " case of those marked `smoke` (default: device on torch-npu-sim, whose kernels are the CPU's, else usual)",
    )
    config = cast(pytest.Config, pluginmanager.get_plugin("pytestconfig"))
    with contextlib.suppress(pytest.UsageError):  # pytest reports it when it parses all arguments
        options = copy.copy(config.option)  # a worker of pytest-xdist has them from here, and no arguments
        parsed = parser.parse_known_args([str(argument) for argument in config.invocation_params.args], options)
        with _terminal(pluginmanager):
            target.select(parsed.backend)


def _terminal(pluginmanager: pytest.PytestPluginManager) -> contextlib.AbstractContextManager[None]:
    """Let what is written meanwhile reach the terminal: a device's stand-in may be compiled, which takes a while."""
    capture = pluginmanager.get_plugin("capturemanager")
    return contextlib.nullcontext() if capture is None else capture.global_and_fixture_disabled()


def pytest_configure(config: pytest.Config) -> None:
    """Take over pytest's warning filters, and add the markers of tests that are not for every backend."""
    for line in target.warning_filters():
        config.addinivalue_line("filterwarnings", line)
    pool.warning_filters = _filters(config)
    config.stash[_LEFT_OUT] = Counter()
    config.stash[_OTHER_TIER] = 0
    _set_examples(EXAMPLES if config.getoption("--tier") == "all" else EXAMPLES // 8)
    text = (
        "framework(name): the test is for one framework, torch or mindspore, though its module imports none at its top"
    )
    config.addinivalue_line("markers", text)
    text = "smoke: of the few that show in a minute that nothing is broken as a whole; see --tier"
    config.addinivalue_line("markers", text)
    text = "device: the test is of what another device or its plugin for PyTorch can break; see --tier"
    config.addinivalue_line("markers", text)
    text = "thorough: a slow variant of what another test covers; see --tier"
    config.addinivalue_line("markers", text)
    text = "not_on(*backends, reason): the test is skipped with these values of --backend, for the reason it gives"
    config.addinivalue_line("markers", text)


def _set_examples(count: int) -> None:
    """Tell hypothesis how many examples to try, where a test doesn't; not needed where it isn't installed."""
    with contextlib.suppress(ImportError):
        from hypothesis import settings

        settings.register_profile("tier", max_examples=count)
        settings.load_profile("tier")


def pytest_report_header(config: pytest.Config) -> str:
    """Tell what the ranks run on, or what is missing."""
    lacking = target.missing()
    return f"ranks: {config.getoption('--backend')}" + (f" (skipped: {lacking})" if lacking else "")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out the test modules of other frameworks than the one selected; the summary tells how many."""
    if not (collection_path.name.startswith("test_") and collection_path.suffix == ".py"):
        return None
    needed = needed_framework(collection_path, platform_name())
    if needed is None:
        return None
    folder = collection_path.parent
    with contextlib.suppress(ValueError):
        folder = folder.relative_to(config.rootpath)
    config.stash[_LEFT_OUT][needed, folder.as_posix()] += 1
    return True


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip tests that are another framework's or not for this backend, and bring those of one world size together.

    Sorted so, a pool's ranks end once its last test is done, and the largest pools don't wait beside the others.
    """
    selected = platform_name()
    backend = config.getoption("--backend")
    _keep_tier(config, items, config.getoption("--tier") or ("device" if backend == "torch-npu-sim" else "usual"))
    items.sort(key=_world_size)  # stable: in a size, the order is that of the files
    neutral: dict[Path, bool] = {}
    for item in items:
        if backend != NEUTRAL and neutral.setdefault(item.path, uses_none(item.path)):
            item.add_marker(pytest.mark.skip(reason=ELSEWHERE))
        frameworks = [mark.args[0] for mark in item.iter_markers("framework")]
        if frameworks and selected not in frameworks:
            item.add_marker(pytest.mark.skip(reason=f"for {TITLES[frameworks[0]]} only"))
        for mark in item.iter_markers("not_on"):
            if unknown := set(mark.args) - set(target.TARGETS):
                raise pytest.UsageError(f"{item.nodeid}: not_on names no backend with {sorted(unknown)}")
            if backend in mark.args:
                item.add_marker(pytest.mark.skip(reason=f"not on {backend}: {mark.kwargs['reason']}"))


def pytest_collection_finish() -> None:
    """Leave what has been imported and collected out of garbage collections, a million objects; share the cores."""
    target.share_cores()
    gc.freeze()


def _keep_tier(config: pytest.Config, items: list[pytest.Item], tier: str) -> None:
    """Leave out the tests that are not of a tier. Where tests were chosen by name, nothing is left out.

    Of `device` is what the kernels of another device, its streams and its communication have a part in, each case on
    one number of ranks; the first test of each module stays, so that every feature is tried once. Of `smoke` is a case
    of each test with the mark, that on two ranks where there is one.
    """
    if tier == "all" or any("::" in argument for argument in config.args):
        return
    modules: set[Path] = set()
    smoke = _smoke(items) if tier == "smoke" else set()
    usual = {item for item in items if not item.get_closest_marker("thorough")}
    fewest = _on_fewest_ranks(usual) if tier == "device" else set()
    kept, left = [], []
    for item in items:
        stays = item in (smoke if tier == "smoke" else usual)
        if stays and tier == "device":
            stays = item.path not in modules or item in fewest and item.get_closest_marker("device") is not None
            modules.add(item.path)
        (kept if stays else left).append(item)
    if left:
        config.hook.pytest_deselected(items=left)
        config.stash[_OTHER_TIER] = len(left)
        items[:] = kept


def _smoke(items: list[pytest.Item]) -> set[pytest.Item]:
    """Choose a case of each test that is marked `smoke`."""
    chosen: dict[tuple[Path, object], pytest.Item] = {}
    for item in items:
        if item.get_closest_marker("smoke"):
            test = item.path, getattr(item, "originalname", item.name)
            if test not in chosen or _world_size(chosen[test]) != 2 == _world_size(item):
                chosen[test] = item
    return set(chosen.values())


def _on_fewest_ranks(items: set[pytest.Item]) -> set[pytest.Item]:
    """Choose each case on the fewest ranks that communicate: how many there are is nothing to a device."""
    chosen: dict[tuple[Path, str], pytest.Item] = {}
    for item in sorted(items, key=lambda item: (_world_size(item) == 1, _world_size(item))):
        chosen.setdefault((item.path, re.sub(r"\branks\d+", "ranks", item.name)), item)
    return set(chosen.values())


def _world_size(item: pytest.Item) -> int:
    """Get the number of ranks that a test of `on_ranks` runs on, 0 for others."""
    callspec = getattr(item, "callspec", None)
    ranks = callspec.params.get("ranks") if callspec is not None else None
    return ranks if isinstance(ranks, int) and hasattr(getattr(item, "obj", None), BODY) else 0


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """End the ranks of a world size once its last test is done."""
    size = _world_size(item)
    if size and (nextitem is None or _world_size(nextitem) != size):
        pool.close_pool(size)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Take over what a worker of pytest-xdist has left out; each collects the same tests."""
    if output := getattr(node, "workeroutput", {}).get(LEFT_OUT):
        other_tier, modules = output
        node.config.stash[_OTHER_TIER] = other_tier
        node.config.stash[_LEFT_OUT] = Counter({(framework, folder): count for framework, folder, count in modules})


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Tell which test modules were left out."""
    if count := config.stash[_OTHER_TIER]:
        terminalreporter.write_line(f"left out, of another tier: {count} tests (--tier all runs them)")
    for line in _left_out(config):
        terminalreporter.write_line(f"left out, {line}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Any:
    """Follow the test's own warning filters in ranks, and skip where ranks can't be had."""
    before = pool.warning_filters
    pool.warning_filters = _filters(item.config, item)
    try:
        return (yield)
    except pool.RanksSkipped as skipped:
        pytest.skip(str(skipped))
    finally:
        pool.warning_filters = before


@pytest.hookimpl(tryfirst=True)  # the file of --junitxml is written in another's
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """End all ranks; a suite that is for another framework as a whole has not failed."""
    pool.close_pools()
    config = session.config
    left_out = config.stash[_LEFT_OUT]
    if output := getattr(config, "workeroutput", None):  # a worker of pytest-xdist
        output[LEFT_OUT] = config.stash[_OTHER_TIER], [(*where, count) for where, count in left_out.items()]
    if xml := config.stash.get(xml_key, None):
        for line in _left_out(config):
            xml.add_global_property("left out", line)
    chosen = config.option.keyword or config.option.markexpr  # what selects nothing is a mistake
    if exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED and left_out and not chosen:
        session.exitstatus = pytest.ExitCode.OK


def _left_out(config: pytest.Config) -> Iterator[str]:
    left_out = config.stash[_LEFT_OUT]
    for framework in sorted({framework for framework, _ in left_out}):
        counts = {folder: count for (name, folder), count in sorted(left_out.items()) if name == framework}
        where = ", ".join(f"{count} in {folder}" for folder, count in counts.items())
        total = sum(counts.values())
        modules = "test module" if total == 1 else "test modules"
        yield f"for {TITLES[framework]} only: {total} {modules} ({where})"


def _filters(config: pytest.Config, item: pytest.Item | None = None) -> tuple[tuple[str, ...], tuple[str, ...]]:
    own = () if item is None else (text for mark in item.iter_markers("filterwarnings") for text in mark.args)
    return (*config.getini("filterwarnings"), *own), tuple(config.known_args_namespace.pythonwarnings or ())


def needed_framework(path: Path, selected: str) -> str | None:
    """Name the framework that a test module is for, None where it runs on the selected one.

    It is the one of its folder (`tests/torch/`, `tests/mindspore/`), else the one that
    `pytest.mark.framework("torch")` in its `pytestmark` says, else the one that it, or a module beside it that it
    imports, imports at the top level. Imports inside of functions don't count.

    Args:
        path: a test module.
        selected: "torch" or "mindspore".
    """
    others = [name for name in IMPORTS if name != selected]
    marks = _module_marks(path)
    for name in others:
        if path.parent.name == name or f"pytest.mark.framework({name!r})" in marks:
            return name
    imported = _top_level_imports(path, set())
    for name in others:
        own_code = any(f".{name}" in module for module in imported if module.startswith(("hp_", "hyper_parallel")))
        if own_code or any(module.split(".")[0] in IMPORTS[name] for module in imported):
            return name
    return None


def uses_none(path: Path) -> bool:
    """Tell whether a test module has to do with neither a framework nor a device: it plans, reads and writes text.

    It has no mark of a framework, and imports none, no code under a `torch/` or `mindspore/` folder, and nothing of
    hp_platform or hp_testing, through which everything else reaches a device.

    Args:
        path: a test module.
    """
    if path.parent.name in IMPORTS or "pytest.mark.framework" in _module_marks(path):
        return False
    roots = {"hp_platform", "hp_testing"}.union(*IMPORTS.values())
    imported = [module.split(".") for module in _top_level_imports(path, set())]
    return not any(parts[0] in roots or not {*parts[1:]}.isdisjoint(IMPORTS) for parts in imported)


def _module_marks(path: Path) -> str:
    for statement in ast.parse(path.read_bytes(), filename=str(path)).body:
        if isinstance(statement, ast.Assign) and [ast.unparse(name) for name in statement.targets] == ["pytestmark"]:
            return ast.unparse(statement.value)
    return ""


def _top_level_imports(path: Path, seen: set[Path]) -> set[str]:
    seen.add(path)
    imported: set[str] = set()
    for statement in ast.parse(path.read_bytes(), filename=str(path)).body:
        if isinstance(statement, ast.Import):
            imported |= {alias.name for alias in statement.names}
        elif isinstance(statement, ast.ImportFrom) and statement.module:
            imported.add(statement.module)
    for module in list(imported):
        beside = path.parent / f"{module}.py"
        if beside not in seen and beside.exists():
            imported |= _top_level_imports(beside, seen)
    return imported
