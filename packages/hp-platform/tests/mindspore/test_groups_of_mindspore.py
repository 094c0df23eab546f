"""Process groups that MindSpore made, and the launch by msrun."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import mindspore
import pytest
from mindspore import communication

import hp_platform
from hp_platform import get_platform
from hp_testing import as_array, as_tensor, close_pools, on_ranks, run_ranks
from hp_testing.pools.processes import ended


@on_ranks(3)
def test_groups_made_elsewhere_are_reused():
    groups = get_platform().groups
    if groups.rank() == 1:
        return
    communication.create_group("a_pair", [0, 2])
    hp_platform.mark_created_groups(["", "a_pair"])
    assert groups.new_group([2, 0]) == "a_pair"
    tensor = as_tensor([1.0])
    get_platform().collectives.all_reduce(tensor, group="a_pair")
    assert as_array(tensor).item() == 2
    groups.destroy("a_pair")


@on_ranks(2)
def test_mindspore_knows_the_groups():
    groups = get_platform().groups
    assert groups.new_group([0, 1]) == communication.GlobalComm.WORLD_COMM_GROUP
    alone = groups.new_group([groups.rank()])
    assert communication.get_process_group_ranks(alone) == [groups.rank()]
    assert communication.get_rank(alone) == 0


@on_ranks(1)
def test_what_mindspore_has_not_is_refused():
    with pytest.raises(ValueError, match="does not support a timeout per group, leave it out"):
        hp_platform.split_group(split_ranks=[[0]], timeout=timedelta(seconds=1))


def initialise_again() -> str:
    hp_platform.destroy_process_group()
    assert not get_platform().groups.is_initialized()
    with pytest.raises(RuntimeError, match="no default process group"):
        get_platform().groups.size()
    with pytest.raises(RuntimeError, match="cannot initialize mccl a second time") as caught:
        hp_platform.init_process_group(init_method="tcp://127.0.0.1:1", rank=0, world_size=1)
    return str(caught.value)


@pytest.mark.skipif("npu" in get_platform().devices.present(), reason="hccl can be initialised again")
def test_mccl_is_initialised_once_in_a_process():
    try:
        assert run_ranks(1, initialise_again) == [
            "MindSpore cannot initialize mccl a second time in a process: restart the ranks."
        ]
    finally:
        close_pools()


def test_without_msrun_the_error_names_it(monkeypatch):
    monkeypatch.delenv("MS_ROLE", raising=False)
    monkeypatch.setenv("RANK", "0")  # torchrun's, which MindSpore doesn't read
    with pytest.raises(RuntimeError, match="start this program with msrun .* or pass store or init_method"):
        hp_platform.init_process_group()
    with pytest.raises(ValueError, match="need rank and world_size, got rank=-1, world_size=2"):
        hp_platform.init_process_group(init_method="tcp://127.0.0.1:29500", world_size=2)
    with pytest.raises(ValueError, match="backend='gloo', but on cpu MindSpore supports only 'mccl'"):
        hp_platform.init_process_group("gloo")
    with pytest.raises(ValueError, match="pg_options: MindSpore's default group has no options"):
        hp_platform.init_process_group(pg_options=mindspore)


PROGRAM = """
import numpy as np
import hp_platform
from hp_testing import as_array, as_tensor

hp_platform.init_process_group()
platform = hp_platform.get_platform()
tensor = as_tensor(np.array([platform.groups.rank() + 1.0]), "float32")
platform.collectives.all_reduce(tensor, group=platform.groups.new_group([0, 1]))
print("total", as_array(tensor).item(), "on rank", platform.groups.rank(), flush=True)
"""


@pytest.mark.thorough
def test_a_program_under_msrun(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    scripts = Path(sys.executable).parent
    options = ["--worker_num=2", "--local_worker_num=2", f"--master_port={port}", "--join=True", "--log_dir=logs"]
    path = os.pathsep.join([str(scripts), os.environ["PATH"]])  # msrun starts the `python` of the PATH
    environment = {**os.environ, "PATH": path, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [str(scripts / "msrun"), *options, "program.py"]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with ended(subprocess.Popen(command, cwd=tmp_path, env=environment, start_new_session=True, **pipes)) as process:
        output, _ = process.communicate(timeout=600)
    assert process.returncode == 0, output
    logs = "".join((tmp_path / "logs" / f"worker_{rank}.log").read_text() for rank in range(2))
    assert sorted(re.findall("total .*", logs)) == ["total 3.0 on rank 0", "total 3.0 on rank 1"]
