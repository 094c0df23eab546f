"""An optimizer's hyperparameters: whether a checkpoint has others than the plan."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

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
