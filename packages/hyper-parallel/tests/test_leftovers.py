"""Nothing of a step waits for Python's collector, under any axis of a mesh and any way to save memory."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
from small_runs import EXPERTS, TABLES

from hp_plan import ParallelPlan
from hp_platform import get_platform
from hp_testing import on_ranks
from hp_testing.leftovers import leftovers
from hyper_parallel.run import Run

pytestmark = pytest.mark.framework("torch")

BLOCKS = ["model.layers.*"]
DEEP = {**TABLES["model"], "overrides": {**TABLES["model"]["overrides"], "num_hidden_layers": 4}}
PLANS = {
    "tensor": {"mesh": {"tp": 2}},
    "tensor, sequence": {"mesh": {"tp": 2}, "styles": "auto-sequence"},
    "tensor, experts": {"mesh": {"tp": 2}, "model": EXPERTS},
    "context, heads": {"mesh": {"cp": 2}},
    "context, a ring": {"mesh": {"cp": 2}, "context": {"ulysses_degree": 1}},
    "sharded": {"mesh": {"dp_shard": 2}, "run": {"accumulate": 2, "grad_clip": 0.1}},
    "replicated": {"mesh": {"dp_replicate": 2}},
    "sharded, on the host": {"mesh": {"dp_shard": 2}, "fsdp": {"offload": True}},
    "homes on the host": {"mesh": {"tp": 2}, "memory": {"homes": dict.fromkeys(BLOCKS, "host")}},
    "experts": {"mesh": {"dp_shard": 2, "ep": 2}, "model": EXPERTS},
    "experts, exact": {"mesh": {"dp_shard": 2, "ep": 2}, "model": EXPERTS, "experts": {"combine": "exact"}},
    "experts, in chunks": {
        "mesh": {"dp_shard": 2, "ep": 2},
        "model": EXPERTS,
        "experts": {"chunks": 2, "slots": 1, "every": 1},
    },
    "stages": {"mesh": {"pp": 2}},
    "stages, there and back": {"mesh": {"pp": 2}, "model": DEEP, "pipeline": {"schedule": "zbv"}},
    "recomputed": {"mesh": {"tp": 2}, "memory": {"recompute": BLOCKS}},
    "swapped": {"mesh": {"dp_shard": 2}, "memory": {"swap": BLOCKS}},
    "a budget": {"mesh": {"dp_shard": 2}, "memory": {"budget": "600KiB"}},
    "muon": {"mesh": {"tp": 2}, "optimizer": {"name": "muon"}},
    "states on the host": {"mesh": {"dp_shard": 2}, "optimizer": {"name": "adamw", "swap_slices": 2}},
    "saved and validated": {"mesh": {"dp_shard": 2}, "run": {"checkpoint_every": 1}, "validation": {"every": 1}},
}


USUAL = (
    "tensor, sequence",
    "context, a ring",
    "sharded",
    "experts, in chunks",
    "stages, there and back",
    "swapped",
    "muon",
    "saved and validated",
)


@on_ranks(2)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in USUAL else pytest.mark.thorough) for name in PLANS]
)
def test_a_step_leaves_nothing_to_the_collector(name: str, tmp_path: Path) -> None:
    text = tmp_path / f"text{get_platform().groups.rank()}"
    text.write_bytes(b"to be or not to be, " * 20)
    changed = PLANS[name]
    tables = {**TABLES, "fsdp": {}, **changed, "data": {**TABLES["data"], "paths": [str(text)]}}
    tables["run"] = {"steps": 9, "dtype": "float32", **changed.get("run", {})}
    if "validation" in changed:
        tables["validation"] = {**changed["validation"], "paths": [str(text)], "batches": 1}
    with Run(ParallelPlan.from_dict(tables), tmp_path / "run") as run:
        assert leftovers(functools.partial(next, run.steps()), steps=4) == []
