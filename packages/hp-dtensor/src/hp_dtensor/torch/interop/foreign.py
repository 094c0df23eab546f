"""DTensors of torch itself, which have the same name but are not interchangeable with ours."""

from __future__ import annotations

from typing import Any

import torch

_plain = (torch.Tensor, torch.nn.Parameter)


def refuse_foreign(x: Any, what: str) -> None:
    """Refuse a DTensor of torch itself, whose mesh and placements are of other types.

    Args:
        x: a value.
        what: the function to which it is passed, for the error.

    Raises:
        TypeError: ``x`` is a DTensor of torch itself.
    """
    kind = type(x)
    if kind not in _plain and kind.__name__ == "DTensor" and kind.__module__.startswith("torch.distributed."):
        raise TypeError(
            f"{what}: got torch's own DTensor ({kind.__module__}) of shape {tuple(x.shape)}, placed {x.placements};"
            " expected a plain tensor or a DTensor of hp_dtensor. Apply one library to a model. x.full_tensor() returns"
            " the global tensor; DTensor.from_local(x.to_local(), mesh, placements) of hp_dtensor adopts the local one"
        )
