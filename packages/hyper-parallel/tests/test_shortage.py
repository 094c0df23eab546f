"""A step that runs out of memory."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest
import torch
from torch import nn

from hp_offload.extend import BudgetError
from hp_plan import ParallelPlan, PlanError
from hp_testing import run_ranks
from hyper_parallel.reports.output import prepare_folder
from hyper_parallel.supervision.run_end import MemoryShortage, advice, over_budget
from hyper_parallel.worker import train

pytestmark = pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="limits of address space are Linux's")
BLOCK, FREE = 16 << 20, 300 << 20  # elements of 4 bytes; what the process may take beyond what it has


class Backward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        while True:
            KEPT.append(torch.ones(BLOCK))


KEPT: list[torch.Tensor] = []


class Hungry(nn.Module):
    def __init__(self, where):
        super().__init__()
        self.linear, self.where, self.calls = nn.Linear(8, 8), where, 0

    def forward(self, x):
        self.calls += 1
        if self.calls == 2 and self.where == "forward":
            limit()
            while True:
                KEPT.append(torch.ones(BLOCK) * x.sum())
        if self.calls == 2 and self.where == "backward":
            x = Backward.apply(x)
            limit()
        return self.linear(x)


def limit():
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    size = pages * resource.getpagesize() + FREE
    resource.setrlimit(resource.RLIMIT_AS, (size, resource.getrlimit(resource.RLIMIT_AS)[1]))


class Model(nn.Module):
    def __init__(self, where):
        super().__init__()
        self.embed = nn.Embedding(1 << 17, 8)  # larger than what other tests leave in the process
        self.layers = nn.ModuleList([Hungry(""), Hungry(where)])
        self.head = nn.Linear(8, 256)

    def forward(self, input_ids, labels):
        x = self.embed(input_ids[:, :-1])
        for layer in self.layers:
            x = layer(x)
        return {"loss": nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels[:, 1:].flatten())}


def hungry(where="forward"):
    return Model(where)


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_shortage_names_step_phase_module_and_what_was_alive(tmp_path, where):
    run_ranks(1, runs_out, tmp_path, where)
    text = (tmp_path / "run" / "out-of-memory-rank-0.txt").read_text()
    first, second, *storages, last = text.splitlines()
    inside = ", in layers.1" if where == "forward" else ""
    assert first.startswith(f"rank 0 ran out of memory in step 2, {where}{inside}: ")
    assert second == "The 10 largest storages in use:"
    assert len(storages) == 10
    assert storages[0].split()[:2] == ["64.0", "MiB"]
    assert storages[0].endswith("float32 16777216 on cpu")
    assert any("embed.weight: float32 131072x8" in line for line in storages)
    assert last.startswith('Less memory: write budget = "20GiB" in [memory]')


def runs_out(folder, where):
    (folder / "text").write_bytes(b"to be or not to be" * 20)
    tables = {
        "model": {"function": f"{__name__}:hungry", "overrides": {"where": where}},
        "data": {"paths": [str(folder / "text")], "sequence_length": 8, "batch_size": 2},
        "run": {"steps": 3},
    }
    before = resource.getrlimit(resource.RLIMIT_AS)
    try:
        with pytest.raises(MemoryShortage, match=f"rank 0 ran out of memory in step 2, {where}"):
            train(ParallelPlan.from_dict(tables), prepare_folder(folder / "run", name="x"))
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
        KEPT.clear()


def test_a_plan_with_a_budget_is_told_to_lower_it():
    plan = ParallelPlan.from_dict({"memory": {"budget": "20GiB"}})
    assert advice(plan).startswith("make memory.budget less than 20GiB")
    without = advice(ParallelPlan())
    assert without.startswith('write budget = "20GiB" in [memory]')
    assert ParallelPlan.from_dict({"memory": {"budget": without.split('"')[1]}}).memory.budget == "20GiB"


def test_a_budget_below_what_backward_needs_is_refused_with_one_that_would_do():
    plan = ParallelPlan.from_dict({"memory": {"budget": "60MiB"}})
    found = over_budget(plan, BudgetError(budget=11 << 20, least=28 << 20))
    assert found.key == "memory.budget" and "take 49 MiB on each rank; what backward needs is 28 MiB" in found.message
    assert found.fix.startswith('write budget = "77 MiB"')


def train_over_budget(folder):
    """All ranks refuse alike; only rank 0 has made the plan."""
    tables = {
        "model": {"config": "LlamaConfig", "overrides": {"hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 256}},
        "mesh": {"dp_shard": 2},
        "data": {"sequence_length": 64, "batch_size": 4},
        "run": {"steps": 1},
        "memory": {"budget": "1500 KiB"},
    }
    tables["model"]["overrides"] |= {"intermediate_size": 128, "num_attention_heads": 4}
    plan = ParallelPlan.from_dict(tables)
    with pytest.raises(PlanError, match='write budget = "') as refused:
        train(plan, prepare_folder(folder / "run", name="x", resume=True))
    enough = refused.value.diagnostics[0].fix.split('"')[1]
    plan = ParallelPlan.from_dict({**tables, "memory": {"budget": enough}})
    train(plan, prepare_folder(folder / "enough", name="x", resume=True))
    assert (folder / "enough" / "metrics.jsonl").read_text().count("\n") == 1


def test_all_ranks_refuse_a_budget_alike(tmp_path):
    run_ranks(2, train_over_budget, tmp_path)
