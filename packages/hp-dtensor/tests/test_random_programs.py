"""Random programs on random layouts: values and gradients are those of one device; `nox -s fuzz` runs 5,200."""

from __future__ import annotations

from program_grammar import Leaf, Program
from program_runs import Verdict, drawn, judge, judge_all

from hp_dtensor import init_device_mesh
from hp_testing import device_type, on_ranks

PROGRAMS = 20


def _check(verdicts: list[Verdict]) -> None:
    for verdict in verdicts:
        assert verdict.wrong is None, verdict.wrong
        assert not verdict.crashed, verdict.crashed[0]
    assert sum(verdict.compared for verdict in verdicts) > 10 * len(verdicts)


@on_ranks(2, 3, timeout=300.0)
def test_one_axis(ranks: int) -> None:
    _check(judge_all([drawn(ranks * 1000 + n, 1) for n in range(PROGRAMS)], (ranks,)))


@on_ranks(4, timeout=300.0)
def test_two_axes() -> None:
    _check(judge_all([drawn(n, 2) for n in range(PROGRAMS)], (2, 2)))


@on_ranks(2)
def test_a_wrong_program_is_found() -> None:
    mesh = init_device_mesh(device_type(), (2,))
    leaf = Leaf("v0", (3, 2), ("S0",), True)
    wrong_value = Program(1, (leaf,), ("v1 = v0 + float(type(v0) is not torch.Tensor)",), (), "none")
    verdict = judge(wrong_value, mesh)
    assert verdict.wrong is not None and verdict.wrong.startswith("v1 differs by ")
    wrong_gradient = Program(
        1, (leaf,), ("v1 = v0 * 1 if type(v0) is torch.Tensor else v0 + 0 * v0",), ("v1",), "backward"
    )
    assert judge(wrong_gradient, mesh).wrong is None
    wrong_gradient = Program(
        1, (leaf,), ("v1 = v0 * 1 if type(v0) is torch.Tensor else v0.detach()",), ("v1",), "backward"
    )
    verdict = judge(wrong_gradient, mesh)
    assert verdict.wrong is not None and verdict.wrong.startswith("v0's gradient is there on one device alone")
    crash = Program(1, (leaf,), ("v1 = v0 if type(v0) is torch.Tensor else v0.nothing", "v2 = v0 * 2"), (), "none")
    verdict = judge(crash, mesh)
    assert len(verdict.crashed) == 1 and "nothing" in verdict.crashed[0] and verdict.wrong is None
    assert verdict.compared == 2  # v0 and v2: what does not depend on the line is compared


def test_a_program_is_drawn_again_by_its_number() -> None:
    assert drawn(7, 1) == drawn(7, 1) != drawn(8, 1)
