"""The example of the README."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.not_on("torch-npu-sim", reason="starts its own ranks; nothing of the device in it")
def test_the_readmes_example(tmp_path):
    readme = Path(__file__).parents[2] / "README.md"
    code = readme.read_text().split("```python\n")[1].split("```")[0]
    expected = re.findall(r"print\(.*\)  # (.*)", code)[-1]
    script = tmp_path / "script.py"
    script.write_text(code)
    environment = {**os.environ, "HYPER_PARALLEL_DEVICE": "cpu", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=60, env=environment)
    assert (done.stdout, done.stderr, done.returncode) == (expected + "\n", "", 0)
