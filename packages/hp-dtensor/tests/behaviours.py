"""What the tests of behaviours share: tensors, DTensors of them, comparison with one device, collectives counted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from hp_dtensor import DTensor, Partial, Placement, Replicate, distribute_tensor, init_device_mesh
from hp_platform import count_collectives
from hp_testing import device_type

__all__ = ["P", "R", "close", "counted", "like_one_device", "line", "place", "rand"]

R, P = Replicate(), Partial()


def rand(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape) * 8 + len(shape))
    return torch.randn(shape, generator=generator, dtype=dtype).to(device_type())


def line(ranks: int) -> Any:
    """A mesh of one axis."""
    return init_device_mesh(device_type(), (ranks,))


def place(whole: torch.Tensor, mesh: Any, *placements: Placement, grad: bool = False) -> DTensor:
    made = distribute_tensor(whole, mesh, placements, src_data_rank=None)
    return made.requires_grad_() if grad else made


def close(got: Any, expected: Any, what: Any = "") -> None:
    got = got.full_tensor() if isinstance(got, DTensor) else got
    torch.testing.assert_close(got, expected, msg=lambda text: f"{what}: {text}")


def counted(run: Callable[[], Any]) -> tuple[Any, dict[str, int]]:
    """The result, and how many collectives of each kind it took."""
    with count_collectives() as counts:
        made = run()
    return made, dict(counts)


def like_one_device(
    call: Callable[..., Any], wholes: Sequence[torch.Tensor], mesh: Any, placements: Sequence[Sequence[Placement]]
) -> tuple[DTensor, dict[str, int]]:
    """The value and the gradients of ``call`` are those of one device; its result, and what forward communicated."""
    what = f"{placements} on {mesh.shape}"
    plain = [whole.clone().requires_grad_(whole.is_floating_point()) for whole in wholes]
    expected = call(*plain)
    given = [place(w, mesh, *p, grad=w.is_floating_point()) for w, p in zip(wholes, placements, strict=True)]
    made, counts = counted(lambda: call(*given))
    assert made.shape == expected.shape, what
    close(made, expected, what)
    if expected.requires_grad:
        weights = rand(*expected.shape)
        (expected * weights).sum().backward()
        (made * place(weights, mesh, *[R] * mesh.ndim)).sum().backward()
        for tensor, truth in zip(given, plain, strict=True):
            want = truth.grad
            if want is None:
                continue
            for axis, placement in enumerate(tensor.placements):  # that of a rank's own part of an average
                want = want / (mesh.shape[axis] if placement.is_partial("avg") else 1)
            assert tensor.grad is not None or not want.any(), what
            close(want * 0 if tensor.grad is None else tensor.grad, want, f"gradient, {what}")
    return made, counts
