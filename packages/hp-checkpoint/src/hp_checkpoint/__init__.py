"""Checkpoints that all ranks write in place as one Hugging Face model, and that load into any layout.

Planning, files and checksums are framework-neutral; tensors are touched in the frameworks' folders only. Nothing is
pickled.
"""

from hp_checkpoint.api import load, save
from hp_checkpoint.async_save import AsyncSaveResponse, async_save
from hp_checkpoint.background import Committed, Pending
from hp_checkpoint.checkpointer import Checkpointer, Loaded
from hp_checkpoint.errors import CheckpointError, InvalidCheckpointError
from hp_checkpoint.manifest import Manifest
from hp_checkpoint.models import load_model, save_model
from hp_checkpoint.retention import Keep

__all__ = [
    "AsyncSaveResponse",
    "CheckpointError",
    "Checkpointer",
    "Committed",
    "InvalidCheckpointError",
    "Keep",
    "Loaded",
    "Manifest",
    "Pending",
    "async_save",
    "load",
    "load_model",
    "save",
    "save_model",
]
