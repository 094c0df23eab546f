"""Without a compiler, or with one that fails, the core in Python is used."""

from __future__ import annotations

import logging
import shutil

import pytest

from hp_onesided import core_name
from hp_onesided.cores import library, waiting


@pytest.fixture(autouse=True)
def anew():
    caches = library.library, core_name
    for each in caches:
        each.cache_clear()
    yield
    for each in caches:
        each.cache_clear()


@pytest.mark.parametrize(
    ("compilers", "text"),
    [
        (("no-such-compiler",), "none of no-such-compiler is there"),
        (("false",), "/false -std=c++17"),
    ],
    ids=["none", "failing"],
)
def test_the_core_in_python_where_none_is_compiled(monkeypatch, tmp_path, caplog, compilers, text):
    monkeypatch.setattr(library, "COMPILERS", compilers)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with caplog.at_level(logging.INFO, logger="hp_onesided"):
        assert core_name() == ("python" if waiting.lacking() is None else None)
    (record,) = caplog.records
    assert text in record.getMessage() and "the one in Python is used" in record.getMessage()


@pytest.mark.skipif(library.library() is None, reason="needs a C++ compiler")
def test_the_core_of_a_wheel_needs_no_compiler(monkeypatch, tmp_path):
    compiler = next(filter(None, map(shutil.which, library.COMPILERS)))
    shipped = tmp_path / "core.so"
    library.compile_core(compiler, shipped, "-O0")
    monkeypatch.setattr(library, "SHIPPED", shipped)
    monkeypatch.setattr(library, "COMPILERS", ())
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert core_name() == "native" and not (tmp_path / "cache").exists()


def test_a_cache_that_can_not_be_written(monkeypatch, tmp_path):
    folder = tmp_path / "a file"
    folder.touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    assert library.library() is None


@pytest.mark.parametrize(("machine", "text"), [("x86_64", None), ("aarch64", "stores are seen out of order there")])
def test_where_the_core_in_python_works(monkeypatch, machine, text):
    monkeypatch.setattr(waiting.platform, "machine", lambda: machine)
    monkeypatch.setattr(waiting.sys, "platform", "linux")
    lacking = waiting.lacking()
    assert lacking is None if text is None else lacking is not None and text in lacking


def test_elsewhere_there_is_no_core(monkeypatch):
    monkeypatch.setattr(waiting.sys, "platform", "darwin")
    assert core_name() is None
