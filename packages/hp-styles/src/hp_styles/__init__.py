"""Parallel styles: tensor and sequence parallelism declared on modules.

Names, defaults and behaviour are those of ``torch.distributed.tensor.parallel``; gradients of replicated parameters are
right wherever they are used.
"""

from typing import TYPE_CHECKING

from hp_platform import lazy_exports
from hp_styles.styles import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
)

if TYPE_CHECKING:
    from hp_styles.torch.api import parallelize_module

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

__getattr__, __dir__ = lazy_exports(__name__, {"parallelize_module": "api"})
