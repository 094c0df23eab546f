"""What needs attention's calls to be intercepted says that it is not on MindSpore."""

from __future__ import annotations

import pytest
from mindspore import mint

from hp_dtensor import init_device_mesh
from hp_styles import (
    AsyncContextParallel,
    AsyncDSASparseAttentionContextParallel,
    DSAIndexerContextParallel,
    DSAIndexerLossContextParallel,
    context_parallel,
    parallelize_module,
)
from hp_testing import device_type, on_ranks


@on_ranks(1)
def test_what_is_for_torch() -> None:
    mesh = init_device_mesh(device_type(), (1,), ("cp",))
    with pytest.raises(
        NotImplementedError, match="MindSpore's attention is not intercepted; apply the style to a Cell"
    ):
        parallelize_module(mint.nn.Linear(2, 2), mesh, AsyncContextParallel(v_proj="v", head_size=2))
    with (
        pytest.raises(NotImplementedError, match="as a block, is for PyTorch only.* use ContextParallel on a Cell"),
        context_parallel(mesh),
    ):
        pass
    for style in (
        DSAIndexerContextParallel(),
        DSAIndexerLossContextParallel(),
        AsyncDSASparseAttentionContextParallel(core="core", projections={"key": "norm"}),
    ):
        with pytest.raises(NotImplementedError, match="context parallelism of sparse attention.* is for PyTorch only"):
            parallelize_module(mint.nn.Linear(2, 2), mesh, style)
