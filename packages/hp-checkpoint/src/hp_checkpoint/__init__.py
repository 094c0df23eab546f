"""Checkpoints that all ranks write in place as one Hugging Face model, and that load into any layout.

Planning, files and checksums are framework-neutral; tensors are touched in the frameworks' folders only. Nothing is
pickled.
"""

from hp_checkpoint.api import (
    FileSystemReader,
    FileSystemWriter,
    HuggingFaceStorageReader,
    StandardLoadPlanner,
    StandardSavePlanner,
    load,
    save,
)
from hp_checkpoint.checkpointer import Checkpointer, Loaded
from hp_checkpoint.disk.manifest import Keep, Manifest
from hp_checkpoint.errors import CheckpointError, InvalidCheckpointError
from hp_checkpoint.formats.full_states import (
    convert_full_checkpoint_to_dcp,
    dcp_to_full_state_dict,
    load_checkpoint,
    parse_checkpoint_from_huggingface,
    save_checkpoint,
    save_state_dict_as_huggingface_format,
)
from hp_checkpoint.formats.hugging_face import load_model, save_model
from hp_checkpoint.formats.weight_stream import stream_weights
from hp_checkpoint.saving.background import AsyncSaveResponse, Committed, Pending, async_save

__all__ = [
    "AsyncSaveResponse",
    "CheckpointError",
    "Checkpointer",
    "Committed",
    "FileSystemReader",
    "FileSystemWriter",
    "HuggingFaceStorageReader",
    "InvalidCheckpointError",
    "Keep",
    "Loaded",
    "Manifest",
    "Pending",
    "StandardLoadPlanner",
    "StandardSavePlanner",
    "async_save",
    "convert_full_checkpoint_to_dcp",
    "dcp_to_full_state_dict",
    "load",
    "load_checkpoint",
    "load_model",
    "parse_checkpoint_from_huggingface",
    "save",
    "save_checkpoint",
    "save_model",
    "save_state_dict_as_huggingface_format",
    "stream_weights",
]
