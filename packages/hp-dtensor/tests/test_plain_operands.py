"""Plain tensors that meet DTensors where they are taken as replicated: what is written into one keeps its gradient."""

from __future__ import annotations

import _thread
import threading

import pytest
import torch

from hp_dtensor import Replicate, Shard, distribute_tensor, implicit_replication, init_device_mesh
from hp_testing import device_type, on_ranks

pytestmark = pytest.mark.framework("torch")
PLACES = torch.arange(4)


def _set_item(plain, x):
    plain[PLACES.to(plain.device)] = x


def _set_rows(plain, x):
    plain[:2] = x[:2]
    plain[2:] = x[2:]


WRITES = {
    "copy_": lambda plain, x: plain.copy_(x),
    "add_": lambda plain, x: plain.add_(x),
    "set_item": _set_item,
    "set_rows": _set_rows,
    "index_add_": lambda plain, x: plain.index_add_(0, PLACES.to(plain.device), x),
    "index_copy_": lambda plain, x: plain.index_copy_(0, PLACES.to(plain.device), x),
    "index_put_": lambda plain, x: plain.index_put_((PLACES.to(plain.device),), x),
    "masked_scatter_": lambda plain, x: plain.masked_scatter_(torch.ones_like(plain, dtype=torch.bool), x),
}


def made(placement):
    mesh = init_device_mesh(device_type(), (2,))
    whole = torch.randn(4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).to(device_type())
    return whole, distribute_tensor(whole, mesh, [placement]).requires_grad_()


@on_ranks(2)
@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("placement", [Replicate(), Shard(0), Shard(1)])
def test_what_is_written_into_a_plain_tensor_has_its_gradient(write, placement):
    whole, x = made(placement)
    plain = torch.zeros_like(whole)
    with implicit_replication():
        WRITES[write](plain, x)
        assert type(plain) is torch.Tensor
        torch.testing.assert_close(plain.detach(), whole, rtol=0, atol=0)
        (plain**3).sum().backward()
    torch.testing.assert_close(x.grad.full_tensor(), 3 * whole**2)


@on_ranks(2)
@pytest.mark.parametrize("write", WRITES)
def test_without_leave_it_is_refused(write):
    whole, x = made(Shard(0))
    with pytest.raises(ValueError, match=r"writing a DTensor of shape \(\d, 3\) into a plain tensor of shape"):
        WRITES[write](torch.zeros_like(whole), x)
    plain = torch.zeros_like(whole)
    WRITES[write](plain, x.full_tensor())
    assert torch.equal(plain, whole)


@on_ranks(2)
@pytest.mark.parametrize("placement", [Replicate(), Shard(0), Shard(1)])
def test_the_places_where_something_holds(placement):
    whole, x = made(placement)
    found = torch.where(x > 0)
    assert [place.full_tensor().tolist() for place in found] == [place.tolist() for place in torch.where(whole > 0)]
    torch.testing.assert_close(torch.where(x > 0, x, 0.0).full_tensor(), whole.clamp(min=0))


@on_ranks(2)
def test_a_thread_that_python_did_not_start_has_the_contexts_of_all():
    """As autograd's, which recomputes blocks on an accelerator."""
    whole, x = made(Shard(0))
    results: list[object] = []

    def add(over):
        try:
            results.append(torch.equal((x + whole).full_tensor(), 2 * whole))
        except ValueError:
            results.append("refused")
        over.set()

    def start(begin):
        over = threading.Event()
        begin(over)
        assert over.wait(60)

    with implicit_replication():
        start(lambda over: _thread.start_new_thread(add, (over,)))
        start(lambda over: threading.Thread(target=add, args=(over,)).start())
    start(lambda over: _thread.start_new_thread(add, (over,)))
    assert results == [True, "refused", "refused"]
