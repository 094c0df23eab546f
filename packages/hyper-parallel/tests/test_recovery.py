"""A launched run that is killed and goes on elsewhere; `nox -s recovery` does it for ten minutes."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
from injections import Fault, Launcher
from resume_matrix import Case, Samples, losses_of, plan_of, write_data

pytestmark = [
    pytest.mark.framework("torch"),
    pytest.mark.thorough,  # test_resuming.py has the same without launched processes
    pytest.mark.not_on("torch-npu-sim", reason="starts its own ranks; nothing of the device in it"),
]


def test_a_run_that_is_killed_goes_on_with_the_same_bits_on_other_ranks(tmp_path):
    write_data(tmp_path / "data")
    launcher = Launcher(tmp_path / "runs")
    try:
        ended = launcher.train(plan_of("packed", {}, tmp_path / "data", deterministic=True), "whole", log=True)
        assert ended.status == 0, ended.err
        case = Case(launcher, tmp_path / "data", random.Random(0), "case", True)
        case.kind = "packed"
        case.parts = [({"dp_shard": 2}, Fault(1, "backward", "kill", 5)), ({"dp_replicate": 3}, None)]
        held = Samples(launcher.folder, "whole").new()
        assert case.run(losses_of(launcher.folder / "whole"), held) == ""
        assert case.stopped == 1
    finally:
        launcher.close()
