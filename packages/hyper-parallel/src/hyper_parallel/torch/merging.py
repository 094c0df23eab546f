"""Merging an adapter into the weights of its model, by the library peft."""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import torch

from hp_checkpoint.extend import TOKENIZER_FILES
from hp_plan.torch.extend import no_progress_bars


def merge(folder: Path, target: Path, *, base: Path, dtype: str | None) -> None:
    """Write a model whose weights have an adapter in them, with its tokenizer.

    Args:
        folder: of a checkpoint with an adapter.
        target: the folder to write, which doesn't exist.
        base: the folder of the model.
        dtype: of the written weights; None is the model's.

    Raises:
        ImportError: peft or transformers isn't installed.
        ValueError: the checkpoint has files of each rank, or the model has no class of transformers.
    """
    try:
        import peft
        import transformers
    except ImportError as error:
        raise ImportError("merging an adapter needs peft and transformers: pip install peft transformers") from error
    if not (folder / "adapter_model.safetensors").is_file():
        command = f"hyper-parallel checkpoint convert {folder} TARGET"
        raise ValueError(f"{folder} has files of each rank; write them as one, and merge that: {command}")
    named = json.loads((base / "config.json").read_text(encoding="utf-8")).get("architectures") or [""]
    kind: Any = getattr(transformers, named[0], None) or transformers.AutoModelForCausalLM
    chosen = "auto" if dtype is None else getattr(torch, dtype, None)
    if not isinstance(chosen, (str, torch.dtype)):
        raise ValueError(f"--dtype {dtype}: expected a name such as bfloat16")
    with no_progress_bars(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*is_gradient_checkpointing", FutureWarning)  # which peft reads
        # It looks for the ranks of experts' parameters among modules, and then uses them.
        warnings.filterwarnings("ignore", "The following (rank|alpha)_pattern keys", RuntimeWarning)
        model = kind.from_pretrained(base, dtype=chosen, local_files_only=True)
        merged: Any = peft.PeftModel.from_pretrained(model, str(folder)).merge_and_unload(safe_merge=True)
        part = target.with_name(f".{target.name}.part")
        try:
            merged.save_pretrained(part)
            for name in TOKENIZER_FILES:
                source = next((place / name for place in (folder, base) if (place / name).is_file()), None)
                if source is not None:
                    shutil.copyfile(source, part / name)
            part.rename(target)
        finally:
            shutil.rmtree(part, ignore_errors=True)
