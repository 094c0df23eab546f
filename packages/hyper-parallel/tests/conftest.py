"""Ranks find imported what pytest has imported: transformers is read once, and not in every rank."""

from __future__ import annotations

import contextlib
import importlib


def pytest_collection_modifyitems() -> None:
    """Import it where tests run, which pytest-xdist's first process does not."""
    for family in ("auto", "qwen3"):
        with contextlib.suppress(ImportError):
            importlib.import_module(f"transformers.models.{family}.modeling_{family}")
