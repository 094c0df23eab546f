"""explain: groups, the order of a step, memory; against what collectives say."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from hp_dtensor.debug import CommDebugMode
from hp_fsdp import explain, fully_shard
from hp_platform.testing import device_type, on_ranks

sys.path.insert(0, str(Path(__file__).parent))  # pytest imports tests by their path
from fsdp_models import Net, batch, loss_of, pair

pytestmark = pytest.mark.framework("torch")
BLOCKS = [f"blocks.{i}" for i in range(3)]


def said(explanation, phase: str, kind: str) -> list[str]:
    return [event.group for event in explanation.events if (event.phase, event.kind) == (phase, kind)]


@on_ranks(2)
def test_it_tells_what_collectives_show(tmp_path):
    _, model = pair()
    early = explain(model)
    assert not early.recorded and "no step was run yet" in str(early)
    loss_of(model(batch()[1])).backward()
    with CommDebugMode() as comm:
        loss_of(model(batch()[1])).backward()
    told = explain(model, path=tmp_path / "step.json")
    assert told.recorded and told.events == early.events
    for phase in ("forward", "backward"):
        for kind, what in (("gather", "all_gather"), ("reduce", "reduce_scatter")):
            seen = [event for event in comm.events if (event.phase, event.kind) == (phase, what)]
            names = ["HSDPNet" if event.module == "HSDPNet" else event.module.partition(".")[2] for event in seen]
            assert said(told, phase, kind) == names, (phase, kind)
    gathered = {group.name: group.gathered_bytes for group in told.groups}
    assert gathered == {event.module.partition(".")[2] or event.module: event.bytes for event in comm.events}
    assert max(event.unsharded for event in told.events) == gathered["HSDPNet"] + 2 * gathered["blocks.0"]
    assert said(told, "forward", "free") == BLOCKS  # the root stays for its backward
    trace = json.loads((tmp_path / "step.json").read_text())["traceEvents"]
    assert len(trace) == 2 * len(told.events) and trace[0]["name"] == "HSDPNet"


@on_ranks(1, 2)
def test_memory_by_kind():
    _, model = pair()
    optimizer = torch.optim.AdamW(model.parameters())
    loss_of(model(batch()[1])).backward()
    optimizer.step()
    told = explain(model, optimizer=optimizer)
    rows = {row.kind: row for row in told.memory}
    for kind, padded in (("parameters", True), ("gradients", True), ("optimizer", False)):
        row = rows[kind]
        assert row.measured is not None and row.predicted is not None
        slack = 64 * 30 if padded else 8 * 30  # padding to cache lines, and a step count a parameter
        assert abs(row.predicted - row.measured) <= slack, row
    assert ("never: this rank has all" in str(told)) == (dist.get_world_size() == 1)


@on_ranks(2)
def test_only_a_sharded_root_is_explained():
    with pytest.raises(ValueError, match="not called on this Linear"):
        explain(nn.Linear(2, 2))
    model = fully_shard(Net().to(device_type()), reshard_after_forward=False)
    assert "once a step" not in str(explain(model))
    model.set_reshard_after_backward(False)
    assert "once a step" in str(explain(model))
