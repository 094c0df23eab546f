"""Parts that don't show the strides of the whole: whether a result is a view or a copy is the same on all ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hp_dtensor import DTensor, Shard, distribute_tensor, init_device_mesh
from hp_dtensor.layout.sharding import contiguous, global_strides, is_thin
from hp_testing import device_type, on_ranks


def test_strides_of_the_whole() -> None:
    assert contiguous((2, 0, 4)) == (4, 4, 1) and contiguous(()) == ()
    for shape, part in (((4, 6), (2, 3)), ((5, 4, 6), (3, 4, 2)), ((4, 1, 6), (4, 1, 5))):
        assert global_strides(contiguous(part), part, shape) == contiguous(shape)
    assert global_strides((1, 3), (3, 2), (6, 4)) == (1, 6)  # turned
    assert global_strides((6, 1), (2, 2), (4, 2)) == (6, 1)  # [:, 1:3] of (4, 6)
    assert global_strides((12, 1), (2, 3), (2, 6)) == (24, 1)  # [:, 1] of (2, 4, 6)
    assert global_strides((0, 1), (4, 3), (4, 6)) == (0, 1)  # expanded


def test_which_parts_are_thin() -> None:
    assert not is_thin((4, 6), [Shard(0)], (2,)) and not is_thin((4, 6), [Shard(0), Shard(1)], (2, 3))
    assert is_thin((3, 6), [Shard(0)], (2,)) and is_thin((1, 6), [Shard(0)], (2,))
    assert not is_thin((8, 6), [Shard(0)], (4,)) and is_thin((9, 6), [Shard(0)], (4,))
    assert is_thin((6, 6), [Shard(0), Shard(0)], (2, 2)) and not is_thin((8, 6), [Shard(0), Shard(0)], (2, 2))


def rand(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(device_type())


VIEWS: dict[str, Any] = {
    "whole": lambda t: t,
    "turned": lambda t: t.transpose(0, 1),
    "permuted": lambda t: t.permute(2, 0, 1),
    "columns": lambda t: t[:, :, 1:3],
    "every other": lambda t: t[:, :, ::2],
    "turned twice": lambda t: t.mT.transpose(1, 2),
    "detached": lambda t: t.transpose(0, 1).detach(),
    "data": lambda t: t.transpose(0, 1).data,
    "real": lambda t: t.swapdims(0, 1).real,
    "middle": lambda t: t[:, 1],
    "new dim": lambda t: t.transpose(0, 1).unsqueeze(1),
    "unbound": lambda t: t.unbind(2)[1],
    "diagonal": lambda t: t.diagonal(0, 1, 2),
}
FLAT: dict[str, Any] = {
    "contiguous": lambda t: t.contiguous(),
    "flatten": lambda t: t.flatten(),
    "reshape": lambda t: t.reshape(-1),
    "last dims": lambda t: t.reshape(t.shape[0], -1),
    "first dims": lambda t: t.reshape(-1, t.shape[-1]),
    "ravel": lambda t: t.ravel(),
}


@pytest.mark.device
@pytest.mark.framework("torch")
@on_ranks(2, 4)
@pytest.mark.parametrize("name", VIEWS)
def test_a_view_on_one_device_is_one_on_all_ranks(name: str) -> None:
    mesh = init_device_mesh(device_type(), (2, 2) if torch.distributed.get_world_size() == 4 else (2,))

    def program(x: Any, flat: Any) -> Any:
        view = VIEWS[name](x)
        made = flat(view)
        made.add_(1.0)
        seen = made * 2
        x.mul_(3.0)
        return x, view, made, seen, made + 0, (made[..., :1] * 2)

    for shape, dim in (((3, 2, 4), 0), ((3, 2, 4), 1), ((2, 3, 4), 0), ((1, 3, 6), 0), ((1, 3, 6), 1)):
        for flat in FLAT.values():
            plain = rand(*shape)
            given = distribute_tensor(plain.clone(), mesh, [Shard(dim)] * mesh.ndim)
            assert VIEWS[name](given).stride() == VIEWS[name](plain).stride()
            expected, got = program(plain, flat), program(given, flat)
            for one, other in zip(got, expected, strict=True):
                assert isinstance(one, DTensor)
                torch.testing.assert_close(one.full_tensor(), other, rtol=1e-12, atol=1e-12)


@pytest.mark.device
@pytest.mark.framework("torch")
@on_ranks(2)
def test_columns_that_are_flattened_are_a_copy() -> None:
    mesh = init_device_mesh(device_type(), (2,))
    for make in (lambda t: t, lambda t: distribute_tensor(t, mesh, [Shard(0)])):
        x = make(rand(5, 6))
        assert x[:, 1:3].stride() == (6, 1)
        x[:, 1:3].reshape(-1).zero_()
        x[:, ::3].diagonal().ravel().zero_()  # reshape would give a view
        whole = x.full_tensor() if isinstance(x, DTensor) else x
        torch.testing.assert_close(whole, rand(5, 6), rtol=0, atol=0)
