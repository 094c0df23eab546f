"""Parallel styles: tensor and sequence parallelism declared on modules.

Names, defaults and behaviour are those of ``torch.distributed.tensor.parallel``; gradients of replicated parameters are
right wherever they are used.
"""

from hp_styles.api import parallelize_module
from hp_styles.styles import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
)

__all__ = [
    "ColwiseParallel",
    "ParallelStyle",
    "PrepareModuleInput",
    "PrepareModuleInputOutput",
    "PrepareModuleOutput",
    "RowwiseParallel",
    "SequenceParallel",
    "parallelize_module",
]
