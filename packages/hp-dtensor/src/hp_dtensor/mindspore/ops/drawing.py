"""Kernels that draw: the mask of a shard is the part of the one that one device draws.

Every rank draws for the whole tensor, for a moment, and keeps its part; so the ranks' seeds and their states must
agree, as those of `rand` and of replicated tensors do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mindspore import Tensor, ops

from hp_dtensor.layout.placements import Replicate
from hp_dtensor.mindspore.backward.autograd import local_mode
from hp_dtensor.mindspore.dtensor import DTensor, redistribute, wrap
from hp_dtensor.mindspore.moves.redistribute import execute

DRAWING = frozenset({"Dropout", "DropoutExt"})
"""Names of kernels: of a tensor and more, the result and its mask."""


def draw(run: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Dropout of a DTensor, laid out as it is (a Partial is reduced first).

    Args:
        run: calls the kernel: ``run(positional values, keyword values)``.
        args: its positional arguments, the tensor first.
        kwargs: its keyword arguments.

    Returns:
        The result and the mask's factors, DTensors.
    """
    x: DTensor = args[0]
    spec = x._spec.with_placements([Replicate() if p.is_partial() else p for p in x._spec.placements])
    x = x if spec is x._spec else redistribute(x, spec)
    with local_mode():
        whole: Tensor = run([ops.ones(spec.shape, x.dtype), *args[1:]], kwargs)[0]
        factors = execute(ops.stop_gradient(whole), spec.with_placements([Replicate()] * spec.mesh.ndim), spec)
    factors = wrap(factors, spec)
    return x * factors, factors
