"""Context parallelism says that it is not on MindSpore."""

from __future__ import annotations

import pytest
from mindspore import Tensor, mint

from hp_dtensor import init_device_mesh
from hp_styles import (
    AsyncDSASparseAttentionContextParallel,
    ContextParallel,
    DSAIndexerContextParallel,
    DSAIndexerLossContextParallel,
    context_parallel_shard,
    parallelize_module,
)
from hp_testing import device_type, on_ranks


@on_ranks(1)
def test_context_parallel_is_for_torch() -> None:
    mesh = init_device_mesh(device_type(), (1,), ("cp",))
    with pytest.raises(NotImplementedError, match="context parallelism is for PyTorch"):
        parallelize_module(mint.nn.Linear(2, 2), mesh, ContextParallel())
    with pytest.raises(NotImplementedError, match="context parallelism is for PyTorch"):
        context_parallel_shard(Tensor([[1, 2]]), mesh)
    for style in (
        DSAIndexerContextParallel(),
        DSAIndexerLossContextParallel(),
        AsyncDSASparseAttentionContextParallel(core="core", projections={"key": "norm"}),
    ):
        with pytest.raises(NotImplementedError, match="context parallelism is for PyTorch"):
            parallelize_module(mint.nn.Linear(2, 2), mesh, style)
