"""Runs under a plan against one process with torchao's own conversion: what each rank computes has the same bits."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from hp_dtensor import DTensor
from hp_plan import ParallelPlan, apply, build_model
from hp_plan.checks.precision import low_precision_layers
from hp_plan.plan import data_parallel_rows
from hp_plan.port import models
from hp_testing import device_type, on_ranks

pytest.importorskip("torchao", reason="needs torchao: nox -s low_precision")

SIZES = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2}
LLAMA = {"config": "LlamaConfig", "overrides": {**SIZES, "num_attention_heads": 4, "num_key_value_heads": 2}}
MIXTRAL = {"config": "MixtralConfig", "overrides": {**LLAMA["overrides"], "num_local_experts": 4}}
GATHERED = {"linear": "float8-tensorwise", "all_gather": "float8", "kernels": "emulated"}
WHOLE = {"linear": "float8-tensorwise", "kernels": "emulated"}
ROWS = {"linear": "float8-rowwise", "kernels": "emulated"}


CASES: dict[int, list[tuple[dict[str, int], dict[str, str], Any]]] = {
    2: [
        ({"dp_shard": 2}, GATHERED, LLAMA),
        ({"dp_shard": 2}, ROWS, LLAMA),
        ({"pp": 2}, WHOLE, LLAMA),
        ({"pp": 2}, ROWS, LLAMA),
        ({"tp": 2}, WHOLE, LLAMA),
        ({"tp": 2}, ROWS, LLAMA),
        ({"dp_shard": 2, "ep": 2}, GATHERED, MIXTRAL),
        ({"dp_shard": 2, "ep": 2}, ROWS, MIXTRAL),
    ],
    3: [({"dp_shard": 3}, GATHERED, LLAMA), ({"dp_shard": 3}, ROWS, LLAMA)],
    4: [
        ({"dp_shard": 4}, GATHERED, LLAMA),
        ({"dp_shard": 4}, ROWS, LLAMA),
        ({"dp_shard": 2, "dp_replicate": 2}, GATHERED, LLAMA),
        ({"dp_shard": 2, "pp": 2}, GATHERED, LLAMA),
    ],
}


@dataclass(frozen=True)
class Differences:
    """Of this rank from one process: numbers of losses and logits that differ, and figures over the largest number."""

    bits: int
    forward: float
    gradients: float


def figure(got: torch.Tensor, expected: torch.Tensor) -> float:
    return ((got - expected).abs().max() / expected.abs().max()).item()


def differences(mesh: dict[str, int], precision: dict[str, str], model: Any) -> Differences:
    """Compare one step. The one process multiplies each rank's samples, one micro-batch at a time.

    Gradients become a mean after backward, as on ranks, where they are cast at their full size.
    """
    data = {"sequence_length": 32, "batch_size": 12}
    plan = ParallelPlan.from_dict({"model": model, "mesh": mesh, "data": data, "precision": precision})
    reference, distributed = (build_model(plan).to(device_type()) for _ in range(2))
    convert(reference, plan)
    tokens = torch.randint(64, (12, 32), generator=torch.Generator().manual_seed(0)).to(device_type())
    ranks, pipelined = plan.mesh.data_parallel, plan.mesh.pp > 1
    own, expected = data_parallel_rows(plan), {}
    for rank, samples in enumerate(tokens.chunk(ranks)):
        outputs = [reference(part, labels=part) for part in (samples.split(1) if pipelined else [samples])]
        losses = torch.stack([each.loss for each in outputs])
        losses.mean().backward()
        if rank * len(samples) == own.start:
            expected = {"loss": losses.detach(), "logits": torch.cat([each.logits for each in outputs]).detach()}
    run: Any = apply(distributed, plan)
    if pipelined:
        losses = run.run(input_ids=tokens[own], labels=tokens[own])
        got = {"loss": torch.stack(list(losses)).detach()} if losses else {}
    else:
        output = run(tokens[own], labels=tokens[own])
        output.loss.backward()
        got = {"loss": output.loss.detach().reshape(1), "logits": output.logits.detach()}
    gradients = {name: each.grad for name, each in reference.named_parameters() if each.grad is not None}
    figures = []
    for name, parameter in run.named_parameters():
        gradient = parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad
        figures.append(figure(gradient, gradients[name] / ranks))
    bits = sum(int((value != expected[name]).sum()) for name, value in got.items())
    return Differences(bits, max([0.0, *(figure(got[name], expected[name]) for name in got)]), max(figures))


def convert(model: torch.nn.Module, plan: ParallelPlan) -> None:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    assert plan.precision.linear is not None
    names = set(low_precision_layers(plan, models().outline(model)))
    config = Float8LinearConfig.from_recipe_name(plan.precision.linear.removeprefix("float8-"))
    config = dataclasses.replace(config, emulate=True)
    convert_to_float8_training(model, config=config, module_filter_fn=lambda _, name: name in names)


def check(ranks: int) -> None:
    """Where ranks add nothing up in forward, no bit of it differs.

    Experts that get tokens of ranks, and layers over `tp`, add in another order: they differ by float32's figure, and
    where a number lies between two of eight bits, by what these differ.
    """
    for mesh, precision, model in CASES[ranks]:
        got, ordered = differences(mesh, precision, model), not {"tp", "ep"} & set(mesh)
        assert got.bits == 0 or not ordered, (mesh, precision, got)
        assert max(got.forward, got.gradients) <= (2e-6 if ordered else 2e-2), (mesh, precision, got)


@on_ranks(2)
def test_two_ranks_cast_to_the_bits_of_one_process():
    check(2)


@on_ranks(3)
def test_three_ranks_cast_to_the_bits_of_one_process():
    check(3)


@on_ranks(4)
def test_four_ranks_cast_to_the_bits_of_one_process():
    check(4)
