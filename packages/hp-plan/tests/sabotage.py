"""Kinds of models that a plan may compute otherwise than one process, as changes to a small Llama.

Each kind is something that code of models does. Whether it makes a difference depends on the axis: the mean over
samples is another one on each data parallel rank, and the same on ranks of tensor parallelism.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from families import DENSE
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

Change = Callable[[Any], None]


def build(kind: str) -> nn.Module:
    """Build the model of a kind: the `[model] function` of its plan."""
    model = LlamaForCausalLM(LlamaConfig(**DENSE))
    {**KINDS, **LOSSES}[kind](model)
    return model


def _loss(reduce: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    """Put another loss in the place of the model's own: of the losses of tokens."""

    def loss(
        logits: torch.Tensor,
        labels: torch.Tensor,
        vocab_size: int,
        num_items_in_batch: Any = None,
        shift_labels: torch.Tensor | None = None,
        **others: Any,
    ) -> torch.Tensor:
        if shift_labels is None:
            shift_labels = nn.functional.pad(labels, (0, 1), value=-100)[:, 1:]
        losses = nn.functional.cross_entropy(logits.transpose(1, 2), shift_labels, reduction="none")
        return reduce(losses)

    def apply(model: Any) -> None:
        model.loss_function = loss

    return apply


LOSSES: dict[str, Change] = {
    "the loss is a sum": _loss(lambda losses: losses.sum()),
    "the loss is the largest": _loss(lambda losses: losses.amax()),
    "the loss is a mean squared": _loss(lambda losses: losses.mean() ** 2),
    "the loss is a logsumexp over samples": _loss(lambda losses: losses.mean(1).logsumexp(0)),
    "the loss is weighted by the place": _loss(
        lambda losses: (losses * torch.arange(losses.shape[1], device=losses.device)).mean()
    ),
    "the loss is a median": _loss(lambda losses: losses.flatten().median()),
}


def _outputs(change: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    """Change the output of an MLP."""

    def apply(model: Any) -> None:
        model.model.layers[1].mlp.register_forward_hook(lambda module, inputs, output: change(output))

    return apply


def _gradients(change: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    """Change the gradient of a weight, before it is reduced."""

    def apply(model: Any) -> None:
        model.model.layers[1].mlp.up_proj.weight.register_hook(change)

    return apply


def _rank() -> int:
    return dist.get_rank()


def _batch_norm(model: Any) -> None:
    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(DENSE["hidden_size"])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.norm(x.flatten(0, -2)).view(x.shape)

    model.model.layers[1].mlp = nn.Sequential(model.model.layers[1].mlp, Normed())


def _calls(model: Any) -> None:
    calls = [0]

    def scale(module: nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        calls[0] += 1
        return output * (1 + 0.01 * calls[0])

    model.model.layers[1].mlp.register_forward_hook(scale)


def _running_mean(used: bool) -> Change:
    def apply(model: Any) -> None:
        mlp = model.model.layers[1].mlp
        mlp.register_buffer("mean", torch.zeros((), dtype=torch.float64))

        def keep(module: nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
            module.mean.lerp_(output.detach().square().mean(), 0.5)
            return output + module.mean if used else output

        mlp.register_forward_hook(keep)

    return apply


def _first_call(model: Any) -> None:
    kept: list[torch.Tensor] = []

    def add(module: nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        if not kept:
            kept.append(output.detach().mean())
        return output + kept[0]

    model.model.layers[1].mlp.register_forward_hook(add)


def _skipped_by_rank(model: Any) -> None:
    model.model.layers[1].mlp.register_forward_hook(
        lambda module, inputs, output: output if _rank() % 2 == 0 else torch.zeros_like(output)
    )


def _own_generator(model: Any) -> None:
    generator = torch.Generator().manual_seed(_rank() if dist.is_initialized() else 0)
    _outputs(lambda x: x * torch.rand((), generator=generator, dtype=torch.float64))(model)


def _detached_sample(x: torch.Tensor) -> torch.Tensor:
    return torch.cat([x[:1].detach(), x[1:]])


def _detached_token(x: torch.Tensor) -> torch.Tensor:
    return torch.cat([x[:, :1].detach(), x[:, 1:]], 1)


KINDS: dict[str, Change] = {
    "nothing": lambda model: None,
    "the mean over samples is subtracted": _outputs(lambda x: x - x.mean(0)),
    "samples are rolled": _outputs(lambda x: x + 0.1 * x.roll(1, 0)),
    "samples are summed up": _outputs(lambda x: x.cumsum(0)),
    "samples attend to each other": _outputs(lambda x: torch.einsum("bsf,csf->bc", x, x).softmax(1)[:, :1, None] * x),
    "batch norm": _batch_norm,
    "scaled by the rank": _outputs(lambda x: x * (1 + 1e-6 * _rank())),
    "the rank is added": _outputs(lambda x: x + 1e-3 * _rank()),
    "an odd rank skips a layer": _skipped_by_rank,
    "scaled by the number of ranks": _outputs(lambda x: x * (x.shape[0] / 4)),
    "torch.rand": _outputs(lambda x: x * torch.rand_like(x)),
    "a generator of the rank": _own_generator,
    "numpy's random numbers": _outputs(lambda x: x * float(np.random.rand())),
    "Python's random numbers": _outputs(lambda x: x * random.random()),
    "a dropout of one's own": _outputs(lambda x: x * torch.empty_like(x).bernoulli_(0.5)),
    "the time": _outputs(lambda x: x * (time.time() % 1)),
    "the row's number": _outputs(lambda x: x * (1 + torch.arange(x.shape[0], device=x.device)[:, None, None])),
    "the number of samples": _outputs(lambda x: x * x.shape[0]),
    "the number of tokens": _outputs(lambda x: x * x.shape[1]),
    "the place in the part": _outputs(lambda x: x * (1 + torch.arange(x.shape[1], device=x.device)[:, None])),
    "the mean over tokens is subtracted": _outputs(lambda x: x - x.mean(1, keepdim=True)),
    "tokens are shifted": _outputs(lambda x: x + 0.1 * x.roll(1, 1)),
    "tokens are summed up": _outputs(lambda x: x.cumsum(1)),
    "divided by the largest": _outputs(lambda x: x / x.detach().abs().amax()),
    "divided by its norm": _outputs(lambda x: x / x.norm()),
    "a branch on the number of samples": _outputs(lambda x: x if len(x) > 2 else x * 0.5),
    "a count of calls": _calls,
    "a running mean that nobody reads": _running_mean(False),
    "a running mean that is read": _running_mean(True),
    "what the first call had": _first_call,
    "a sample is detached": _outputs(_detached_sample),
    "a token is detached": _outputs(_detached_token),
    "a gradient scaled by the rank": _gradients(lambda g: g * (1 + 1e-6 * _rank())),
    "a gradient divided by its norm": _gradients(lambda g: g / g.norm()),
    "a gradient's sign": _gradients(lambda g: g.sign()),
}
