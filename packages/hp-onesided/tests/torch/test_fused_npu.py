"""An NPU's fused operators: torch_npu's own calls are made, and where a limit stands against them the plain ones."""

from __future__ import annotations

import os
import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from hp_onesided import choose, gathered_linear, scattered_linear
from hp_platform import get_platform
from hp_testing import device_type, on_ranks

pytestmark = [
    pytest.mark.device,
    pytest.mark.not_on("torch-cpu", "torch-cuda", reason="of torch_npu's fused operators"),
]

FUNCTIONS = {"gather": gathered_linear, "scatter": scattered_linear}
NAMES = {"gather": "npu_all_gather_base_mm", "scatter": "npu_mm_reduce_scatter_base"}


class Calls(TorchDispatchMode):
    """Notes the calls of torch_npu's operators."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.overloadpacket.__name__ in NAMES.values():
            self.names.append(function.overloadpacket.__name__)
        return function(*args, **(kwargs or {}))


def draw(*shape: int, seed: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Draw whole numbers, few enough that bfloat16's sums and products of them are exact."""
    values = torch.randint(-1, 2, shape, generator=torch.Generator().manual_seed(seed))
    return (values * (torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < 0.1)).to(dtype)


def run(op: str, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None, group: Any, kind: Any = None) -> Any:
    """Return the calls made, and the output and the gradients."""
    leaves = [each.to(device_type()).requires_grad_() for each in (x, w, b) if each is not None]
    with Calls() as calls:
        y = FUNCTIONS[op](*leaves, group=group, dim=1, kind=kind)
        y.backward((torch.arange(y.numel()) % 3 - 1).view(y.shape).to(y))
    return calls.names, [y.detach().cpu(), *(leaf.grad.cpu() for leaf in leaves)]  # type: ignore[union-attr]


@on_ranks(2)
@pytest.mark.parametrize("op", NAMES)
def test_the_operators_are_called_and_have_the_plain_result(op: str) -> None:
    group, rank = get_platform().groups.default_group(), get_platform().groups.rank()
    x, w = draw(2, 8, 256, seed=rank), draw(256, 256, seed=7 + rank)
    b = draw(256, seed=20)
    rows = 32 if op == "gather" else 16
    assert choose(device_type(), (rows, 256, 256), x.dtype, group, op=op) == ("kernel", f"torch_npu.{NAMES[op]}")
    names, got = run(op, x, w, b, group)
    other = "scatter" if op == "gather" else "gather"
    assert names == [NAMES[op], NAMES[other]], "forward, and the gradient of x"
    plain_names, want = run(op, x, w, b, group, "plain")
    assert not plain_names
    for own, other_bits in zip(got, want, strict=True):
        torch.testing.assert_close(own, other_bits, rtol=0, atol=0)
    assert run(op, x.transpose(0, 1).contiguous().transpose(0, 1), w, None, group)[0] == names, "made contiguous"
    whole = [each.double() for each in (draw(2, 8, 256, seed=0), draw(2, 8, 256, seed=1))]
    if op == "gather":
        exact = F.linear(torch.cat(whole, 1), w.double(), b.double())
    else:
        exact = sum(F.linear(each, draw(256, 256, seed=7 + at).double()) for at, each in enumerate(whole))
        exact = exact.chunk(2, 1)[rank] + b.double()  # type: ignore[union-attr]
    torch.testing.assert_close(got[0].double(), exact, rtol=2**-7, atol=0.125)


LIMITS = {
    "dtype": ((8, 256, 256), torch.float32, "takes float16 and bfloat16, got float32"),
    "few features": ((8, 255, 256), torch.bfloat16, "takes 256 to 65534 input features, got 255"),
    "many features": ((2, 65535, 1), torch.float16, "takes 256 to 65534 input features, got 65535"),
    "no output features": ((8, 256, 0), torch.bfloat16, "takes no product without elements"),
}


@on_ranks(2)
@pytest.mark.parametrize("op", NAMES)
@pytest.mark.parametrize("limit", LIMITS)
def test_a_limit_is_named_and_what_violates_it_is_not_sent(op: str, limit: str) -> None:
    group, rank = get_platform().groups.default_group(), get_platform().groups.rank()
    (rows, features, out), dtype, text = LIMITS[limit]
    x, w = draw(1, rows, features, seed=rank, dtype=dtype), draw(out, features, seed=9 + rank, dtype=dtype)
    refused(op, x, w, group, text)
    if "HYPER_PARALLEL_NPU_SIM" in os.environ:  # its operators have the same limits, which CANN names in other words
        import torch_npu

        name = group._get_backend(torch.device("npu")).get_hccl_comm_name(torch.npu.current_device())
        with pytest.raises(RuntimeError, match=text.partition(",")[0]):
            getattr(torch_npu, NAMES[op])(x[0].npu(), w.t().npu(), name, 2)


def refused(op: str, x: torch.Tensor, w: torch.Tensor, group: Any, text: str) -> None:
    """The default does it in chunks, with the bits of plain; who insists is told the limit."""
    rows = x.numel() // x.shape[-1] * (group.size() if op == "gather" else 1)
    kind, reason = choose(device_type(), (rows, x.shape[-1], len(w)), x.dtype, group, op=op)
    assert kind == "chunks" and reason.startswith(f"{NAMES[op]} {text}")
    names, got = run_forward(op, x, w, group)
    plain_names, want = run_forward(op, x, w, group, "plain")
    assert names == plain_names == [] and torch.equal(got, want)
    with pytest.raises(ValueError, match=re.escape(f'kind="kernel" can\'t be done: {NAMES[op]} {text}')):
        FUNCTIONS[op](x.to(device_type()), w.to(device_type()), group=group, dim=1, kind="kernel")


def run_forward(op: str, x: torch.Tensor, w: torch.Tensor, group: Any, kind: Any = None) -> Any:
    with Calls() as calls, torch.no_grad():
        y = FUNCTIONS[op](x.to(device_type()), w.to(device_type()), group=group, dim=1, kind=kind)
    return calls.names, y.cpu()


@on_ranks(3)
@pytest.mark.parametrize("op", NAMES)
def test_numbers_of_ranks(op: str) -> None:
    """Three are too many; of a group of two among them the ranks find their own communicator."""
    groups, rank = get_platform().groups, get_platform().groups.rank()
    x, w = draw(1, 6, 256, seed=rank), draw(256, 256, seed=9 + rank)
    refused(op, x, w, groups.default_group(), "takes (2, 4, 8) ranks on A2, got 3")
    if rank:
        pair = groups.second_group([1, 2])
        names, got = run(op, x, w, None, pair)
        assert len(names) == 2
        for own, other in zip(got, run(op, x, w, None, pair, "plain")[1], strict=True):
            torch.testing.assert_close(own, other, rtol=0, atol=0)
        groups.destroy(pair)


@on_ranks(2)
@pytest.mark.parametrize("op", NAMES)
def test_an_operator_that_is_not_there(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch_npu

    monkeypatch.delattr(torch_npu, NAMES[op])
    group, rank = get_platform().groups.default_group(), get_platform().groups.rank()
    x, w = draw(1, 8, 256, seed=rank), draw(256, 256, seed=9 + rank)
    assert choose("npu", (8, 256, 256), x.dtype, group, op=op) == ("chunks", f"this torch_npu has no {NAMES[op]}")
    assert run_forward(op, x, w, group)[0] == []
