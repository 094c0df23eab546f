"""Checkpointer: the checkpoints of a training run in one folder, one for each step that was saved."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from hp_checkpoint.api import versions
from hp_checkpoint.files import Entry
from hp_checkpoint.loading import Verify, load_tensors, read_tree
from hp_checkpoint.manifest import MANIFEST, Manifest
from hp_checkpoint.models import MODEL, check_unexpected, config_texts, model_names, of_model
from hp_checkpoint.port import OptimizerState, port
from hp_checkpoint.ranks import Ranks
from hp_checkpoint.saving import save_state
from hp_checkpoint.sources import open_checkpoint
from hp_checkpoint.state import Address, decode, flatten

__all__ = ["Checkpointer", "Keep", "Loaded"]

_STEP = re.compile(r"step-(\d{8,})")
_OPTIMIZER, _OPTIONS = "optimizer", "optimizer_options"
_OTHERS = ("schedule", "data", "extra", "iteration")


@dataclass(frozen=True, slots=True, kw_only=True)
class Keep:
    """The checkpoints that stay when a new one is complete.

    Attributes:
        last: so many of the newest. Default 2.
        every: those whose step is a multiple of it as well. Default None: no others.

    Raises:
        ValueError: a number below 1.
    """

    last: int = 2
    every: int | None = None

    def __post_init__(self) -> None:
        if self.last < 1 or (self.every is not None and self.every < 1):
            raise ValueError(f"{self}: last and every must be at least 1")

    def removed(self, steps: Iterable[int]) -> list[int]:
        """Return the steps that don't stay.

        >>> Keep(last=1, every=100).removed([100, 150, 200, 250])
        [150]
        """
        ordered = sorted(steps)
        return [step for step in ordered[: -self.last] if self.every is None or step % self.every]


@dataclass(frozen=True, slots=True)
class Loaded:
    """What a checkpoint has beside model and optimizer.

    Attributes:
        step: the training step.
        folder: of the checkpoint.
        data: as it was saved, such as the number of the next sample; None without.
        extra: as it was saved; tensors are NumPy arrays.
    """

    step: int
    folder: Path
    data: Any
    extra: Any


class Checkpointer:
    """The checkpoints of a run: ``<folder>/step-00001200`` and so on, each a Hugging Face model with its optimizer.

    All ranks make it and call it together. A save is complete when it returns.

    Example:
        >>> checkpoints = Checkpointer("runs/one")
        >>> if checkpoints.steps():
        ...     step = checkpoints.load(model, optimizer, schedule=schedule).step
        >>> checkpoints.save(step, model, optimizer, schedule=schedule, data={"next_sample": step * 64})

    Args:
        folder: created by the first save.
        keep: which checkpoints stay.
        verify: "read" compares what is read with its checksums, "all" all of a checkpoint.
    """

    def __init__(self, folder: str | os.PathLike[str], *, keep: Keep | None = None, verify: Verify = "read") -> None:
        self.folder = Path(folder).absolute()
        self.keep = Keep() if keep is None else keep
        self.verify: Verify = verify

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def steps(self) -> list[int]:
        """List the steps that have a checkpoint, ascending."""
        matches = (_STEP.fullmatch(path.name) for path in self.folder.glob("step-*") if (path / MANIFEST).exists())
        return sorted(int(match[1]) for match in matches if match)

    def path(self, step: int) -> Path:
        """Return the folder of a step's checkpoint."""
        return self.folder / f"step-{step:08d}"

    def save(
        self,
        step: int,
        model: Any,
        optimizer: Any = None,
        *,
        schedule: Any = None,
        data: Any = None,
        extra: Any = None,
    ) -> Manifest:
        """Save a step; afterwards checkpoints that `keep` does not name are removed.

        Args:
            step: of the training; a checkpoint of the same step is replaced.
            model: its parameters and persistent buffers are saved, with its config if it has one.
            optimizer: one of torch's classes, or a ChainedOptimizer.
            schedule: has ``state_dict()``.
            data: JSON values: the position in the data.
            extra: JSON values, tensors and arrays.

        Raises:
            CheckpointError: it failed on some rank; on all ranks. The older checkpoints are whole.
        """
        ranks = Ranks()
        states: list[Any] = []

        def collect() -> bytes:
            if type(step) is not int or step < 0:
                raise ValueError(f"save: step must be a number from 0 on, got {step!r}")
            state: dict[str, Any] = {MODEL: port().model_state(model)}
            if optimizer is not None:
                listed = port().optimizer_states(model, optimizer)
                state[_OPTIMIZER] = {name: values for each in listed for name, values in each.states.items()}
                state[_OPTIONS] = {name: values for each in listed for name, values in each.options.items()}
            others = (
                None if schedule is None else schedule.state_dict(),
                data,
                extra,
                getattr(optimizer, "iteration", None),
            )
            state |= dict(zip(_OTHERS, others, strict=True))
            states.append(flatten(state))
            return b""

        ranks.agree(collect, "save")
        manifest = save_state(
            states[0], self.path(step), ranks, step=step, texts=config_texts(model), versions=versions()
        )
        ranks.first(self._prune, "save")
        return manifest

    def load(
        self,
        model: Any,
        optimizer: Any = None,
        *,
        schedule: Any = None,
        step: int | Literal["latest"] = "latest",
    ) -> Loaded:
        """Load a checkpoint in place, in any layout and on any number of ranks.

        States that the optimizer has not made yet are made; one that the checkpoint lacks is an error.

        Args:
            model: with memory.
            optimizer: as it was saved, of this model's parameters.
            schedule: has ``load_state_dict``.
            step: of the checkpoint; by default the newest.

        Raises:
            CheckpointError: it failed on some rank; on all ranks.
            ValueError: names, shapes or dtypes that differ from the checkpoint's.
        """
        ranks = Ranks()
        opened: list[Any] = []

        def prepare() -> bytes:
            steps = self.steps()
            if step != "latest" and step not in steps or not steps:
                has = f"it has the steps {steps[-8:]}" if steps else "it has no checkpoint"
                raise FileNotFoundError(f"load: step {step} is not in {self.folder}; {has}")
            folder = self.path(steps[-1] if step == "latest" else step)
            manifest = open_checkpoint(folder)
            opened.extend([folder, manifest, read_tree(manifest, folder)])
            return str(folder).encode()

        folders = ranks.agree(prepare, "load")
        if len(set(folders)) > 1:
            raise ValueError(f"load: the ranks find different checkpoints: {sorted({f.decode() for f in folders})}")
        folder, manifest, tree = opened
        listed = [] if optimizer is None else port().optimizer_states(model, optimizer)
        wanted: dict[Address, Any] = {}
        arrays: dict[Address, np.ndarray] = {}

        def gather_wanted() -> bytes:
            wanted.update(of_model(model))
            for states in listed:
                wanted.update(_of_optimizer(states, manifest, tree))
            arrays.update(_arrays(manifest))
            return json.dumps(sorted(model_names(model))).encode()

        names = {name for each in ranks.agree(gather_wanted, "load") for name in json.loads(each)}
        check_unexpected(names, manifest)
        load_tensors({**wanted, **arrays}, manifest, folder, ranks, verify=self.verify)
        saved = decode(tree, lambda address: arrays.get(address, wanted.get(address)))
        for states in listed:
            for name in states.options:
                states.set(name, saved[_OPTIMIZER].get(name, {}), saved[_OPTIONS][name])
        if optimizer is not None and saved["iteration"] is not None and hasattr(optimizer, "iteration"):
            optimizer.iteration = saved["iteration"]
        if schedule is not None:
            schedule.load_state_dict(saved["schedule"])
        return Loaded(manifest.step or 0, folder, saved["data"], saved["extra"])

    def _prune(self) -> bytes:
        for step in self.keep.removed(self.steps()):
            remove(self.path(step))
        return b""


def remove(folder: Path) -> None:
    """Remove a checkpoint, its manifest first, so that what is left of it is none."""
    (folder / MANIFEST).unlink(missing_ok=True)
    shutil.rmtree(folder)


def _of_optimizer(states: OptimizerState, manifest: Manifest, tree: Mapping[str, Any]) -> dict[Address, Any]:
    """Return the optimizer's tensors by address; what it has not made yet is made."""
    options, saved = tree.get(_OPTIONS), tree.get(_OPTIMIZER)
    if options is None or saved is None:
        raise ValueError("load: the checkpoint has no optimizer; load it without one to train on from its weights")
    lacking = [name for name in states.options if name not in options]
    if lacking:
        raise ValueError(
            f"load: the checkpoint's optimizer lacks {len(lacking)} of {len(states.options)} parameters:"
            f" {', '.join(map(repr, lacking[:5]))}"
        )
    entries: Mapping[str, Entry] = manifest.parts.get(_OPTIMIZER, {})
    wanted: dict[Address, Any] = {}
    for name in states.options:
        for key, value in states.states[name].items():
            if hasattr(value, "shape"):
                wanted[_OPTIMIZER, f"{name}.{key}"] = value
        for key in saved.get(name, {}):
            entry = entries.get(f"{name}.{key}")
            if entry is not None and (_OPTIMIZER, entry.name) not in wanted:
                wanted[_OPTIMIZER, entry.name] = states.make(name, key, entry.kind.dtype, entry.kind.shape)
    return wanted


def _arrays(manifest: Manifest) -> dict[Address, np.ndarray]:
    """Make arrays for the tensors of what is neither model nor optimizer."""
    names = {"BOOL": "bool", "F16": "float16", "F32": "float32", "F64": "float64", "C64": "complex64"}
    names |= {f"{sign}{bits}": f"{'u' if sign == 'U' else ''}int{bits}" for sign in "UI" for bits in (8, 16, 32, 64)}
    return {
        (part, name): np.empty(entry.kind.shape, names[entry.kind.dtype])
        for part, entries in manifest.parts.items()
        if part not in (MODEL, _OPTIMIZER)
        for name, entry in entries.items()
    }
