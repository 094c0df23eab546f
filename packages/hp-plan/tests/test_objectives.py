"""`[objective]`: losses and gradients of one process by the published formulas, on every axis."""

from __future__ import annotations

import copy
import math
import struct
import sys
import tempfile
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from hp_checkpoint.extend import Ranks
from hp_dtensor import DTensor
from hp_plan import ParallelPlan, build_model, build_optimizer, build_parallel_model, lint, verify
from hp_plan.extend import data_parallel_place
from hp_plan.features.loss import has_copy
from hp_plan.port import models
from hp_plan.structure.memory import training_bytes
from hp_plan.torch.extend import backward_loss, build_objective, evaluate
from hp_testing import device_type, on_ranks

SMALL = {
    "vocab_size": 24,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
}
SCORES = {"config": "LlamaConfig", "task": "sequence-classification"}
SCORED = {**SCORES, "overrides": {**SMALL, "num_labels": 1, "pad_token_id": 0}}
PAIRS = {"format": "preference", "batch_size": 4, "sequence_length": 8}
TEXT = {"format": "messages", "batch_size": 4, "sequence_length": 8}
LENGTHS = (8, 5, 6, 7, 4, 8, 3, 6)  # of the rows' texts, whose rest is padding


@pytest.fixture
def folder():
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


def plan_of(mesh: dict[str, int], objective: dict[str, Any], **sections: Any) -> ParallelPlan:
    tables: dict[str, Any] = {
        "model": {"config": "LlamaConfig", "overrides": SMALL},
        "mesh": mesh,
        "data": PAIRS if objective.get("kind") in ("dpo", "reward") else TEXT,
        "run": {"dtype": "float64"},
        "objective": objective,
        **({"fsdp": {"groups": ["model.layers.*"]}} if {"dp_shard", "cp"} & set(mesh) else {}),
    }
    for name, table in sections.items():
        tables[name] = table if isinstance(table, str) else {**tables.get(name, {}), **table}
    return ParallelPlan.from_dict(tables)


def write_model(folder: Path, seed: int, **overrides: Any) -> str:
    """Write a model of another seed; rank 0 does."""
    path, ranks = folder / f"model-{seed}", torch.distributed.is_initialized()
    if not ranks or torch.distributed.get_rank() == 0:
        model = {"config": "LlamaConfig", "overrides": {**SMALL, **overrides}}
        plan = ParallelPlan.from_dict({"model": model, "run": {"dtype": "float64", "seed": seed}})
        build_model(plan).save_pretrained(path)
    if ranks:
        Ranks().gather(b" ")
    return str(path)


def batch_of(step: int, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of a prompt of two tokens, an answer and padding; a loss is taken of the answer alone."""
    tokens = torch.randint(1, 24, (rows, 8), generator=torch.Generator().manual_seed(step))
    labels = tokens.clone()
    labels[:, :2] = -100
    for row, length in enumerate(LENGTHS[:rows]):
        tokens[row, length:], labels[row, length:] = 0, -100
    return tokens.to(device_type()), labels.to(device_type())


def log_probabilities(model: Any, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Of each row's answer, as a sum over its tokens."""
    logs = model(input_ids=tokens).logits.log_softmax(-1)
    result = []
    for row in range(len(tokens)):
        places = [place for place in range(1, tokens.shape[1]) if labels[row, place] != -100]
        result.append(sum(logs[row, place - 1, labels[row, place]] for place in places))
    return torch.stack(result)


def dpo(section: dict[str, Any], model: Any, reference: Any, tokens: torch.Tensor, labels: torch.Tensor):
    own, given = log_probabilities(model, tokens, labels), log_probabilities(reference, tokens, labels).detach()
    beta, losses = section.get("beta", 0.1), []
    for chosen in range(0, len(tokens), 2):
        rejected = chosen + 1
        if section.get("loss") == "ipo":
            counts = (labels != -100).sum(1)
            gain = ((own - given) / counts)[chosen] - ((own - given) / counts)[rejected]
            losses.append((gain - 1 / (2 * beta)) ** 2)
            continue
        ratio = beta * (own[chosen] - own[rejected] - (given[chosen] - given[rejected]))
        if section.get("loss") == "hinge":
            losses.append(torch.clamp(1 - ratio, min=0))
            continue
        wrong = section.get("label_smoothing", 0.0)
        losses.append(-torch.log(torch.sigmoid(ratio)) * (1 - wrong) - torch.log(torch.sigmoid(-ratio)) * wrong)
    return torch.stack(losses).mean()


def reward(section: dict[str, Any], model: Any, reference: Any, tokens: torch.Tensor, labels: torch.Tensor):
    scores = model(input_ids=tokens).logits.squeeze(-1)  # of the last token that is no padding: transformers' own
    return -torch.log(torch.sigmoid(scores[0::2] - scores[1::2])).mean()


def distill(section: dict[str, Any], model: Any, reference: Any, tokens: torch.Tensor, labels: torch.Tensor):
    heat, mix = section.get("temperature", 1.0), section.get("mix", 0.0)
    own, given = model(input_ids=tokens).logits, reference(input_ids=tokens).logits.detach()
    total, count = torch.zeros((), dtype=torch.float64, device=tokens.device), 0
    for row in range(len(tokens)):
        for place in range(1, tokens.shape[1]):
            if labels[row, place] == -100:
                continue
            p, q = (given[row, place - 1] / heat).softmax(-1), (own[row, place - 1] / heat).softmax(-1)
            total = total + (1 - mix) * heat**2 * (p * (p / q).log()).sum()
            total = total - mix * own[row, place - 1].log_softmax(-1)[labels[row, place]]
            count += 1
    return total / count


FORMULAS = {"dpo": dpo, "reward": reward, "distill": distill}


def whole(tensor: Any) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def mean_of_ranks(value: torch.Tensor) -> float:
    records = Ranks().gather(struct.pack("<d", value.item()))
    return sum(struct.unpack("<d", each)[0] for each in records) / len(records)


def check(mesh: dict[str, int], objective: dict[str, Any], **sections: Any) -> None:
    """Three steps of AdamW, the loss and each gradient compared with those of the formula in one process."""
    plan, single = plan_of(mesh, objective, **sections), plan_of({}, objective, **sections)
    alone: Any = build_model(single).to(device_type())
    reference = copy.deepcopy(alone)
    if "reference" in objective:
        given = ParallelPlan.from_dict({"model": {"path": objective["reference"]}, "run": {"dtype": "float64"}})
        reference = build_model(given).to(device_type())
    model, own = build_parallel_model(plan), build_objective(plan)
    assert own is not None
    names = dict(alone.named_parameters())
    optimizers = [build_optimizer(single, list(names.items())), build_optimizer(plan, list(model.named_parameters()))]
    parts, place, rows = plan.mesh.data_parallel, data_parallel_place(plan), 4 * plan.data.width
    part = slice(place * rows // parts, (place + 1) * rows // parts)
    for step in range(3):
        tokens, labels = batch_of(step, rows)
        expected = FORMULAS[str(objective["kind"])](objective, alone, reference, tokens, labels)
        expected.backward()
        loss = backward_loss(plan, model, tokens[part], labels=labels[part], objective=own)
        assert loss is not None
        assert mean_of_ranks(loss) == pytest.approx(expected.item(), rel=1e-12)
        for name, parameter in model.named_parameters():
            gradient = names[name].grad
            if gradient is None:
                assert parameter.grad is None
                continue
            torch.testing.assert_close(whole(parameter.grad), gradient, atol=1e-12, rtol=1e-9, msg=name)
        values, count = evaluate(plan, model, tokens[part], labels=labels[part], objective=own)
        assert mean_of_ranks(values[0]) == pytest.approx(expected.item(), rel=1e-12)
        items = rows // 2 if own.pairs else int((labels[:, 1:] != -100).sum())
        assert count.item() * parts == pytest.approx(items)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


MESHES = {"fsdp": {"dp_shard": 2}, "tp": {"tp": 2}, "hsdp": {"dp_replicate": 2}, "cp": {"cp": 2}}


@on_ranks(2)
@pytest.mark.parametrize("mesh", list(MESHES))
def test_preferences_of_two_answers(mesh: str):
    check(MESHES[mesh], {"kind": "dpo"})


@on_ranks(2)
@pytest.mark.parametrize(
    "options", [{"loss": "ipo", "beta": 0.3}, {"loss": "hinge", "beta": 2.0}, {"label_smoothing": 0.2}]
)
def test_other_losses_of_preferences(options: dict[str, Any]):
    check({"dp_shard": 2}, {"kind": "dpo", **options})


@on_ranks(2)
def test_a_reference_in_a_folder_and_micro_batches(folder: Path):
    objective = {"kind": "dpo", "reference": write_model(folder, 7)}
    check(
        {"dp_shard": 2}, objective, run={"dtype": "float64", "accumulate": 2}, memory={"recompute": ["model.layers.*"]}
    )


@on_ranks(2)
@pytest.mark.parametrize("mesh", ["fsdp", "tp", "hsdp"])
def test_scores_of_answers(mesh: str):
    check(MESHES[mesh], {"kind": "reward"}, model=SCORED)


@on_ranks(2)
@pytest.mark.parametrize("mesh", list(MESHES))
def test_a_smaller_model_learns_from_a_larger_one(mesh: str, folder: Path):
    objective = {"kind": "distill", "reference": write_model(folder, 7, num_hidden_layers=3), "temperature": 2.0}
    check(MESHES[mesh], {**objective, "mix": 0.25})


@on_ranks(4)
def test_two_axes_and_a_scattered_sequence():
    check({"dp_shard": 2, "tp": 2}, {"kind": "dpo"}, styles="auto-sequence")


@on_ranks(2)
@pytest.mark.parametrize("mesh", ["fsdp", "tp"])
def test_the_reference_of_an_adapter_is_the_model_without_it(folder: Path, mesh: str):
    """The first loss is that of two equal models, and the gradients are those that `verify` finds in one process."""
    base = {"path": write_model(folder, 3)}
    plan = plan_of(MESHES[mesh], {"kind": "dpo"}, adapter={"kind": "lora", "rank": 2})
    plan = ParallelPlan.from_dict({**plan.to_dict(), "model": base})
    model, own = build_parallel_model(plan), build_objective(plan)
    tokens, labels = batch_of(0, 8)
    rows = 8 // plan.mesh.data_parallel
    part = slice(data_parallel_place(plan) * rows, (data_parallel_place(plan) + 1) * rows)
    loss = backward_loss(plan, model, tokens[part], labels=labels[part], objective=own)
    assert loss is not None and loss.item() == pytest.approx(math.log(2))
    assert all(p.requires_grad == (p.grad is not None) for p in model.parameters())
    result = verify(plan)
    assert result.passed, result


@on_ranks(2)
@pytest.mark.parametrize("kind", ["dpo", "reward", "distill", "function"])
def test_verify_knows_objectives(kind: str, folder: Path):
    objective: dict[str, Any] = {"kind": kind}
    if kind == "distill":
        objective["reference"] = write_model(folder, 7)
    if kind == "function":
        objective = {"function": own_module()}
    model = SCORED if kind == "reward" else {}
    result = verify(plan_of({"tp": 2}, objective, model=model))
    assert result.passed, result


def own_module() -> str:
    """Make a module with a loss of one's own: that of a causal language model, as a sum, and a penalty."""
    module: Any = types.ModuleType("own_objective")

    def loss(model: Any, batch: dict[str, Any]) -> Any:
        logits, targets = model(input_ids=batch["input_ids"]).logits[:, :-1], batch["labels"][:, 1:]
        total = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
        return total + 1e-3 * (logits.logsumexp(-1)[targets != -100] ** 2).sum()

    module.loss = loss
    sys.modules["own_objective"] = module
    return "own_objective:loss"


@on_ranks(2)
def test_a_function_of_ones_own_is_divided_by_the_labels_of_all_ranks():
    plan = plan_of({"dp_shard": 2}, {"function": own_module()})
    alone = build_model(plan_of({}, {"function": own_module()})).to(device_type())
    model, own = build_parallel_model(plan), build_objective(plan)
    tokens, labels = batch_of(0, 4)
    total = sys.modules["own_objective"].loss(alone, {"input_ids": tokens, "labels": labels})
    (total / (labels[:, 1:] != -100).sum()).backward()
    part = slice(data_parallel_place(plan) * 2, data_parallel_place(plan) * 2 + 2)
    backward_loss(plan, model, tokens[part], labels=labels[part], objective=own)
    for (name, parameter), single in zip(model.named_parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(whole(parameter.grad), single.grad, atol=1e-12, rtol=1e-9, msg=name)


def texts(plan: ParallelPlan) -> str:
    return "\n".join(f"{each.key}: {each.message}; {each.fix}" for each in lint(plan))


@pytest.mark.parametrize(
    ("mesh", "objective", "sections", "expected"),
    [
        ({"pp": 2}, {"kind": "dpo"}, {}, "objective.kind: 'dpo' takes a whole model's logits, which the last stage"),
        (
            {"cp": 2},
            {"kind": "reward"},
            {"model": SCORED},
            "mesh.cp: cp = 2, but LlamaForSequenceClassification has no",
        ),
        ({}, {"kind": "dpo"}, {"data": TEXT}, "'dpo' compares two answers, but data.format is 'messages'"),
        ({}, {}, {"data": PAIRS}, "data.format: got 'preference', but the objective 'causal-lm' does not compare"),
        ({}, {"kind": "distill"}, {}, "objective.reference: there is no teacher; give the folder of a model"),
        ({}, {"kind": "distill", "reference": "nowhere"}, {}, "objective.reference: the folder nowhere does not exist"),
        ({}, {"kind": "reward"}, {}, "model.task: LlamaForCausalLM does not score a text by one number"),
        ({}, {"kind": "dpo"}, {"model": SCORED}, "'dpo' takes predictions of tokens, and LlamaForSequenceClass"),
        ({}, {"kind": "dpo"}, {"data": {**PAIRS, "packing": True}}, "the two answers of a pair are rows of their own"),
        ({}, {"kind": "reward", "beta": 0.2}, {"model": SCORED}, "got 0.2, which kind = 'reward' does not use"),
        ({}, {"kind": "dpo", "loss": "ipo", "label_smoothing": 0.1}, {}, "which loss = 'ipo' does not use"),
        ({}, {"function": "nothing_here:loss"}, {}, "objective.function: can't import 'nothing_here'"),
        ({}, {"function": "math:sqrt", "kind": "dpo"}, {}, "got a function beside kind = 'dpo'"),
    ],
)
def test_lint(mesh: dict[str, int], objective: dict[str, Any], sections: dict[str, Any], expected: str):
    assert expected in texts(plan_of(mesh, objective, **sections))


def test_a_reward_needs_a_token_for_padding_and_no_other_loss():
    model = {**SCORES, "overrides": {**SMALL, "num_labels": 1, "pad_token_id": None}}
    assert "write pad_token_id = 0" in texts(plan_of({}, {"kind": "reward"}, model=model))
    moe = {"config": "MixtralConfig", "overrides": {**SMALL, "output_router_logits": True}}
    assert "which is not the objective's" in texts(plan_of({}, {"kind": "dpo"}, model=moe))


def test_a_second_copy_takes_memory_and_an_adapters_reference_none():
    plans = {kind: plan_of({}, {"kind": kind} if kind == "dpo" else {}, data=PAIRS) for kind in ("dpo", "causal-lm")}
    outline = models().outline(build_model(plans["dpo"], device="meta"))
    more = training_bytes(plans["dpo"], outline) - training_bytes(plans["causal-lm"], outline)
    assert more == 8 * outline.elements
    adapted = plan_of({}, {"kind": "dpo"}, adapter={"kind": "lora"})
    assert not has_copy(adapted) and has_copy(plans["dpo"])


def test_a_function_that_returns_no_sum_is_named():
    sys.modules["own_mean"] = module = types.ModuleType("own_mean")
    module.loss = lambda model, batch: model(input_ids=batch["input_ids"]).logits.mean(-1)  # type: ignore[attr-defined]
    plan = plan_of({}, {"function": "own_mean:loss"})
    tokens, labels = batch_of(0, 4)
    objective = build_objective(plan)
    assert objective is not None
    with pytest.raises(TypeError, match=r"own_mean:loss returned a tensor of shape \(4, 8\), expected the sum"):
        objective(build_model(plan), {"input_ids": tokens.cpu(), "labels": labels.cpu()})
