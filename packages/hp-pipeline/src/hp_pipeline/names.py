"""The names of a rank's part of a model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["merge_names"]


def merge_names(by_stage: Mapping[int, Mapping[str, Any]]) -> dict[str, Any]:
    """Join what is named in a rank's stages, by the whole model's names.

    Raises:
        ValueError: two stages have different things of one name.
    """
    merged: dict[str, Any] = {}
    for index, named in by_stage.items():
        for name, value in named.items():
            if merged.setdefault(name, value) is not value:
                raise ValueError(
                    f"PipelinedModel: stage {index} and one before it have different tensors of the name {name!r};"
                    " names must be those of the whole model."
                )
    return merged
