from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hp_testing import device_type

PROGRAM = Path(__file__).with_name("audited_program.py")


@pytest.mark.device
@pytest.mark.not_on("torch-cpu", "mindspore-cpu", "mindspore-ascend", reason="there is one stream")
def test_the_audit_names_what_nothing_orders_and_nothing_else():
    """In a process of its own: the trace of a device can't be turned off."""
    backend = "torch-npu-sim" if "HYPER_PARALLEL_NPU_SIM" in os.environ else f"torch-{device_type()}"
    select = f"from hp_testing.pools.target import select; select({backend!r})"  # before torch is imported
    command = [sys.executable, "-c", f"{select}; import runpy; runpy.run_path({str(PROGRAM)!r}, run_name='__main__')"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=True)
    said = json.loads(done.stdout.splitlines()[-1])
    faults = {name: [fault.split(":")[0].split(" 0x")[0] for fault in found] for name, found in said.items() if found}
    assert set(faults) == {"not ordered", "a part, not ordered", "freed at once", "a collective, used before"}
    assert set(sum(faults.values(), [])) == {"nothing orders two accesses", "memory is freed on stream"}
    assert "audited_program.py" in said["not ordered"][0] and "aten::mul" in said["not ordered"][0]
