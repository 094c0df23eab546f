"""Random programs on random layouts: values and gradients of the same program on one device.

What single calls can't show: a value used in several ways (some of which vary), moves in between, parts of leaves'
gradients that meet at the end of backward. HYPER_PARALLEL_SWEEP sets how many programs are run.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from hp_dtensor import DTensor, Partial, Replicate, Shard, distribute_tensor, init_device_mesh
from hp_dtensor.torch.autograd import grad_spec
from hp_platform.testing import device_type, on_ranks

PROGRAMS = int(os.environ.get("HYPER_PARALLEL_SWEEP", "15"))
SHAPES = {"m": (4, 6), "r": (6,), "c": (4, 1), "w": (6, 6)}
"""Kinds of values: matrices, rows, columns, weights."""

Step = tuple[Callable[..., Any], tuple[int, ...]]

# what a step takes, what it gives, and how
STEPS: list[tuple[str, str, Callable[..., Any]]] = [
    ("m m", "m", torch.add),
    ("m m", "m", lambda x, y: x * y),
    ("m m", "m", lambda x, y: torch.sub(x, y, alpha=0.5)),
    ("m r", "m", lambda x, y: x * y),
    ("m r", "m", torch.add),
    ("m c", "m", lambda x, y: x * y),
    ("m c", "m", lambda x, y: x - y),
    ("m w", "m", lambda x, w: x @ w),
    ("m w", "m", F.linear),
    ("m w r", "m", F.linear),
    ("m w", "m", lambda x, w: F.linear(F.silu(F.linear(x, w)), w)),
    ("m", "m", torch.tanh),
    ("m", "m", F.relu),
    ("m", "m", lambda x: x * 0.5 + 1),
    ("m", "m", lambda x: x.softmax(-1)),
    ("m", "m", lambda x: x.softmax(0)),
    ("m r", "m", lambda x, w: F.rms_norm(x, (6,), w, 1e-5)),
    ("m r r", "m", lambda x, w, b: F.layer_norm(x, (6,), w, b)),
    ("m", "r", lambda x: x.sum(0)),
    ("m", "r", lambda x: x.mean(0)),
    ("m", "c", lambda x: x.mean(-1, keepdim=True)),
    ("m", "c", lambda x: x.pow(2).sum(1, keepdim=True)),
    ("m", "c", lambda x: x.amax(1, keepdim=True)),
    ("w", "r", lambda x: x.sum(1)),
    ("m", "w", lambda x: x.t() @ x),
    ("r r", "w", lambda x, y: torch.outer(x, y)),
    ("m", "m", lambda x: x.view(4, 2, 3).transpose(1, 2).reshape(4, 6)),
    ("m", "m", lambda x: x.view(2, 2, 6).flatten(0, 1)),
    ("m", "m", lambda x: x.t().contiguous().t()),
    ("m", "m", lambda x: torch.cat(x.chunk(2, 1)[::-1], 1)),
    ("m m", "m", lambda x, y: torch.stack([x, y]).mean(0)),
    ("m", "m", lambda x: x[[2, 0, 3, 1]]),
    ("m", "m", lambda x: x[:, None].expand(4, 2, 6)[:, 1]),
    ("m m", "m", lambda x, y: torch.where(x > 0, x, y)),
    ("m", "m", lambda x: x.cumsum(0) * 0.25),
    ("m m", "m", lambda x, y: (x * 1).mul_(0.5).add(y)),
    ("m", "m", lambda x: x.detach() + x),
    ("c", "m", lambda x: x.expand(4, 6)),
    ("w", "w", lambda x: x.t()),
    ("w w", "w", lambda x, y: (x @ y).tanh()),
    ("m m m", "m", lambda q, k, v: (q @ k.t()).softmax(-1) @ v),
    (
        "m",
        "m",
        lambda x: F.scaled_dot_product_attention(*(x.view(4, 2, 3).transpose(0, 1),) * 3).transpose(0, 1).flatten(1),
    ),
    *[("m", "m", "move"), ("m", "m", "move"), ("w", "w", "move"), ("r", "r", "move")],  # type: ignore[list-item]
]


def _program(rng: random.Random, axes: int) -> tuple[list[tuple], list[tuple], list[int]]:
    """Leaves as (kind, placements, needs a gradient), steps as (function, operands), results that enter the loss."""

    def placements(kind: str) -> list:
        return [
            rng.choice([Replicate(), Replicate(), Partial(), *map(Shard, range(len(SHAPES[kind])))])
            for _ in range(axes)
        ]

    leaves = [(kind, placements(kind), rng.random() < 0.8) for kind in "mmmrrccww"]
    values = [kind for kind, _, _ in leaves]
    steps: list[tuple] = []
    while len(steps) < 14:
        takes, gives, how = rng.choice(STEPS)
        wanted = takes.split()
        found = [[i for i, kind in enumerate(values) if kind == want] for want in wanted]
        operands = tuple(rng.choice(each[-4:] if rng.random() < 0.7 else each) for each in found)
        if how == "move":
            target = placements(gives)
            how = lambda x, t=target: x.redistribute(placements=t) if isinstance(x, DTensor) else x  # noqa: E731
        steps.append((how, operands))
        values.append(gives)
    return leaves, steps, rng.sample(range(len(leaves), len(values)), 4)


def _loss(values: list[torch.Tensor], steps: list[tuple], results: list[int]) -> torch.Tensor:
    values = list(values)
    for how, operands in steps:
        values.append(how(*(values[i] for i in operands)))
    scales = range(1, len(results) + 1)
    return sum(
        (values[i].square().mean() / s + values[i].sum() * 0.1 for i, s in zip(results, scales)), torch.tensor(0.0)
    )


def _check(seed: int, mesh: Any) -> None:
    rng = random.Random(seed)
    leaves, steps, results = _program(rng, mesh.ndim)
    gen = torch.Generator().manual_seed(seed)
    wholes = [torch.randn(SHAPES[k], generator=gen, dtype=torch.float64).to(mesh.device_type) for k, _, _ in leaves]
    plain = [whole.clone().requires_grad_(grad) for whole, (_, _, grad) in zip(wholes, leaves)]
    given = [distribute_tensor(w, mesh, p).requires_grad_(g) for w, (_, p, g) in zip(wholes, leaves)]
    expected = _loss(plain, steps, results)
    for attempt in range(2):
        what = f"program {seed} on {mesh.shape}, run {attempt + 1}"
        loss = _loss(given, steps, results)
        torch.testing.assert_close(
            loss.full_tensor(), expected.detach(), rtol=1e-10, atol=1e-10, msg=lambda m, w=what: f"{w}: {m}"
        )
        if not expected.requires_grad:
            return
        if attempt == 0:
            loss.backward()
            expected.backward()
            grads: Any = [x.grad for x in given]
        else:
            chosen = [x for x, (_, _, grad) in zip(given, leaves) if grad]
            found = iter(torch.autograd.grad(loss, chosen, allow_unused=True))
            grads = [next(found) if grad else None for _, _, grad in leaves]
        for index, (mine, grad) in enumerate(zip(plain, grads)):
            if mine.grad is None:
                assert grad is None or not grad.full_tensor().any(), f"{what}: leaf {index}"
                continue
            assert grad is not None and grad._spec is grad_spec(given[index]._spec), f"{what}: leaf {index}"
            scale = max(1.0, mine.grad.abs().max().item())
            worst = (grad.full_tensor() - mine.grad).abs().max().item() / scale
            assert worst < 1e-10, f"{what}: gradient of leaf {index}, {leaves[index][:2]}, differs by {worst}"


@on_ranks(2, 3, timeout=300.0)
@pytest.mark.parametrize("group", range(2))
def test_one_axis(group: int, ranks: int) -> None:
    mesh = init_device_mesh(device_type(), (ranks,))
    for seed in range(PROGRAMS):
        _check(1000 * group + 2 * seed + ranks % 2, mesh)


@on_ranks(4, timeout=300.0)
def test_two_axes() -> None:
    mesh = init_device_mesh(device_type(), (2, 2))
    for seed in range(PROGRAMS):
        _check(5000 + seed, mesh)
