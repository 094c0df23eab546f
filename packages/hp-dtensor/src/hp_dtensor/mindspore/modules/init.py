"""Building a Cell without memory, and initializing only the local tensors."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from mindspore import nn
from mindspore.nn.utils import no_init_parameters

from hp_dtensor.layout.placements import Replicate
from hp_dtensor.mindspore.dtensor import unwrap, wrap
from hp_dtensor.mindspore.modules.parameter import DParameter, set_local
from hp_dtensor.mindspore.moves.redistribute import execute
from hp_platform import get_platform


@contextlib.contextmanager
def init_empty_weights() -> Iterator[None]:
    """Build Cells with parameters without values. Shard them, then call ``init_parameters``.

    Example:
        >>> with init_empty_weights():
        ...     model = Model()
        >>> parallelize_module(model, mesh, plan)
        >>> init_parameters(model)
    """
    with no_init_parameters():
        yield


@contextlib.contextmanager
def init_on_device(device: Any) -> Iterator[None]:
    """Create parameters of Cells on ``device``: "meta" as in `init_empty_weights`, or the process's own device.

    Raises:
        ValueError: another device; a MindSpore process has only one.
    """
    kind, own = str(device).lower().partition(":")[0], get_platform().devices.kind
    if kind == "meta":
        with init_empty_weights():
            yield
    elif {"ascend": "npu", "gpu": "cuda"}.get(kind, kind) == own:
        yield
    else:
        raise ValueError(
            f"init_on_device({device!r}): a MindSpore process has one device, here {own!r}; pass {own!r}, or 'meta' to"
            " build without memory"
        )


def init_parameters(module: nn.Cell) -> nn.Cell:
    """Give a Cell that was built by ``init_empty_weights`` its initial values, with only local tensors in memory.

    The values are those of the undistributed Cell, built with the same seed: each parameter's initializer runs for the
    global tensor, in the order of construction, and the local tensor is kept.

    Args:
        module: the Cell; parameters that have values keep them.
    """
    for parameter in module.get_parameters():
        if not parameter.has_init:
            continue
        if not isinstance(parameter, DParameter):
            parameter.init_data()
            continue
        spec = parameter._spec
        plain = unwrap(parameter)
        try:
            plain.init_data()  # type: ignore[attr-defined]
            replicated = spec.with_placements([Replicate()] * spec.mesh.ndim)
            set_local(plain, execute(plain.copy(), replicated, spec))
        finally:
            wrap(plain, spec)
    return module
