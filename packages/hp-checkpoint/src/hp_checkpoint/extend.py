"""Names that other packages of this repository may import, in addition to the public ones."""

from __future__ import annotations

from hp_checkpoint.api import read_values
from hp_checkpoint.disk.files import Chunk, Entry, Kind
from hp_checkpoint.disk.manifest import metrics_in, prune, steps_in
from hp_checkpoint.disk.storage import local_folder
from hp_checkpoint.disk.tools import Difference, diff, faults, summary
from hp_checkpoint.emergency_save import LastWords
from hp_checkpoint.errors import Ranks
from hp_checkpoint.formats.dcp_export import to_dcp
from hp_checkpoint.formats.hugging_face import TOKENIZER_FILES, Adapter, to_hugging_face
from hp_checkpoint.loading.loading import has_safetensors, load_tensors, open_checkpoint
from hp_checkpoint.saving.copies import Copies, hold

__all__ = [
    "Adapter",
    "Chunk",
    "Copies",
    "Difference",
    "Entry",
    "Kind",
    "LastWords",
    "Ranks",
    "TOKENIZER_FILES",
    "diff",
    "faults",
    "has_safetensors",
    "hold",
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
