"""`[model]`, `[compile]` and `[adapter]`: the model, and the parameters that are trained."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from hp_plan.reading.tables import at_least, more_than, within


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
class AdapterSection:
    """An adapter: two small matrices beside each of the model's, which stays as it is (PyTorch, by the library peft).

    A Linear computes `W x + alpha / rank * B A x`, of which A and B alone are trained (Hu et al., "LoRA: Low-Rank
    Adaptation of Large Language Models", 2021). Checkpoints have the adapter in peft's own format, and not the model:
    `peft.PeftModel.from_pretrained` and transformers read them where the model's folder is, and
    `hyper-parallel checkpoint merge` writes one model of both.

    In models whose experts have one parameter for all of them, `"all-linear"` also adapts these parameters and their
    router's, as peft does. Each call adds the product up with the whole parameter, which backward keeps:
    `memory.recompute` frees it.

    Attributes:
        kind: `"lora"`; none trains the model's own weights.
        rank: rows of A, and columns of B.
        alpha: a factor of what the adapter adds, which is `alpha / rank`, or `alpha / sqrt(rank)` with `rslora`.
        dropout: of the adapter's inputs.
        targets: ends of names of the Linear modules that get one, such as `"q_proj"`; or patterns of whole names, whose
            `*` stays inside a dotted part; `"all-linear"` is all but the head, with experts and
            their routers.
        modules: ends of names of modules that are trained whole beside, such as `"lm_head"`.
        rslora: divide by the root of the rank (Kalajdzievski, "A Rank Stabilization Scaling Factor for Fine-Tuning with
            LoRA", 2023).
        dtype: of the adapter's weights; none is float32, or float64 where `run.dtype` is.
        weights: a folder with an adapter in peft's format to go on from, such as a checkpoint; none draws A from
            `run.seed`, and B is 0.
    """

    kind: Literal["lora"] | None = None
    rank: int = at_least(1, 8)
    alpha: float = more_than(0.0, 16.0)
    dropout: float = within(0.0, 1.0, 0.0)
    targets: tuple[str, ...] = ("all-linear",)
    modules: tuple[str, ...] = ()
    rslora: bool = False
    dtype: Literal["float64", "float32", "bfloat16", "float16"] | None = None
    weights: str | None = None
