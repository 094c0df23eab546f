"""What copy.deepcopy and pickle take of an optimizer's states."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch


def compact(state: Mapping[Any, dict[str, Any]]) -> defaultdict[Any, dict[str, Any]]:
    """Return states with memory of their own: pickle would write all of a buffer for each view of it.

    Args:
        state: an optimizer's.
    """
    with torch.no_grad():
        return defaultdict(dict, {key: dict(zip(own, map(_own, own.values()))) for key, own in state.items()})


def _own(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value
