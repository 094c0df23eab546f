"""`[model]`: what is trained."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

# ---- [compile] ----


@dataclass(frozen=True)
class CompileSection:
    """Blocks that torch compiles, each into one graph or not at all (`torch.compile(fullgraph=True)`).

    Attributes:
        blocks: patterns of modules, such as `"model.layers.*"`; none compiles nothing.
        backend: of torch.compile.
    """

    blocks: tuple[str, ...] = ()
    backend: str = "inductor"


@dataclass(frozen=True)
class ModelSection:
    """The model: a transformers configuration class, a folder of a model, or a function of the user's.

    Attributes:
        config: name of a configuration class of transformers, such as `"Qwen3Config"`.
        path: a folder that transformers wrote: `config.json`, and weights in safetensors. Nothing is downloaded. The
            command line looks beside the plan's file first.
        task: what transformers builds from the configuration: a task, such as `"seq2seq-lm"`, `"masked-lm"` or
            `"image-text-to-text"`, or the name of a model class, such as `"CLIPModel"`; none means the class that a
            folder's `config.json` names, else `"causal-lm"`.
        function: `"module:function"`; called with the overrides, returns an `nn.Module` whose `forward(input_ids,
            labels)`, or an `nn.Cell` whose `construct(input_ids, labels)`, returns a mapping with `loss`, as the models
            of transformers do.
        folder: where the function's module lies; none takes what Python finds, and the command line looks beside the
            plan's file as well.
        overrides: keyword arguments of the configuration class or the function; in place of a folder's settings.
        weights: a safetensors file (or a folder with a model.safetensors) that the initial weights are read from, by
            name, or `"random"`, which draws them from `run.seed`; none takes those in `path`, and else draws them.
        freeze: patterns of names of parameters, or of modules with all of theirs, that are not trained; `*` stays
            inside a dotted part.
    """

    config: str | None = None
    path: str | None = None
    task: str | None = None
    function: str | None = None
    folder: str | None = None
    overrides: Mapping[str, Any] = field(default_factory=dict)
    weights: str | None = None
    freeze: tuple[str, ...] = ()

    @property
    def of_transformers(self) -> bool:
        """True for a model of transformers, False for one that a function returns."""
        return self.function is None

    @property
    def weights_file(self) -> str | None:
        """The safetensors file to read the initial weights from; None where there is none, or `path` has them."""
        return None if self.weights == "random" else self.weights

    @property
    def folder_has_weights(self) -> bool:
        """True if the initial weights are those in `path`."""
        return self.path is not None and self.weights is None
