"""What other implementations got wrong without a word: each against the program on one device."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hp_dtensor import DTensor, Partial, Placement, Replicate, Shard, distribute_module, distribute_tensor
from hp_dtensor import init_device_mesh as mesh_of
from hp_platform import count_collectives
from hp_testing import device_type, on_ranks

pytestmark = pytest.mark.framework("torch")
PLACEMENTS = [Replicate(), Shard(0), Shard(1)]


def rand(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).to(device_type())


def placed(whole: torch.Tensor, placement: Placement) -> DTensor:
    mesh = mesh_of(device_type(), (2,))
    return distribute_tensor(whole, mesh, [placement]).requires_grad_(whole.is_floating_point())


def close(got: Any, expected: torch.Tensor) -> None:
    torch.testing.assert_close(got.full_tensor() if isinstance(got, DTensor) else got, expected)


@on_ranks(2)
@pytest.mark.parametrize("image", [Replicate(), Shard(0), Shard(1), Shard(2)], ids=repr)
@pytest.mark.parametrize("weight", [Replicate(), Shard(0), Shard(1), Shard(2)], ids=repr)
@pytest.mark.parametrize("groups", [1, 2])
def test_convolution_with_everything_sharded(image: Placement, weight: Placement, groups: int) -> None:
    x, w, b = rand(3, 4, 6), rand(6, 4 // groups, 3), rand(6)
    plain = [t.clone().requires_grad_() for t in (x, w, b)]
    expected = F.conv1d(*plain, padding=1, groups=groups)
    expected.square().sum().backward()
    given = [placed(x, image), placed(w, weight), placed(b, Shard(0))]
    made = F.conv1d(*given, padding=1, groups=groups)
    made.square().sum().backward()
    close(made, expected)
    for got, want in zip(given, plain):
        close(got.grad, want.grad)


@on_ranks(2)
def test_a_partial_value_is_never_read_as_it_lies() -> None:
    mesh = mesh_of(device_type(), (2,))

    def part() -> DTensor:
        return DTensor.from_local(
            torch.full((2,), 1.0 + mesh.get_local_rank(), device=device_type()), mesh, [Partial()]
        )

    three = torch.full((2,), 3.0, device=device_type())
    p, q = part(), part()
    close(p * q, three * three)
    close(p * p, three * three)
    close(p @ q, three @ three)
    close(torch.exp(p), torch.exp(three))
    close(p + 1, three + 1)
    close(torch.relu(-p), torch.zeros_like(three))
    assert p[0].item() == 3 and bool(p[0] > 2) and float(p[1]) == 3
    assert p.tolist() == [3, 3] and f"{p[0]:.1f}" == "3.0"
    assert p.max().item() == 3


@on_ranks(2)
@pytest.mark.parametrize("placement", PLACEMENTS, ids=repr)
def test_autocast_and_hooks_of_saved_tensors(placement: Placement) -> None:
    x, w = rand(4, 6), rand(5, 6)
    with torch.autocast(device_type(), dtype=torch.bfloat16):
        made, expected = F.linear(placed(x, placement), placed(w, Shard(0))), F.linear(x, w)
    assert made.dtype is expected.dtype is torch.bfloat16
    torch.testing.assert_close(made.full_tensor(), expected, rtol=0.05, atol=0.1)
    kept = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)
        return tensor

    given, plain = placed(x, placement), x.clone().requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        (given @ placed(w, Replicate()).T).square().sum().backward()
    (plain @ w.T).square().sum().backward()
    close(given.grad, plain.grad)
    assert kept


@on_ranks(2)
@pytest.mark.parametrize("use", [0, 1, 2])
def test_double_backward_through_a_sharded_layer(use: int) -> None:
    def second(*given: Any) -> list[Any]:
        first = torch.autograd.grad(F.linear(*given).square().sum(), given, create_graph=True)
        (first[use] * first[use]).sum().backward()
        return [x.grad for x in given]

    wholes = rand(4, 6).double(), rand(5, 6).double(), rand(5).double()
    expected = second(*(whole.clone().requires_grad_() for whole in wholes))
    for x, w, b in itertools.product(PLACEMENTS, PLACEMENTS, PLACEMENTS[:2]):
        made = second(*(placed(whole, p) for whole, p in zip(wholes, (x, w, b))))
        for got, want in zip(made, expected):
            assert (got is None) == (want is None)
            if want is not None:
                close(got, want)


@on_ranks(2)
@pytest.mark.parametrize("placement", PLACEMENTS, ids=repr)
def test_a_product_with_the_hessian(placement: Placement) -> None:
    """By two backwards, the second through the first one's ``grad_outputs``."""
    x, direction = rand(4, 6).double(), rand(6, 4).double()

    def product(x: Any, direction: Any) -> Any:
        out = (x @ x.T).exp()
        start = torch.ones_like(out).requires_grad_()
        (first,) = torch.autograd.grad(out, x, start, create_graph=True)
        (made,) = torch.autograd.grad(first, start, direction.T)
        return made

    expected = product(x.clone().requires_grad_(), direction)
    close(product(placed(x, placement), placed(direction, placement).detach()), expected)


@on_ranks(2)
def test_hooks_and_functional_calls_of_a_distributed_module() -> None:
    mesh = mesh_of(device_type(), (2,))
    model, x = nn.Linear(6, 5, device=device_type()), rand(4, 6)
    expected = model(x)
    weights = {name: placed(p.detach(), Shard(0)) for name, p in model.named_parameters()}
    close(torch.func.functional_call(model, weights, (placed(x, Replicate()),)), expected)
    distribute_module(model, mesh)
    seen: list[str] = []
    model.register_forward_pre_hook(lambda module, args: seen.append("before"))
    model.register_forward_hook(lambda module, args, out: seen.append(type(out).__name__))
    model.register_full_backward_hook(lambda module, grad_in, grad_out: seen.append("backward"))
    model(placed(x, Shard(0))).sum().backward()
    assert seen == ["before", "DTensor", "backward"]
    close(model.bias.grad, torch.full((5,), 4.0, device=device_type()))


@on_ranks(2)
@pytest.mark.parametrize("placement", PLACEMENTS, ids=repr)
def test_writing_into_views_of_views(placement: Placement) -> None:
    x = rand(4, 6)
    given, plain = placed(x, placement).detach(), x.clone()
    for tensor in (given, plain):
        tensor.transpose(0, 1).unsqueeze(0).mul_(2.0)
        tensor[:][:].add_(1.0)
    close(given, plain)


def reshaped_alike(reshape: Any) -> None:
    mesh, x = mesh_of(device_type(), (3,)), rand(4, 1, 6)
    expected = reshape(x.clone())
    for placement in (Replicate(), Shard(0), Shard(2)):
        given = distribute_tensor(x, mesh, [placement])
        assert reshape(given) is given
        close(given, expected)
        close(given + 1, expected + 1)


@on_ranks(3)
def test_reshaping_in_place_is_of_the_whole() -> None:
    """Parts of size 1 stay where the whole has more, and what would move is refused on all ranks alike."""
    reshaped_alike(lambda t: t.squeeze_())
    reshaped_alike(lambda t: t.squeeze_(0))
    reshaped_alike(lambda t: t.unsqueeze_(1))
    sharded = distribute_tensor(rand(4, 1, 6), mesh_of(device_type(), (3,)), [Shard(1)])
    with pytest.raises(
        NotImplementedError, match="squeeze_ of a DTensor of shape .* it would have to be redistributed"
    ):
        sharded.squeeze_(1)
    close(sharded.squeeze(1), rand(4, 1, 6).squeeze(1))


@on_ranks(3)
def test_transposing_in_place() -> None:
    reshaped_alike(lambda t: t.transpose_(0, 2))
    reshaped_alike(lambda t: t.squeeze_(1).t_())


@on_ranks(3)
@pytest.mark.not_on("torch-cuda", "torch-npu", reason="an assertion on the device ends the process")
@pytest.mark.parametrize("rows", [7, 2], ids=["rows on each", "rows on two"])
@pytest.mark.parametrize("wrong", ["after", "far after", "before"])
def test_an_index_outside_of_a_sharded_vocabulary(rows: int, wrong: str) -> None:
    """Refused on all ranks alike, before anything is sent."""
    mesh, place = mesh_of(device_type(), (3,)), {"after": rows, "far after": rows + 9, "before": -1}[wrong]
    table = distribute_tensor(rand(rows, 4), mesh, [Shard(0)]).requires_grad_()
    index = distribute_tensor(torch.tensor([[1, 0], [place, 1]], device=device_type()), mesh, [Replicate()])
    with count_collectives() as counts, pytest.raises(IndexError, match="index out of range in self"):
        torch.nn.functional.embedding(index, table)
    assert not counts
    index = distribute_tensor(index.to_local().clamp(0, rows - 1), mesh, [Replicate()])
    torch.nn.functional.embedding(index, table).sum().backward()
    assert table.grad is not None and table.grad.full_tensor().sum() == 16


@on_ranks(3)
@pytest.mark.parametrize("rows", [6, 4, 2])
def test_an_index_outside_of_a_gathered_dim(rows: int) -> None:
    """Refused on all ranks alike, those that have none of the dim included, before anything is sent."""
    mesh = mesh_of(device_type(), (3,))
    x = distribute_tensor(rand(rows, 4), mesh, [Shard(0)])
    for wrong in (rows, -1):
        index = distribute_tensor(torch.tensor([[0, wrong, 1, 0]], device=device_type()), mesh, [Replicate()])
        with count_collectives() as counts, pytest.raises(RuntimeError, match="out of bounds"):
            torch.gather(x, 0, index)
        assert not counts
    index = torch.tensor([[0, rows - 1, 1, 0]], device=device_type())
    wanted = torch.gather(x.full_tensor(), 0, index)
    assert torch.equal(torch.gather(x, 0, distribute_tensor(index, mesh, [Replicate()])).full_tensor(), wanted)


@on_ranks(2)
def test_meshes_of_one_shape_are_told_apart() -> None:
    x = rand(4, 6)
    one, other = (
        mesh_of(device_type(), (2,), mesh_dim_names=("tp",)),
        mesh_of(device_type(), (2,), mesh_dim_names=("dp",)),
    )
    assert one != other
    for call in (torch.add, torch.kron):  # by a rule, and on gathered values
        with pytest.raises(ValueError, match="operands are on different meshes"):
            call(distribute_tensor(x, one, [Shard(0)]), distribute_tensor(x, other, [Shard(0)]))
        moved = distribute_tensor(x, other, [Shard(0)]).redistribute(one, [Shard(0)])
        close(call(distribute_tensor(x, one, [Shard(0)]), moved), call(x, x))


@on_ranks(2)
def test_group_norm_of_a_part_with_one_value_a_group() -> None:
    mesh = mesh_of(device_type(), (2,))
    whole = torch.arange(6.0, dtype=torch.float64).reshape(3, 2, 1)
    for groups in (1, 2):
        got = F.group_norm(distribute_tensor(whole, mesh, [Shard(0)]), groups)
        torch.testing.assert_close(got.full_tensor().cpu(), F.group_norm(whole, groups))
    with pytest.raises(ValueError, match="Expected more than 1 value per channel when training"):
        F.group_norm(distribute_tensor(whole[:1], mesh, [Shard(0)]), 2)


@on_ranks(2)
@pytest.mark.parametrize("shape", [(8, 6), (6, 8), (7, 5)], ids=str)
@pytest.mark.parametrize("place", PLACEMENTS, ids=repr)
def test_torchs_muon_orthogonalizes_the_whole_matrix(
    place: Placement, shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not each shard. It computes in bfloat16, whose rounding differs by the layout; in float64 nothing else does."""
    monkeypatch.setattr(torch.Tensor, "bfloat16", lambda self: self.double())
    whole, gradients = rand(*shape).double(), [rand(*shape, n)[..., 0].double() for n in (1, 2, 3)]
    plain = nn.Parameter(whole.clone())
    cut = nn.Parameter(distribute_tensor(whole, mesh_of(device_type(), (2,)), [place]))
    for weight in (plain, cut):
        optimizer = torch.optim.Muon([weight], lr=0.1)
        for gradient in gradients:
            mesh = mesh_of(device_type(), (2,))
            weight.grad = gradient.clone() if weight is plain else distribute_tensor(gradient, mesh, [place])
            optimizer.step()
    torch.testing.assert_close(cut.detach().full_tensor(), plain.detach(), rtol=1e-12, atol=1e-12)
