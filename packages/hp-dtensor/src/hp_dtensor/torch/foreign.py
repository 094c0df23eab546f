"""DTensors of torch's own, which have the name of ours and can't take its place."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["refuse_foreign"]

_plain = (torch.Tensor, torch.nn.Parameter)


def refuse_foreign(x: Any, what: str) -> None:
    """Refuses a DTensor of torch's own, whose mesh and placements are of other types.

    Args:
        x: a value.
        what: the function that it is given to, for the error.

    Raises:
        TypeError: it is one.
    """
    kind = type(x)
    if kind not in _plain and kind.__name__ == "DTensor" and kind.__module__.startswith("torch.distributed."):
        raise TypeError(
            f"{what}: a DTensor of torch's own ({kind.__module__}) of shape {tuple(x.shape)}, placed {x.placements},"
            " where a plain tensor or a DTensor of hp_dtensor belongs. Apply one library to a model; x.full_tensor() is"
            " the whole of it, plain, and DTensor.from_local(x.to_local(), mesh, placements) of hp_dtensor takes over"
            " its part"
        )
