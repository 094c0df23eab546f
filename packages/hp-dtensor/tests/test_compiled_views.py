"""Views of a cut dim in a region of torch.compile: copies that may be read and not written."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hp_dtensor import DTensor, Shard, distribute_tensor, init_device_mesh
from hp_testing import device_type, on_ranks

pytestmark = [pytest.mark.framework("torch"), pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")]


def _operand() -> Any:
    torch._dynamo.reset()
    mesh = init_device_mesh(device_type(), (2,), mesh_dim_names=("tp",))
    value = torch.arange(24.0, dtype=torch.float64, device=device_type()).view(6, 4)
    return distribute_tensor(value, mesh, [Shard(0)])


def _compiled(function: Any) -> Any:
    return torch.compile(function, fullgraph=True, backend="aot_eager")


READS = {
    "index": lambda x: x[1:3] * 2,
    "chunks": lambda x: sum(part.sum(0) for part in x.split([1, 2, 3])),
    "flat": lambda x: x.view(3, 8) + 1,
    "a view of it": lambda x: x[1:5].t()[1] * 3,
    "a write elsewhere": lambda x: (x[1:3].clone().mul_(2), x[2:4] + 1)[1],
    "a write before": lambda x: x.clone().add_(1)[2:4] * 1,
}


@on_ranks(2)
@pytest.mark.parametrize("name", READS)
def test_reading(name: str) -> None:
    x = _operand()
    want = READS[name](x.full_tensor())
    torch.testing.assert_close(_compiled(READS[name])(x).full_tensor(), want)


def _stale(x: Any) -> Any:
    y = x.clone()
    view = y[1:3]
    y.add_(1)
    return view * 1


def _fresh(x: Any) -> Any:
    y = x.clone()
    y.add_(1)
    return y[1:3] * 1


WRITES = {
    "index": (lambda x: x[1:3].mul_(2), "mul_ would not reach its source", lambda x: x[1:3].clone().mul_(2)),
    "chunks": (lambda x: x.chunk(3)[0].zero_(), "zero_ would not reach", lambda x: x.chunk(3)[0].clone().zero_()),
    "a view of it": (lambda x: x[1:5].t().add_(1), "add_ would not reach", lambda x: x[1:5].clone().t().add_(1)),
    "flat": (lambda x: x.view(3, 8).zero_(), "zero_ would not reach its", lambda x: x.view(3, 8).clone().zero_()),
    "stale": (_stale, "mul would read the old value. Take the view after the write", _fresh),
}


@on_ranks(2)
@pytest.mark.parametrize("name", WRITES)
def test_writing(name: str) -> None:
    function, text, mended = WRITES[name]
    x = _operand()
    with pytest.raises(Exception, match=f"a view of a DTensor along a sharded dim had to be redistributed.*{text}"):
        _compiled(function)(x)
    torch.testing.assert_close(_compiled(mended)(x).full_tensor(), mended(x.full_tensor()))


@on_ranks(2)
def test_across_the_border() -> None:
    x = _operand()
    view = _compiled(lambda x: x[1:3])(x)
    assert isinstance(view, DTensor)
    torch.testing.assert_close((view + 1).full_tensor(), x.full_tensor()[1:3] + 1)
    torch.testing.assert_close(view.full_tensor(), x.full_tensor()[1:3])
    for write in (lambda: view.mul_(2), lambda: view[0].zero_(), lambda: torch.add(view, 1, out=view)):
        with pytest.raises(RuntimeError, match="it is a copy: .* would not reach its source; clone"):
            write()
    view.clone().mul_(2)
    with pytest.raises(
        Exception, match=r"of a DTensor that is a view of another one .* clone\(\) it before the compiled"
    ):
        _compiled(lambda y: y * 2)(x[1:3])
    torch.testing.assert_close(_compiled(lambda y: y * 2)(x[1:3].clone()).full_tensor(), x.full_tensor()[1:3] * 2)
