"""torch's operator database: each operator's first sample, results and gradients; `nox -s sweep` runs the whole."""

from __future__ import annotations

import re

import pytest

pytest.importorskip("expecttest", reason="torch's operator database needs expecttest")

import op_database

from hp_testing import on_ranks

pytestmark = [
    pytest.mark.framework("torch"),
    pytest.mark.not_on("torch-npu-sim", reason="some operators' CANN kernels have no stand-in"),
]
REFUSED = {
    "as_strided": "strides are of memory",
    "as_strided.partial_views": "strides are of memory",
    "as_strided_copy": "strides are of memory",
    "as_strided_scatter": "strides are of memory",
    "resize_": "a part can't be resized",
    "resize_as_": "a part can't be resized",
    "to_sparse": "a sparse tensor can't be distributed",
    "masked.std": "a plain tensor of shape",  # torch counts elements in a plain tensor of its own
    "masked.var": "a plain tensor of shape",
}
PARTS = 16


@on_ranks(2, timeout=300.0)
@pytest.mark.parametrize(
    "part",
    [0, PARTS // 2, *(pytest.param(each, marks=pytest.mark.thorough) for each in range(PARTS) if each % (PARTS // 2))],
)
def test_every_operator(part: int) -> None:
    names = list(op_database.operators())[part::PARTS]
    for verdict in op_database.judge_all(names, (2,), 1, 4, True, False):
        assert not verdict.wrong, f"{verdict.name}: {verdict.wrong[0]}"
        reason = REFUSED.get(verdict.name)
        refused = [text for text in verdict.raised if reason is None or not re.search(reason, text)]
        assert not refused, f"{verdict.name}: {refused[0]}"
        assert verdict.right or reason, verdict.name


@on_ranks(2)  # which have the database already: it takes seconds to import
def test_what_is_refused_is_known() -> None:
    names = list(op_database.operators())
    assert set(REFUSED) <= set(names)
    assert len(names) - len(REFUSED) >= 535


def broken(x):
    """An operator whose local result would be taken for the whole."""
    from hp_dtensor import DTensor

    if not isinstance(x, DTensor):
        return x * 2
    return x * 2 if x.placements[0].is_replicate() else x * 3


@on_ranks(2)
def test_a_wrong_operator_is_found(monkeypatch) -> None:
    op = op_database.operators()["abs"]
    fake = type("Fake", (), {"op": staticmethod(broken), "sample_inputs": op.sample_inputs})
    fake.supports_dtype, fake.supports_autograd = op.supports_dtype, True
    monkeypatch.setattr(op_database, "operators", lambda: {"broken": fake})
    verdict = op_database.judge("broken", (2,), 1, 8, False, False)
    assert verdict.outcome == "wrong"
    assert "S0" in verdict.wrong[0]
    assert verdict.right
