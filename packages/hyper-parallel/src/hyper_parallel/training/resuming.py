"""Going on from a checkpoint or a copy: position in the data, hyperparameters, and lines of steps that come again."""

from __future__ import annotations

import json
import math
import shutil
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hp_checkpoint import CheckpointError, InvalidCheckpointError
from hp_checkpoint.extend import open_checkpoint, read_values, steps_in
from hp_plan import ParallelPlan
from hyper_parallel.data import Content, DataError, contents
from hyper_parallel.data.tokenization.tokenized import token_files
from hyper_parallel.reports.output import CHECKPOINTS, replace_text, weights_option

_DIGEST = "digest of the data"
_BEFORE = {"data.shuffle": True}  # of checkpoints that were written before a plan could say so


def order(plan: ParallelPlan, data: Sequence[Content]) -> dict[str, Any]:
    """Return what decides which sample a number is.

    Args:
        plan: of the run.
        data: what the training data holds.
    """
    return {
        "run.seed": plan.run.seed,
        "data.sequence_length": plan.data.sequence_length,
        "data.packing": plan.data.packing,
        "data.weights": list(plan.data.weights),
        "data.shuffle": plan.data.shuffle,
        **({} if plan.data.format == "text" else {"data.truncation": plan.data.truncation}),
        _DIGEST: [content.digest for content in data],
    }


def next_sample(own: Mapping[str, Any], saved: Any, folder: Path, *, new_data: bool = False) -> int:
    """Return the number of the sample with which a run goes on.

    Args:
        own: of the plan: what `order` returns, or a part of it.
        saved: the data's position in a checkpoint.
        folder: of the checkpoint.
        new_data: samples may be numbered anew; then the first one is next.

    Raises:
        DataError: samples are numbered anew and may not be, or the checkpoint has no position.
    """
    if not isinstance(saved, Mapping) or "sample" not in saved:
        fix = f"go on in a folder of checkpoints of `train`, or start a run with {weights_option(folder)}"
        raise DataError(f"{folder} has no position in the data, so no run can go on from it", fix)
    saved = {**_BEFORE, **saved}
    changed = [name for name in own if saved.get(name) != own[name]]
    if changed and not new_data:
        texts = "; ".join(f"{name} was {saved.get(name)} and is {own[name]}" for name in changed)
        message = f"{folder} can't go on with its data, whose samples are numbered anew: {texts}"
        fix = (
            "set it back, go on at the first sample with the optimizer's states by --resume new-data, or start a run"
            f" elsewhere with {weights_option(folder)}"
        )
        raise DataError(message, fix)
    return 0 if changed else int(saved["sample"])


def check_resume(plan: ParallelPlan, folder: Path, *, new_data: bool = False) -> None:
    """Check, before a rank starts, that the data lets a run go on from its newest checkpoint that can be read.

    The ranks check it again on what they read. Text that would be tokenized anew is described by them alone.

    Args:
        plan: the plan.
        folder: of the run; one without a checkpoint starts.
        new_data: as of `next_sample`.

    Raises:
        DataError: as `next_sample`, or the data can't be read.
    """
    for step in reversed(steps_in(folder / CHECKPOINTS)):
        place = folder.absolute() / CHECKPOINTS / f"step-{step:08d}"
        try:
            values = read_values(open_checkpoint(place), place, lambda address: None)
        except (CheckpointError, InvalidCheckpointError, FileNotFoundError):
            continue  # the ranks tell, and pass it over
        section = token_files(plan, folder)
        own = order(plan, () if section is None else contents(section))
        if section is None:
            del own[_DIGEST]
        next_sample(own, values.get("data") if isinstance(values, Mapping) else None, place, new_data=new_data)
        return


# A schedule changes lr; what it starts from is initial_lr.
_LEFT_OUT = ("params", "param_names", "lr")
_KEYS = {"initial_lr": "lr"}

Values = list[dict[str, list[float]]]


def hyperparameters(optimizer: Any) -> Values:
    """Return the numbers of each group of an optimizer's parameters, each as a list."""
    return [
        {key: numbers for key, value in group.items() if key not in _LEFT_OUT and (numbers := _numbers(value))}
        for group in optimizer.param_groups
    ]


def changes(before: Values, after: Values) -> list[str]:
    """Say which hyperparameters have changed, one text each.

    Args:
        before: those of the plan.
        after: those that the same optimizer has now.
    """
    found = (
        (_KEYS.get(key, key), _shown(old[key]), _shown(new))
        for old, now in zip(before, after, strict=True)
        for key, new in now.items()
        # MindSpore keeps learning rates in float32.
        if key in old and not all(map(_near, old[key], new))
    )
    return list(dict.fromkeys(f"{key} was {new} and is {old}" for key, old, new in found))


def _near(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=1e-6)


def _numbers(value: Any) -> list[float]:
    """Return a number, or several, as a list; an empty one of anything else."""
    return list(_each(value)) if isinstance(value, (list, tuple)) else list(_each([value]))


def _each(values: Sequence[Any]) -> Iterator[float]:
    for value in values:
        if isinstance(value, (bool, str)) or value is None:
            continue
        try:
            yield float(value)
        except (TypeError, ValueError):
            continue


def _shown(numbers: Sequence[float]) -> str:
    return ", ".join(f"{number:g}" for number in numbers)


def check_held(held: Sequence[Collection[int]], every: int) -> None:
    """Check that a run whose ranks have no step in common, and no checkpoint, has only begun.

    Args:
        held: the steps that each rank has a copy of.
        every: how often they are kept.

    Raises:
        CheckpointError: steps were done that can't be restored.
    """
    if max(map(max, filter(None, held))) <= every:  # a fault in the first copy: nothing has been lost
        return
    texts = (f"rank {rank} of {sorted(steps) or 'none'}" for rank, steps in enumerate(held))
    raise CheckpointError(
        f"no step can be restored: the ranks have whole copies of no step together ({', '.join(texts)}), and there is"
        " no checkpoint. Save some: run.checkpoint_every"
    )


def set_aside(folder: Path, newest: int) -> bytes:
    """Rename the checkpoints of steps after one, so that no run goes on from them; return nothing."""
    doubted = [step for step in steps_in(folder) if step > newest]
    for step in doubted:
        aside = folder / f"doubted-step-{step:08d}"
        shutil.rmtree(aside, ignore_errors=True)  # of the same step, from an earlier time
        (folder / f"step-{step:08d}").rename(aside)
    if doubted:
        steps = ", ".join(map(str, doubted))
        text = f"checkpoints of steps {steps} may hold wrong numbers: they are {folder}/doubted-step-* now, and unused"
        warnings.warn(text, RuntimeWarning, stacklevel=2)
    return b""


def keep_lines(path: Path, steps: int) -> list[dict[str, Any]]:
    """Keep the lines of the first steps in a file of JSON lines, as later steps are taken again; return their values.

    Args:
        path: of `metrics.jsonl` or `texts.jsonl`, which may be missing.
        steps: how many are done.
    """
    if not path.exists():
        return []
    # A process that was killed while it wrote has left a line without its end, maybe cut inside of a letter.
    *whole, _ = path.read_text(encoding="utf-8", errors="replace").split("\n")
    values = {line: json.loads(line) for line in whole if line}
    kept = [line for line in whole if line and values[line]["step"] <= steps]
    replace_text(path, "".join(f"{line}\n" for line in kept))
    return [values[line] for line in kept]
