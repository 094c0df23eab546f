"""The example of the README."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.not_on("torch-npu-sim", "torch-cuda", "torch-npu", reason="nothing of the device in it")


def test_the_readmes_example(tmp_path):
    code = (Path(__file__).parents[2] / "README.md").read_text().split("```python\n")[1].split("```")[0]
    script = tmp_path / "script.py"
    script.write_text(code)
    own = {"HYPER_PARALLEL_DEVICE": "cpu", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "TMPDIR": str(tmp_path)}
    command = [sys.executable, str(script)]
    done = subprocess.run(command, timeout=300, capture_output=True, text=True, env={**os.environ, **own})
    (expected,) = re.findall(r"print\(.*\)  # (.*)", code)
    assert (done.stdout, done.stderr, done.returncode) == (expected + "\n", "", 0)
