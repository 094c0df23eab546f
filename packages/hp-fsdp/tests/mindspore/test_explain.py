"""explain: groups, the order of a step and its times, memory; against what collectives and storages say."""

from __future__ import annotations

import json
from typing import Any

import mindspore
import numpy as np
import pytest
from fsdp_cells import Net, batch, data_mesh, differentiated, gathered, groups_of, loss_of, pair, seeded, world
from mindspore import Tensor, mint, nn
from mindspore.experimental import optim

from hp_dtensor import SkipDTensorDispatch
from hp_dtensor.debugging.debug import CommDebugMode
from hp_fsdp import MixedPrecisionPolicy, explain, fully_shard
from hp_platform import count_collectives
from hp_testing import on_ranks

BLOCKS = [f"blocks.{i}" for i in range(3)]


def said(explanation: Any, phase: str, kind: str) -> list[str]:
    return [event.group for event in explanation.events if (event.phase, event.kind) == (phase, kind)]


def row(explanation: Any, kind: str) -> tuple[int | None, int | None]:
    found = next(row for row in explanation.memory if row.kind == kind)
    return found.predicted, found.measured


@on_ranks(2)
def test_it_tells_what_collectives_show(tmp_path):
    _, model = pair()
    early = explain(model)
    assert not early.recorded and early.timeline is None and "no step was run yet" in str(early)
    step = differentiated(model)
    step(batch()[1])
    with CommDebugMode() as comm:
        step(batch()[1])
    path = tmp_path / f"step{world()[0]}.json"
    with count_collectives() as counted:
        told = explain(model, path=path)
    assert not counted and told.recorded and told.events == early.events
    for phase in ("forward", "backward"):
        for kind, what in (("gather", "all_gather"), ("reduce", "reduce_scatter")):
            seen = [event for event in comm.events if (event.phase, event.kind) == (phase, what)]
            names = ["Net" if event.module == "Net" else event.module.partition(".")[2] for event in seen]
            assert said(told, phase, kind) == names, (phase, kind)
    sizes = {group.name: group.gathered_bytes for group in told.groups}
    assert sizes == {event.module.partition(".")[2] or event.module: event.bytes for event in comm.events}
    # On CPU nothing is gathered ahead of time, and reductions are over where they start.
    assert max(event.unsharded for event in told.events) == sizes["Net"] + sizes["blocks.0"]
    assert [event.gradients for event in told.events if event.kind == "gather"] == [0] * 7
    assert said(told, "forward", "free") == BLOCKS  # the root stays for its backward
    trace = json.loads(path.read_text())["traceEvents"]
    assert [each["name"] for each in trace if each["ph"] == "X" and each["cat"] == "backward"].count("blocks.0") >= 3


def storages(model: Any, step: Any, x: Tensor) -> int:
    """The most bytes that the gathered buffers really have after any gather of a step."""
    context, seen = groups_of(model)[0].context, [0]
    unshard = context.unshard

    def spy(*args):
        unshard(*args)
        seen.append(sum(gathered(model)))

    context.unshard = spy
    step(x)
    del context.unshard
    return max(seen)


@on_ranks(1, 2)
@pytest.mark.parametrize("reshard", [True, False])
def test_unsharded_memory_is_as_predicted(reshard: bool):
    policy = MixedPrecisionPolicy(param_dtype=mindspore.float16, reduce_dtype=mindspore.float32)
    for options in ({}, {"mp_policy": policy}):
        _, model = pair(reshard_after_forward=reshard, **options)
        early = explain(model)
        step = differentiated(model, lambda x, model=model: loss_of(model(x).astype(mindspore.float32)))
        step(batch()[1])
        real = storages(model, step, batch()[1])
        told = explain(model)
        assert row(early, "unsharded parameters")[0] == real
        assert row(told, "unsharded parameters") == (real, real)
        predicted, measured = row(told, "unsharded gradients")
        assert predicted == measured == row(early, "unsharded gradients")[0]
        assert predicted == max(b.layout.total * 4 for group in groups_of(model) for b in group.buckets)
        if reshard:
            assert max(sum(group != "Net" for group in each.groups) for each in told.memory_timeline) == 1
        assert sum(gathered(model)) == (told.memory_timeline[-1].parameters if told.memory_timeline else 0) == 0


@on_ranks(4)
def test_memory_of_other_ways_to_shard():
    for options in ({"reshard_after_forward": 2}, {"deterministic": True}):
        _, model = pair(**options)
        step = differentiated(model)
        model.set_requires_gradient_sync(False)
        step(batch()[1])
        if not options.get("deterministic"):  # all groups keep their gradients, where one's was predicted
            everything = sum(group.gradient_bytes for group in explain(model).groups)
            assert row(explain(model), "unsharded gradients")[1] == everything
        model.set_requires_gradient_sync(True)
        step(batch()[1])
        told = explain(model)
        predicted, measured = row(told, "unsharded parameters")
        assert predicted == measured and predicted, (options, predicted, measured)
        if options.get("deterministic"):
            assert row(told, "unsharded gradients") == (None, None)
            assert "unsharded gradients: not known with deterministic=True (Net)" in str(told)


OPTIMIZERS = {
    "AdamW": lambda p: optim.AdamW(p, lr=0.1),
    "SGD": lambda p: optim.SGD(p, lr=0.1, momentum=0.9),
    "mint.AdamW": lambda p: mint.optim.AdamW(p),
    "mint.AdamW, amsgrad": lambda p: mint.optim.AdamW(p, amsgrad=True),
    "nn.AdamWeightDecay": lambda p: nn.AdamWeightDecay(p, 0.1),
    "nn.Adam": lambda p: nn.Adam(p, 0.1, use_amsgrad=True),
    "nn.Momentum": lambda p: nn.Momentum(p, 0.1, 0.9),
}


@on_ranks(1, 2)
def test_memory_by_kind():
    _, model = pair()
    told = explain(model)
    predicted, measured = row(told, "parameters")
    assert predicted is not None and measured is not None and 0 <= predicted - measured <= 64 * 30  # padding
    assert measured == sum(np.prod(p.local_shape, dtype=int) * 4 for p in model.get_parameters())
    assert row(told, "gradients") == (predicted, None) and row(told, "optimizer") == (None, None)
    for name, make in OPTIMIZERS.items():
        with SkipDTensorDispatch():
            optimizer = make(model.trainable_params())
        predicted, measured = row(explain(model, optimizer=optimizer), "optimizer")
        assert predicted is not None and 0 <= measured - predicted <= 16, name  # step counts
    with SkipDTensorDispatch():
        strange = optim.Adamax(model.trainable_params())
    told = explain(model, optimizer=strange)
    assert row(told, "optimizer") == (None, 2 * measured_parameters(model) + 4)
    assert "not predicted, Adamax is not one of MindSpore's Adam" in str(told)
    for word in ("returns them", "no hooks for the tensors that autograd saves"):
        assert word in str(told)


def measured_parameters(model: Any) -> int:
    return row(explain(model), "parameters")[1]


@on_ranks(2)
def test_frozen_groups_are_remarked():
    model = seeded(Net)
    for parameter in model.blocks[1].get_parameters():
        parameter.requires_grad = False
    for block in model.blocks:
        fully_shard(block, data_mesh())
    fully_shard(model, data_mesh())
    assert "unsharded parameters: not measured" in str(explain(model))
    differentiated(model)(batch()[1])
    assert "frees blocks.1 after its backward, but" in str(explain(model))


@on_ranks(2)
def test_the_time_line_is_that_of_the_last_training_step():
    _, model = pair()
    step = differentiated(model)
    for _ in range(2):
        step(batch()[1])
    told = explain(model).timeline
    model(batch()[1])
    assert explain(model).timeline == told  # evaluation doesn't count
    groups = ["Net", *BLOCKS]
    for phase in ("forward", "backward"):
        spans = {span.group: span for span in told.spans if (span.phase, span.kind) == (phase, "compute")}
        assert sorted(spans) == groups
        outer = spans["Net"]
        order = BLOCKS if phase == "forward" else BLOCKS[::-1]
        for one, other in zip(order, order[1:]):
            assert outer.start <= spans[one].start < spans[one].stop <= spans[other].start < outer.stop, (phase, one)
    for kind, count in (("gather", 2), ("reduce", 1)):
        assert [sum((s.kind, s.group) == (kind, name) for s in told.spans) for name in BLOCKS] == [count] * 3
    assert 0 < told.computing < told.seconds and 0 <= told.overlapped <= 1
    assert told.waiting_for_reductions > 0
    assert len([line for line in str(told).split("\n") if line.startswith(("blocks.", "Net"))]) == 4


@on_ranks(1)
def test_what_is_refused(tmp_path):
    with pytest.raises(ValueError, match="this Linear was not given to fully_shard, call explain on the root"):
        explain(mint.nn.Linear(2, 2))
    _, inner = pair()
    inner(batch()[1])
    with pytest.raises(ValueError, match="this Block is inside another sharded module, call explain on the root"):
        explain(inner.blocks[0])
    assert "blocks.0" in str(explain(inner))
    _, model = pair()
    with pytest.raises(ValueError, match=r"ends in .json, .png, .svg, .pdf, got 'step.txt'"):
        explain(model, path="step.txt")
    for arguments in ({"inputs": (batch()[1],)}, {"activations": object()}):
        with pytest.raises(NotImplementedError, match="inputs= and activations= are not supported on MindSpore"):
            explain(model, **arguments)
    with pytest.raises(RuntimeError, match="Run forward and backward first"):
        explain(model, path="step.png")
    explain(model, path=str(tmp_path / "order.json"))
    assert (tmp_path / "order.json").exists()
    differentiated(model)(batch()[1])
    explain(model, path=str(tmp_path / "step.json"))
    assert (tmp_path / "step.json").exists()
    with pytest.raises(TypeError, match="expected an optimizer of mindspore.experimental.optim"):
        explain(model, optimizer=mint.nn.Linear(2, 2))
    for kind in (optim.AdamW, mint.optim.AdamW, nn.AdamWeightDecay):
        with SkipDTensorDispatch():
            optimizer = kind(model.trainable_params())
        predicted, measured = row(explain(model, optimizer=optimizer), "optimizer")
        assert predicted and measured
