"""`[adapter]`: a few parameters that are trained in place of all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hp_plan.sections.bounds import at_least, more_than, within


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
