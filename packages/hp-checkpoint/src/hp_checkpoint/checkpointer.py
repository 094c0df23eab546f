"""Checkpointer: the checkpoints of a training run in one folder, one for each step that was saved."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from typing import Any, Literal

import numpy as np

from hp_checkpoint.api import versions
from hp_checkpoint.disk.files import Entry
from hp_checkpoint.disk.manifest import Keep, Manifest, prune, step_folder, steps_in
from hp_checkpoint.disk.storage import local_folder
from hp_checkpoint.errors import Ranks
from hp_checkpoint.formats.hugging_face import (
    ADAPTER,
    MODEL,
    Adapter,
    check_unexpected,
    config_texts,
    of_model,
    saved_part,
)
from hp_checkpoint.layout.state import Address, State, decode, flatten
from hp_checkpoint.layout.tensors import array_of, kind_of
from hp_checkpoint.loading.loading import Verify, checked_tensors, load_tensors, open_checkpoint, read_tree
from hp_checkpoint.port import OptimizerState, port
from hp_checkpoint.saving.arrangements import Layout, check_layout
from hp_checkpoint.saving.background import Committed, Pending, Writer
from hp_checkpoint.saving.saving import STATE, prepare_save, save_state

__all__ = ["Checkpointer", "Keep", "Loaded", "training_state"]

_OPTIMIZER, _OPTIONS = "optimizer", "optimizer_options"
_MODELS = (MODEL, ADAPTER)
_OTHERS = ("schedule", "data", "extra", "iteration")


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

    All ranks make it and call it together. A save in the background stops the training only while the state is copied:
    a writer process of each rank brings the copy to the disk. A context manager, which waits for the last save; after
    an exception the writers end it without being waited for.

    Example:
        >>> with Checkpointer("runs/one") as checkpoints:
        ...     if checkpoints.steps():
        ...         step = checkpoints.load(model, optimizer, schedule=schedule).step
        ...     checkpoints.save(step, model, optimizer, schedule=schedule, data={"next_sample": step * 64})

    Args:
        folder: created by the first save.
        keep: which checkpoints stay. Default: the last two.
        background: write beside the training. Default True; with False a save is complete when it returns.
        busy: where a save is under way when the next one starts: "wait" for it, "skip" the new one, or raise an
            "error".
        verify: "read" compares what is read with its checksums, "all" all of a checkpoint.
        layout: of the files: "auto", "files" or "shards", as for `save`. Default "auto".
        beside: further files of each checkpoint by their names, the same on all ranks, such as those of a tokenizer.
        adapter: save and load this part of the model alone, as `adapter_model.safetensors`. None is all of it.

    Raises:
        ValueError: an option that is none, or a URL in place of a folder.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        keep: Keep | None = None,
        background: bool = True,
        busy: Literal["wait", "skip", "error"] = "wait",
        verify: Verify = "read",
        layout: Layout = "auto",
        beside: Mapping[str, bytes] | None = None,
        adapter: Adapter | None = None,
    ) -> None:
        if busy not in ("wait", "skip", "error"):
            raise ValueError(f"Checkpointer: busy must be 'wait', 'skip' or 'error', got {busy!r}")
        check_layout(layout, "Checkpointer")
        if not isinstance(keep, Keep | None):
            raise TypeError(f"Checkpointer: keep must be a Keep, as Keep(last=2), got {keep!r}")
        self.folder = local_folder(folder)
        self.keep = Keep() if keep is None else keep
        self.verify: Verify = verify
        self.layout: Layout = layout
        self._beside = dict(beside or {})
        self.adapter = adapter
        self.busy = busy
        self._writer = Writer() if background else None
        self._pending: Pending | None = None
        self._closed = False

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
            return
        self._closed = True
        if self._writer is not None:  # other ranks may not come to a close: the writers end the save by themselves
            writer, self._writer, self._pending = self._writer, None, None
            writer.leave()

    def close(self) -> None:
        """Wait for a save under way and end the writer; all ranks call it together.

        Raises:
            CheckpointError: the save failed on some rank; on all ranks.
        """
        self._closed = True
        writer, self._writer = self._writer, None
        try:
            self._settle()
        finally:
            if writer is not None:
                writer.close()

    def steps(self) -> list[int]:
        """List the steps that have a complete checkpoint, ascending."""
        return steps_in(self.folder)

    def path(self, step: int) -> Path:
        """Return the folder of a step's checkpoint."""
        return step_folder(self.folder, step)

    def texts(self, model: Any) -> dict[str, bytes]:
        """Return the files of a checkpoint of the model that hold no tensors, by their names."""
        return {**self._beside, **(config_texts(model) if self.adapter is None else self.adapter.texts)}

    def save(
        self,
        step: int,
        model: Any,
        optimizer: Any = None,
        *,
        schedule: Any = None,
        data: Any = None,
        extra: Any = None,
        metric: float | None = None,
    ) -> Pending:
        """Save a step; once it is complete, checkpoints that ``keep`` does not name are removed.

        In the background, it returns when the state is copied, and the tensors may change.

        Args:
            step: of the training; a checkpoint of the same step is replaced.
            model: its parameters and persistent buffers are saved, with its config if it has one.
            optimizer: one of torch's classes, or a ChainedOptimizer.
            schedule: has ``state_dict()``.
            data: JSON values: the position in the data.
            extra: JSON values, tensors and arrays.
            metric: a number that tells how good the model is, equal on all ranks, such as its validation loss; `keep`
                compares it. NaN is worse than any other.

        Returns:
            The save under way; ``wait()`` on it, the next save and `close` raise its error.

        Raises:
            CheckpointError: it, or the save before it, failed on some rank; on all ranks. Older checkpoints are whole.
            RuntimeError: another save is under way, with ``busy="error"``, or the Checkpointer is closed.
        """
        if self._closed:
            raise RuntimeError(f"save: step {step} comes after close(); make another Checkpointer('{self.folder}')")
        ranks = Ranks()
        if self._pending is not None:
            pending = self._pending
            busy = b"1" in ranks.agree(lambda: b"0" if pending.done() else b"1", "save")
            if busy and self.busy == "skip":
                return Pending(Committed(step, None))
            if busy and self.busy == "error":
                raise RuntimeError(f"save: step {step} is to be saved while the save before it is under way")
            self._settle()
        states: list[Any] = []

        def collect() -> bytes:
            if type(step) is not int or step < 0:
                raise ValueError(f"save: step must be a number from 0 on, got {step!r}")
            _check_metric(metric, self.keep)
            own: Any = {"schedule": schedule, "data": data, "extra": extra, "adapter": self.adapter}
            states.append(training_state(model, optimizer, **own))
            for (part, name), value in states[0].tensors.items():
                if part not in (*_MODELS, _OPTIMIZER):
                    array_of(name, kind_of(name, value))  # it will have to be one
            return b""

        ranks.agree(collect, "save")
        target = self.path(step)
        options: Any = {
            "step": step,
            "metric": None if metric is None else float(metric),
            "texts": self.texts(model),
            "versions": versions(),
            "layout": self.layout,
        }
        writer = self._writer
        if writer is None:
            save_state(states[0], target, ranks, **options)
            ranks.first(lambda: self._prune(step), "save")
            return Pending(Committed(step, target))
        prepared = prepare_save(states[0], target, ranks, **options)

        def start() -> bytes:
            writer.start(prepared, ranks, self.keep)
            return b""

        try:
            ranks.agree(start, "save")
        except Exception as error:  # where it did start, rank 0's writer must not wait for the others
            writer.fail(error)
            raise
        self._pending = Pending(Committed(step, target), ranks, writer)
        return self._pending

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
        self._settle()
        ranks = Ranks()
        opened: list[Any] = []
        # A writer of a training that was killed may commit meanwhile, so one rank looks which is the newest.
        steps = json.loads(ranks.first(lambda: json.dumps(self.steps()).encode(), "load"))

        def prepare() -> bytes:
            if step != "latest" and step not in steps or not steps:
                has = f"it has the steps {steps[-8:]}" if steps else "it has no checkpoint, so start without a load"
                wanted_step = "a checkpoint" if step == "latest" else f"step {step}"
                raise FileNotFoundError(f"load: {wanted_step} is not in {self.folder}; {has}")
            folder = self.path(steps[-1] if step == "latest" else step)
            manifest = open_checkpoint(folder)
            opened.extend([folder, manifest, read_tree(manifest, folder)])
            if optimizer is not None:
                opened.extend(port().optimizer_states(model, optimizer))
            return str(folder).encode()

        folders = [folder.decode() for folder in ranks.agree(prepare, "load")]
        if len(set(folders)) > 1:
            raise ValueError(f"load: all ranks load one checkpoint, got {sorted(set(folders))}")
        folder, manifest, tree, *listed = opened
        of_optimizer: dict[Address, Any] = {}
        arrays: dict[Address, np.ndarray] = {}
        decoded: list[Any] = []

        def gather_wanted() -> bytes:
            if schedule is not None and tree.get("schedule") is None:
                raise ValueError("load: the checkpoint has no schedule; load it without one")
            decoded.append(of_model(model, to_load=True, adapter=self.adapter))
            for states in listed:
                of_optimizer.update(_of_optimizer(states, manifest, tree))
            arrays.update(_arrays(manifest))
            beside = {**of_optimizer, **arrays}  # which get their values in place
            decoded.append(decode(tree, beside.get, str(folder / STATE)))
            return json.dumps(sorted(saved_part(model, self.adapter)[1])).encode()

        names = {name for each in ranks.agree(gather_wanted, "load") for name in json.loads(each)}
        state, saved = decoded
        check_unexpected(names, manifest, MODEL if self.adapter is None else ADAPTER)
        tensors = checked_tensors(state, manifest, folder, ranks)
        load_tensors({**tensors, **of_optimizer, **arrays}, manifest, folder, ranks, verify=self.verify)

        def set_values() -> bytes:
            for states in listed:
                states.set(saved[_OPTIMIZER], saved[_OPTIONS])
            if optimizer is not None and saved["iteration"] is not None and hasattr(optimizer, "iteration"):
                optimizer.iteration = saved["iteration"]
            if schedule is not None:
                schedule.load_state_dict(saved["schedule"])
            return b""

        ranks.agree(set_values, "load")
        return Loaded(manifest.step or 0, folder, saved["data"], saved["extra"])

    def _prune(self, saved: int) -> bytes:
        prune(self.folder, self.keep, saved)
        return b""

    def _settle(self) -> None:
        """Wait for the save under way."""
        if self._pending is not None and not self._pending.settled:
            self._pending.wait()
        self._pending = None


def _check_metric(metric: Any, keep: Keep) -> None:
    if metric is None and keep.best is not None:
        raise ValueError(f"save: {keep} compares metrics; pass metric=, such as the validation loss")
    if metric is not None and (isinstance(metric, bool) or not isinstance(metric, Real)):
        raise TypeError(f"save: metric must be a number, got {metric!r}; of a tensor pass its item()")


def training_state(
    model: Any, optimizer: Any, *, schedule: Any, data: Any, extra: Any, adapter: Adapter | None = None
) -> State:
    """Return what a checkpoint of a training has; the arguments are those of `Checkpointer` and its `save`."""
    state: dict[str, Any] = dict([saved_part(model, adapter)])
    if optimizer is not None:
        listed = port().optimizer_states(model, optimizer)
        state[_OPTIMIZER] = {name: values for each in listed for name, values in each.states.items()}
        state[_OPTIONS] = {name: values for each in listed for name, values in each.options.items()}
    iteration = getattr(optimizer, "iteration", None)
    others = (None if schedule is None else schedule.state_dict(), data, extra, iteration)
    return flatten(state | dict(zip(_OTHERS, others, strict=True)))


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
    firsts: dict[int, str] = {}
    for name in states.options:
        _check_class(states.options[name], options[name])
        _check_group(firsts.setdefault(id(states.options[name]), name), name, options)
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


def _check_class(own: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    """Refuse the states of an optimizer of another class: each has numbers among its options that the other lacks.

    What one side alone has beyond the other is a newer version's, a schedule's or the program's.
    """
    beyond = [
        sorted(key for key in one.keys() - other.keys() if one[key] is not None and not isinstance(one[key], bool))
        for one, other in ((own, saved), (saved, own))
    ]
    if all(beyond):
        raise ValueError(
            f"load: the checkpoint's optimizer is of another class: it has {', '.join(beyond[1])}, and lacks"
            f" {', '.join(beyond[0])}; build the optimizer that was saved, or load the model alone"
        )


def _check_group(first: str, name: str, saved: Mapping[str, Mapping[str, Any]]) -> None:
    """Refuse to load a group whose parameters were saved with different values, of which it could have one."""
    for key, value in saved[first].items():
        other = saved[name].get(key)
        if isinstance(value, (int, float)) and isinstance(other, (int, float)) and value != other:
            raise ValueError(
                f"load: {key!r} of the optimizer was saved as {value} for {first!r} and as {other} for {name!r}, which"
                " are in one group here; group the parameters as they were saved"
            )


def _arrays(manifest: Manifest) -> dict[Address, np.ndarray]:
    """Make arrays for the tensors of what is neither model nor optimizer."""
    return {
        (part, name): array_of(name, entry.kind)
        for part, entries in manifest.parts.items()
        if part not in (*_MODELS, _OPTIMIZER)
        for name, entry in entries.items()
    }
