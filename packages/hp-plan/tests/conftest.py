"""Ranks find imported what pytest has imported: transformers is read once, and not in every rank."""

from __future__ import annotations

import contextlib
import importlib

for _family in ("llama", "mistral", "qwen3", "qwen2", "phi3", "gemma3", "gpt2", "mixtral"):
    with contextlib.suppress(ImportError):
        importlib.import_module(f"transformers.models.{_family}.modeling_{_family}")
