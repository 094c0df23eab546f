"""The examples of the README."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.not_on("torch-npu-sim", "torch-cuda", "torch-npu", reason="nothing of the device in it")


EXAMPLES = [
    rest.split("```")[0] for rest in (Path(__file__).parents[2] / "README.md").read_text().split("```python\n")[1:]
]


@pytest.mark.parametrize("number", range(len(EXAMPLES)))
def test_the_readmes_examples(tmp_path, number):
    code = EXAMPLES[number]
    script = tmp_path / "script.py"
    script.write_text(code)
    own = {"HYPER_PARALLEL_DEVICE": "cpu", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "TMPDIR": str(tmp_path)}
    command = [sys.executable, str(script)]
    done = subprocess.run(command, timeout=300, capture_output=True, text=True, env={**os.environ, **own})
    (expected,) = re.findall(r"print\(.*\)  # (.*)", code)
    assert (done.stdout, done.stderr, done.returncode) == (expected + "\n", "", 0)
