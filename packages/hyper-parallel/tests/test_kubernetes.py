"""The manifest of the page about starting ranks: its command joins ranks by what the training operator sets."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from launched_commands import LIMIT, fill

pytestmark = [
    pytest.mark.framework("torch"),
    pytest.mark.not_on("torch-npu-sim", reason="the ranks ask for CPUs; nothing of the device in it"),
]
PAGE = Path(__file__).parents[3] / "docs" / "how-to" / "launch.md"


def manifest() -> dict[str, Any]:
    import yaml  # of transformers

    block = re.search(r'^```yaml title="job.yaml"\n(.*?)^```$', PAGE.read_text("utf-8"), re.DOTALL | re.MULTILINE)
    assert block is not None
    return yaml.safe_load(block[1])


def test_a_job_has_one_master_and_workers_of_the_same_pods():
    job = manifest()
    master, worker = (job["spec"]["pytorchReplicaSpecs"][name] for name in ("Master", "Worker"))
    assert (job["kind"], master["replicas"], worker["replicas"]) == ("PyTorchJob", 1, 3)
    assert master["template"] == worker["template"]
    (container,) = master["template"]["spec"]["containers"]
    assert container["name"] == "pytorch"  # by which the operator knows it
    assert str(container["resources"]["limits"]["nvidia.com/gpu"]) == job["spec"]["nprocPerNode"]
    mounted = {each["name"] for each in container["volumeMounts"]}
    assert mounted == {each["name"] for each in master["template"]["spec"]["volumes"]}


@pytest.mark.thorough  # other launchers: test_slurm.py; the command itself is above
def test_its_command_trains_with_the_variables_of_the_operator(tmp_path):
    """One node of two ranks: `RANK` is the node's, as the operator sets it."""
    fill(tmp_path)
    (tmp_path / "run.toml").rename(tmp_path / "plan.toml")
    (container,) = manifest()["spec"]["pytorchReplicaSpecs"]["Master"]["template"]["spec"]["containers"]
    port = 20_000 + os.getpid() % 12_000  # of those that the system gives to nobody
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    place |= {"WORLD_SIZE": "2", "RANK": "0", "PET_NNODES": "1", "PET_NPROC_PER_NODE": "2", "PET_NODE_RANK": "0"}
    words = [*container["command"], *container["args"], "--data", "text"]
    words = [re.sub(r"\$\((\w+)\)", lambda name: place[name[1]], each) for each in words]
    assert words[0] == "torchrun"
    words[:1] = [sys.executable, "-m", "torch.distributed.run"]
    words = [each.replace("/shared", str(tmp_path)) for each in words]
    environment = {**os.environ, **place, "HYPER_PARALLEL_DEVICE": "cpu"}
    done = subprocess.run(
        words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=LIMIT, check=False
    )
    assert done.returncode == 0, done.stderr
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3, 4]
    assert json.loads((tmp_path / "run" / "run.json").read_text())["starts"][0]["ranks"] == 2
