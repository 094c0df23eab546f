"""The pytest plugin: `--backend`, the closing of pools, and ranks that follow pytest's warning filters."""

from __future__ import annotations

import contextlib
from typing import Any, cast

import pytest

from hp_platform.testing import pool, target


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    """Add `--backend`, and select what it says at once: a conftest that is loaded next may import the framework."""
    parser.addoption(
        "--backend",
        default=target.TARGETS[0],
        choices=target.TARGETS,
        help="framework and device of the tests that run on ranks (default: %(default)s)",
    )
    config = cast(pytest.Config, pluginmanager.get_plugin("pytestconfig"))
    with contextlib.suppress(pytest.UsageError):  # pytest reports it when it parses all arguments
        known = parser.parse_known_args([str(argument) for argument in config.invocation_params.args])
        target.select(known.backend)


def pytest_configure(config: pytest.Config) -> None:
    """Take over pytest's warning filters."""
    pool.warning_filters = _filters(config)


def pytest_report_header(config: pytest.Config) -> str:
    """Tell what the ranks run on, or what is missing."""
    lacking = target.missing()
    return f"ranks: {config.getoption('--backend')}" + (f" (skipped: {lacking})" if lacking else "")


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


def pytest_sessionfinish() -> None:
    """End all ranks."""
    pool.close_pools()


def _filters(config: pytest.Config, item: pytest.Item | None = None) -> tuple[tuple[str, ...], tuple[str, ...]]:
    own = () if item is None else (text for mark in item.iter_markers("filterwarnings") for text in mark.args)
    return (*config.getini("filterwarnings"), *own), tuple(config.known_args_namespace.pythonwarnings or ())
