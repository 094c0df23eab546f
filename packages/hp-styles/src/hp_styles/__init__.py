"""Parallel styles: tensor and sequence parallelism declared on modules.

Names, defaults and behaviour are those of ``torch.distributed.tensor.parallel``; gradients of replicated parameters are
right wherever they are used.
"""

from hp_styles.api import loss_parallel, parallelize_module
from hp_styles.base import ParallelStyle
from hp_styles.context.sparse import (
    AsyncDSAIndexerContextParallel,
    AsyncDSAIndexerLossContextParallel,
    AsyncDSASparseAttentionContextParallel,
    DSAIndexerContextParallel,
    DSAIndexerLossContextParallel,
    DSASparseAttentionContextParallel,
)
from hp_styles.context.styles import (
    AsyncContextParallel,
    ContextParallel,
    context_parallel,
    context_parallel_shard,
    context_parallel_unshard,
)
from hp_styles.names import sequence_parallel_plan
from hp_styles.tensor.meshes import ThreeDimensionalParallel, TwoDimensionalParallel
from hp_styles.tensor.styles import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
)

__all__ = [
    "AsyncContextParallel",
    "AsyncDSAIndexerContextParallel",
    "AsyncDSAIndexerLossContextParallel",
    "AsyncDSASparseAttentionContextParallel",
    "ColwiseParallel",
    "ContextParallel",
    "DSAIndexerContextParallel",
    "DSAIndexerLossContextParallel",
    "DSASparseAttentionContextParallel",
    "ParallelStyle",
    "PrepareModuleInput",
    "PrepareModuleInputOutput",
    "PrepareModuleOutput",
    "RowwiseParallel",
    "SequenceParallel",
    "ThreeDimensionalParallel",
    "TwoDimensionalParallel",
    "context_parallel",
    "context_parallel_shard",
    "context_parallel_unshard",
    "loss_parallel",
    "parallelize_module",
    "sequence_parallel_plan",
]
