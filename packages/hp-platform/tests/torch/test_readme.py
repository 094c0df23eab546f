"""The examples of the README."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.not_on("torch-npu-sim", reason="starts its own ranks; nothing of the device in it")


def example(number: int) -> str:
    readme = Path(__file__).parents[2] / "README.md"
    return readme.read_text().split("```python\n")[number].split("```")[0]


def run(code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    script = folder / "script.py"
    script.write_text(code)
    own = {"HYPER_PARALLEL_DEVICE": "cpu", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "TMPDIR": str(folder)}
    options: dict[str, Any] = {"capture_output": True, "text": True, "env": {**os.environ, **own}}
    return subprocess.run([sys.executable, str(script)], timeout=600, **options)


def test_the_readmes_example(tmp_path):
    code = example(1)
    done = run(code, tmp_path)
    expected = re.findall(r"print\(.*\)  # (.*)", code)[-1]
    assert (done.stdout, done.stderr, done.returncode) == (expected + "\n", "", 0)


def test_the_readmes_example_of_a_hang(tmp_path):
    """It is over as soon as somebody has told of the hang."""
    told = f"""
import pathlib
def until_told(_):
    while not list(pathlib.Path({str(tmp_path)!r}).glob("hp-flights-*/told-*")):
        time.sleep(0.02)
"""
    code = example(2)
    assert "time.sleep(8)" in code
    done = run(told + code.replace("time.sleep(8)", "until_told(8)"), tmp_path)
    assert "s no rank went on (watch_hangs): rank" in done.stderr and done.returncode == 0
