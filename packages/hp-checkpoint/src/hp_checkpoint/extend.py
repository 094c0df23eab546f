"""Names that other packages of this repository may import, in addition to the public ones."""

from __future__ import annotations

from hp_checkpoint.api import read_values
from hp_checkpoint.dcp_export import to_dcp
from hp_checkpoint.export import TOKENIZER_FILES, to_hugging_face
from hp_checkpoint.files import Chunk, Entry, Kind
from hp_checkpoint.last_words import LastWords
from hp_checkpoint.loading import load_tensors
from hp_checkpoint.models import Adapter
from hp_checkpoint.ranks import Ranks
from hp_checkpoint.retention import metrics_in, prune, steps_in
from hp_checkpoint.sources import has_safetensors, open_checkpoint
from hp_checkpoint.storage import local_folder
from hp_checkpoint.tools import Difference, diff, faults, summary

__all__ = [
    "Adapter",
    "Chunk",
    "Difference",
    "Entry",
    "Kind",
    "LastWords",
    "Ranks",
    "TOKENIZER_FILES",
    "diff",
    "faults",
    "has_safetensors",
    "load_tensors",
    "local_folder",
    "metrics_in",
    "open_checkpoint",
    "prune",
    "read_values",
    "steps_in",
    "summary",
    "to_dcp",
    "to_hugging_face",
]
