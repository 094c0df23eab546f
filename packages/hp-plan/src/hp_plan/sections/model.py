"""`[model]`: what is trained."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class ModelSection:
    """The model: a transformers configuration class, or a function of the user's.

    Attributes:
        config: name of a configuration class of transformers, such as `"Qwen3Config"`.
        task: what transformers builds from the configuration: a task, such as `"seq2seq-lm"`, `"masked-lm"` or
            `"image-text-to-text"`, or the name of a model class, such as `"CLIPModel"`; none means `"causal-lm"`.
        function: `"module:function"`; called with the overrides, returns an `nn.Module` whose `forward(input_ids,
            labels)`, or an `nn.Cell` whose `construct(input_ids, labels)`, returns a mapping with `loss`, as the models
            of transformers do.
        folder: where the function's module lies; none takes what Python finds, and the command line looks beside the
            plan's file as well.
        overrides: keyword arguments of either.
        weights: a safetensors file (or a folder with a model.safetensors) that the initial weights are read from, by
            name; none draws them from `run.seed`.
    """

    config: str | None = None
    task: str | None = None
    function: str | None = None
    folder: str | None = None
    overrides: Mapping[str, Any] = field(default_factory=dict)
    weights: str | None = None
