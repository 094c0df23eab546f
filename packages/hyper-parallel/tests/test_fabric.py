"""The program of Lightning Fabric on two ranks, against one process without it; `nox -s "loops(fabric)"` has Fabric."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

pytestmark = [
    pytest.mark.framework("torch"),
    pytest.mark.not_on("torch-npu-sim", reason="the ranks ask for CPUs; nothing of the device in it"),
    pytest.mark.skipif(importlib.util.find_spec("lightning") is None, reason='needs Lightning: nox -s "loops(fabric)"'),
]
LOOPS = Path(__file__).parents[3] / "examples" / "loops"
CALLER = """
import json, sys
from pathlib import Path
import torch.distributed as dist
import fabric_loop
from hp_plan import ParallelPlan

plan = ParallelPlan.from_dict(json.loads(sys.argv[1]))
losses = fabric_loop.train("run", plan)
again = fabric_loop.train("run", plan, resume=True)
Path(f"{dist.get_rank()}.json").write_text(json.dumps([losses, again]))
dist.destroy_process_group()
"""


def alone() -> list[float]:
    """Losses of plain PyTorch."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2))
    tokens = torch.randint(64, (8, 16))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(6):
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(
    "plan", [{"mesh": {"dp_shard": 2}, "fsdp": {"groups": ["model.layers.*"]}}, {"mesh": {"tp": 2}}], ids=["fsdp", "tp"]
)
def test_a_plan_is_a_strategy_of_fabric(plan, tmp_path):
    (tmp_path / "caller.py").write_text(CALLER)
    path = os.pathsep.join([str(LOOPS), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "HYPER_PARALLEL_DEVICE": "cpu", "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "caller.py"]
    ended = subprocess.run(
        [*command, json.dumps(plan)], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr
    expected = alone()
    for rank in range(2):
        losses, again = json.loads((tmp_path / f"{rank}.json").read_text())
        assert losses == pytest.approx(expected, rel=1e-4) and losses[-1] < losses[0]
        assert again == pytest.approx(expected[3:], rel=1e-4)  # from the checkpoint of the third step
