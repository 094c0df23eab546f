"""Redistributions that run beside what follows: the first use of their result waits for them."""

from __future__ import annotations

import contextlib
import copy
from types import SimpleNamespace

import pytest
import torch
from transfers import check, count_up, mesh_of

from hp_dtensor import DTensor, Replicate, Shard, SkipDTensorDispatch, distribute_tensor, init_device_mesh
from hp_dtensor.torch.moves import transfer
from hp_platform import get_platform
from hp_testing import device_type, on_ranks

pytestmark = [pytest.mark.device, pytest.mark.framework("torch")]

R = Replicate()


class _Stream:
    """Stands for a side stream: everything in it runs at once, and what waits for it is counted."""

    def __init__(self) -> None:
        self.waits: list[object] = []
        self.record_event = object
        self.wait_stream = self.waits.append
        self.wait_event = self.waits.append


@contextlib.contextmanager
def _with_streams():
    current, side = _Stream(), _Stream()
    on = []

    @contextlib.contextmanager
    def stream(other):
        on.append(other)
        yield

    module = SimpleNamespace(current_stream=lambda: current, stream=stream)
    devices = SimpleNamespace(
        kind=device_type(),
        capabilities=SimpleNamespace(streams=True),
        device_module=lambda: module,
        current_device=object,
        stream=lambda: side,
    )
    real, patch = get_platform(), pytest.MonkeyPatch()
    beside = SimpleNamespace(devices=devices, collectives=real.collectives, groups=real.groups)
    with patch.context() as changed:
        changed.setattr(transfer, "get_platform", lambda: beside)
        changed.setattr(transfer, "_keep", lambda x, stream: None)
        yield SimpleNamespace(current=current, side=side, on=on)


USES = {
    "an operation": lambda y: y * 2,
    "a number before it": lambda y: 1.0 + y,
    "a list of tensors": lambda y: torch.cat([y, y]),
    "to_local": lambda y: y.to_local(),
    "full_tensor": lambda y: y.full_tensor(),
    "redistribute": lambda y: y.redistribute(placements=[Shard(0)]),
    "again beside": lambda y: y.redistribute(placements=[Shard(0)], async_op=True).to_local(),
    "shape": lambda y: y.shape,
    "len": len,
    "data_ptr": lambda y: y.data_ptr(),
    "repr": repr,
    "deepcopy": lambda y: copy.deepcopy(y.detach()),
    "an index": lambda y: y[0],
    "a gradient": lambda y: torch.autograd.grad(y.sum(), [y]),
    "a keyword": lambda y: torch.add(input=y, other=y),
    "in place": lambda y: y.detach().mul_(1),
}


@on_ranks(2)
@pytest.mark.parametrize("use", USES)
def test_the_first_use_waits(use: str) -> None:
    mesh = init_device_mesh(device_type(), (2,))
    x = distribute_tensor(count_up(4, 2), mesh, [Shard(0)]).requires_grad_()
    with _with_streams() as seen:
        y = x.redistribute(placements=[R], async_op=True)
        assert type(y) is transfer.PendingDTensor and isinstance(y, DTensor) and seen.on == [seen.side]
        assert seen.side.waits == [seen.current] and not seen.current.waits
        USES[use](y)
        assert len(seen.current.waits) == (2 if use == "again beside" else 1) and type(y) is DTensor
        y.sum()
        assert len(seen.current.waits) == (2 if use == "again beside" else 1), "once"
    check(y.detach(), count_up(4, 2), mesh, [R])


@on_ranks(2)
def test_what_is_pending_ends_before_interception_is_off() -> None:
    x = distribute_tensor(count_up(4, 2), init_device_mesh(device_type(), (2,)), [Shard(0)])
    with _with_streams() as seen:
        y, dropped = (x.redistribute(placements=[R], async_op=True) for _ in range(2))
        del dropped  # gloo's thread may hold it a little longer
        with SkipDTensorDispatch():
            waits = len(seen.current.waits)
            assert waits in (1, 2) and type(y) is DTensor
            assert type(x.redistribute(placements=[R], async_op=True)) is DTensor
        assert len(seen.current.waits) == waits


@on_ranks(4)
def test_a_pending_transfer_has_its_gradient() -> None:
    square, row = mesh_of([[0, 1], [2, 3]]), mesh_of([1, 3])
    x = distribute_tensor(count_up(4, 2), square, [Shard(0), R]).requires_grad_()
    with _with_streams():
        y = x.redistribute(row, [Shard(1)], async_op=True)
        assert type(y) is transfer.PendingDTensor
        (y * y).sum().backward()
    assert torch.equal(x.grad.to_local(), 2 * x.detach().to_local())


@on_ranks(2)
def test_on_a_device_without_streams_the_result_is_ready() -> None:
    mesh = init_device_mesh(device_type(), (2,))
    x = distribute_tensor(count_up(64, 64), mesh, [Shard(0)]).requires_grad_()
    y = x.redistribute(placements=[Shard(1)], async_op=True)
    streams = get_platform().devices.capabilities.streams
    assert type(y) is (transfer.PendingDTensor if streams else DTensor)
    (y * y).sum().backward()
    check(y.detach(), count_up(64, 64), mesh, [Shard(1)])
    assert torch.equal(x.grad.to_local(), 2 * x.detach().to_local())
