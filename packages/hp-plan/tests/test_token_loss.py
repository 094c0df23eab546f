"""A loss over tokens: each label counts once, wherever it is, as if documents were computed one at a time."""

from __future__ import annotations

import pytest
import torch
from test_packing import SMALL, plan_of, samples
from torch import nn
from torch.nn.functional import cross_entropy

from hp_dtensor import DTensor
from hp_plan import ParallelPlan, apply, build_model, build_optimizer, lint, verify
from hp_plan.checks.checks import check_plan
from hp_plan.extend import data_parallel_rows
from hp_plan.torch.compared import Float64
from hp_plan.torch.extend import backward_loss, clip_gradients, evaluate
from hp_platform import get_platform, manual_seed
from hp_testing import device_type, on_ranks, run_ranks

pytestmark = pytest.mark.framework("torch")
SHARDED = {"fsdp": {"groups": ["model.layers.*"]}}


def batch(kind):
    """Tokens, labels and positions of four samples, and each document alone with its labels."""
    tokens, labels, positions, documents = samples()
    if kind == "packed":
        return tokens, labels, positions, [(document, document) for document in documents]
    masked = tokens.copy()
    for row, left_out in enumerate((2, 14, 9, 16)):  # questions before answers; the last sample is none
        masked[row, :left_out] = -100
    return tokens, masked, None, list(zip(tokens, masked, strict=True))


def one_at_a_time(model, documents):
    """The loss over each document alone, each label counted once, with its gradients."""
    count = sum(int((labels[1:] != -100).sum()) for _, labels in documents)
    total = 0.0
    for tokens, labels in documents:
        if len(tokens) > 1 and (labels[1:] != -100).any():
            tokens, labels = (torch.from_numpy(each).to(device_type()) for each in (tokens, labels))
            logits = model(input_ids=tokens[None], use_cache=False).logits
            loss = cross_entropy(logits[0, :-1], labels[1:], reduction="sum") / count
            loss.backward()
            total += loss.item()
    return total


def assert_equals_one_at_a_time(plan, kind, build=build_model):
    tokens, labels, positions, documents = batch(kind)
    with Float64():
        single = build(plan)
        expected = one_at_a_time(single.to(device_type()), documents)
        model = apply(build(plan).to(device_type()), plan)
        rows = data_parallel_rows(plan)
        arrays = {"tokens": tokens, "labels": labels, "positions": positions}
        own = {
            name: torch.from_numpy(each[rows]).to(device_type()) for name, each in arrays.items() if each is not None
        }
        loss = backward_loss(plan, model, **own)
    mean = torch.tensor([loss or 0.0, loss is not None], dtype=torch.float64, device=device_type())
    get_platform().collectives.all_reduce(mean, group=get_platform().groups.default_group())
    assert (mean[0] / mean[1]).item() == pytest.approx(expected, rel=1e-12)
    wanted = dict(single.named_parameters())
    for name, got in model.named_parameters():
        gradient = got.grad.full_tensor() if isinstance(got.grad, DTensor) else got.grad
        torch.testing.assert_close(gradient, wanted[name].grad, rtol=1e-10, atol=1e-12, msg=name)


@on_ranks(2)
@pytest.mark.parametrize("kind", ["packed", "masked"])
@pytest.mark.parametrize(
    "sections",
    [
        {"mesh": {"dp_shard": 2}, **SHARDED},
        {"mesh": {"dp_shard": 2}, **SHARDED, "run": {"accumulate": 2}},
        {"mesh": {"dp_shard": 2}, **SHARDED, "run": {"accumulate": 2, "deterministic": True}},
        {"mesh": {"tp": 2}, "run": {"accumulate": 4}},
        {"mesh": {"cp": 2}, **SHARDED, "run": {"accumulate": 2}},
        {"mesh": {"pp": 2}, "pipeline": {"micro_batches": 4}},
    ],
    ids=["dp", "accumulated", "deterministic", "tp", "cp", "pp"],
)
def test_the_step_is_that_of_one_sample_at_a_time(sections, kind):
    sections = {**sections, "run": {"dtype": "float64", **sections.get("run", {})}}
    assert_equals_one_at_a_time(ParallelPlan.from_dict(plan_of(**sections)), kind)


@on_ranks(4)
@pytest.mark.parametrize("mesh", [{"dp_shard": 2, "cp": 2}, {"dp_shard": 2, "pp": 2}], ids=["cp", "pp"])
def test_labels_are_counted_over_two_axes(mesh):
    run = {"dtype": "float64", "accumulate": 1 if "pp" in mesh else 2}
    assert_equals_one_at_a_time(ParallelPlan.from_dict(plan_of(mesh=mesh, **SHARDED, run=run)), "packed")


@on_ranks(2)
def test_verify_covers_micro_batches_of_packed_samples():
    sections = {"mesh": {"dp_shard": 2}, **SHARDED, "run": {"accumulate": 2, "grad_clip": 0.1}}
    result = verify(ParallelPlan.from_dict(plan_of(**sections)), tolerance=1e-10)
    assert result.passed, (result.first, result.largest)


@on_ranks(2)
def test_an_evaluation_counts_the_labels_that_are_predicted():
    plan = ParallelPlan.from_dict(plan_of(mesh={"dp_shard": 2}, **SHARDED, run={"dtype": "float64"}))
    tokens, labels, _, documents = batch("masked")
    labels[0, 0], rows = tokens[0, 0], data_parallel_rows(plan)  # nothing predicts a first token
    with Float64():
        expected = one_at_a_time(build_model(plan).to(device_type()), documents)
        model = apply(build_model(plan).to(device_type()), plan)
        own = [torch.from_numpy(each[rows]).to(device_type()) for each in (tokens, labels)]
        loss, count = evaluate(plan, model, own[0], labels=own[1])
    assert count.item() * 2 == (labels[:, 1:] != -100).sum()
    get_platform().collectives.all_reduce(loss, group=get_platform().groups.default_group())
    assert loss.item() / 2 == pytest.approx(expected, rel=1e-12)


@on_ranks(2)
def test_an_evaluation_without_labels_counts_nothing():
    plan = ParallelPlan.from_dict(plan_of(mesh={"dp_shard": 2}, **SHARDED, run={"dtype": "float64"}))
    rows = data_parallel_rows(plan)
    with Float64():
        model = apply(build_model(plan).to(device_type()), plan)
        tokens = torch.from_numpy(batch("masked")[0][rows]).to(device_type())
        loss, count = evaluate(plan, model, tokens, labels=torch.full_like(tokens, -100))
    assert (loss.item(), count.item()) == (0.0, 0.0)


class Means(nn.Module):
    """A model of the user's own, which takes the mean over the labels that count."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(64, 8), nn.Linear(8, 64)

    def forward(self, input_ids, labels=None, **_):
        logits = self.head(self.embed(input_ids))
        loss = None if labels is None else cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return {"loss": loss, "logits": logits}


def means():
    return Means()


def means_plan(**run):
    model = {"model": {"function": f"{__name__}:means"}, "run": {"dtype": "float64", **run}}
    sections = {"mesh": {"dp_shard": 2}, "fsdp": {"groups": [""]}, "data": {"batch_size": 4}}
    return ParallelPlan.from_dict({**sections, **model})


@on_ranks(2)
def test_means_of_ones_own_model_are_weighted_by_their_labels():
    plan = means_plan()
    tokens, labels, *_ = batch("masked")
    tokens, labels = torch.from_numpy(tokens), torch.from_numpy(labels)
    single, model = build_model(plan), apply(build_model(plan), plan)
    single(tokens, labels)["loss"].backward()
    rows = data_parallel_rows(plan)
    backward_loss(plan, model, tokens[rows], labels=labels[rows])
    for got, wanted in zip(model.parameters(), single.parameters(), strict=True):
        torch.testing.assert_close(got.grad.full_tensor(), wanted.grad, rtol=1e-10, atol=1e-12)
    with pytest.raises(
        ValueError, match="a micro-batch of rank 1 has no label but -100, over which Means takes a mean"
    ):
        plan = means_plan(accumulate=2)
        backward_loss(plan, model, tokens[rows], labels=labels[rows])


@on_ranks(2)
def test_labels_left_out_are_refused_where_a_loss_is_not_known_to_count_them():
    overrides = {name: size for name, size in SMALL.items() if name != "num_key_value_heads"}
    model = {"config": "BertConfig", "task": "masked-lm", "overrides": overrides}
    sections = {"mesh": {"dp_shard": 2}, "fsdp": {"groups": [""]}, "data": {"sequence_length": 16}}
    plan = ParallelPlan.from_dict({"model": model, **sections})
    model = apply(build_model(plan), plan)
    tokens = torch.from_numpy(batch("masked")[0])[:2]
    labels = tokens.clone()
    assert backward_loss(plan, model, tokens, labels=labels) > 0
    if get_platform().groups.rank() == 1:
        labels[0, 3] = -100
    with pytest.raises(ValueError, match="labels of -100 with BertForMaskedLM, whose loss is not known"):
        backward_loss(plan, model, tokens, labels=labels)


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        (
            {"run": {"accumulate": 3}},
            "run.accumulate: 4 samples do not divide into 3 micro-batches; make it one of 1, 2, 4",
        ),
        ({"mesh": {"pp": 2}, "run": {"accumulate": 2}}, "run.accumulate: got 2 with mesh.pp = 2, whose stages run"),
        (
            {"config": "MixtralConfig", "overrides": {"output_router_logits": True}, "run": {"accumulate": 2}},
            "run.accumulate: got 2, but output_router_logits adds a load balancing loss, which is no mean",
        ),
    ],
)
def test_micro_batches_that_can_not_be_are_refused(sections, expected):
    texts = [str(diagnostic) for diagnostic in lint(plan_of(**sections))]
    assert any(text.startswith(expected) for text in texts), texts


def weights_after(shards, replicas, accumulate):
    """The bytes of the weights after two steps with dropout, on so many ranks."""
    model = {"config": "LlamaConfig", "overrides": {**SMALL, "attention_dropout": 0.25}}
    axes = {"dp_shard": shards, "dp_replicate": replicas}
    run = {"accumulate": accumulate, "deterministic": True, "grad_clip": 0.1}
    data = {"batch_size": 12, "sequence_length": 16}
    plan = ParallelPlan.from_dict({"model": model, "mesh": axes, **SHARDED, "run": run, "data": data})
    model = apply(build_model(plan).to(device_type()), plan).train()
    optimizer = build_optimizer(plan, model.named_parameters())
    for step in range(2):
        manual_seed(step)
        tokens = torch.randint(64, (12, 16), device=device_type())
        labels = tokens.masked_fill(torch.rand(12, 16, device=device_type()) < 0.3, -100)
        rows = data_parallel_rows(plan)
        optimizer.zero_grad()
        backward_loss(plan, model, tokens[rows], labels=labels[rows])
        clip_gradients(model, 0.1)
        optimizer.step()
    return [each.full_tensor().detach().cpu().numpy().tobytes() for each in model.parameters()]


def test_weights_have_the_same_bits_on_any_number_of_ranks():
    """Six micro-batches of two samples each, divided over ranks or one after the other."""
    expected = run_ranks(2, weights_after, 2, 1, 3)[0]
    for ranks, shards, replicas, accumulate in ((3, 3, 1, 2), (2, 1, 2, 3)):
        for got in run_ranks(ranks, weights_after, shards, replicas, accumulate):
            assert got == expected, (shards, replicas)


@pytest.mark.parametrize("axis", ["pp", "cp", "ep"])
def test_plans_without_one_order_of_sums_are_refused(axis):
    mesh = {axis: 2, **({"dp_shard": 2} if axis == "ep" else {})}
    found = check_plan(ParallelPlan.from_dict({"mesh": mesh, "run": {"deterministic": True}}))
    assert [each.key for each in found] == ["run.deterministic"] and f"mesh.{axis} = 2" in found[0].message
