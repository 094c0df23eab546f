"""The style strings of a plan as style objects; activations stay DTensors from one module to the next."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from hp_dtensor import Replicate, Shard
from hp_styles import ColwiseParallel, ParallelStyle, PrepareModuleOutput, RowwiseParallel, SequenceParallel

_COLWISE = {"output_layouts": Shard(-1), "use_local_output": False}
_GATHERED = {"output_layouts": Replicate(), "use_local_output": False}
_SEQUENCE = {"output_layouts": Shard(1), "use_local_output": False}

# A style that needs two objects applies them one after the other.
_MADE: dict[str, tuple[Callable[[], ParallelStyle], ...]] = {
    "colwise": (lambda: ColwiseParallel(**_COLWISE),),
    "colwise_gather_output": (lambda: ColwiseParallel(**_GATHERED),),
    "rowwise": (lambda: RowwiseParallel(**_GATHERED),),
    "rowwise_split_input": (lambda: RowwiseParallel(input_layouts=Replicate(), **_GATHERED),),
    "rowwise_scatter_output": (lambda: RowwiseParallel(**_SEQUENCE),),
    "embedding_rowwise": (lambda: RowwiseParallel(input_layouts=Replicate(), **_GATHERED),),
    "embedding_rowwise_scatter_output": (lambda: RowwiseParallel(input_layouts=Replicate(), **_SEQUENCE),),
    "embedding_colwise": (lambda: ColwiseParallel(**_GATHERED),),
    "sequence": (lambda: SequenceParallel(use_local_output=False),),
    "sequence_gather_output": (
        lambda: SequenceParallel(use_local_output=False),
        lambda: PrepareModuleOutput(
            output_layouts=Shard(1), desired_output_layouts=Replicate(), use_local_output=False
        ),
    ),
    "replicate": (),  # What no style shards is replicated.
}


def style_passes(styled: Mapping[str, str]) -> list[dict[str, ParallelStyle]]:
    """Module name -> style object, one mapping for each call of `parallelize_module` that is needed.

    Args:
        styled: module name -> style string.
    """
    made = {name: [make() for make in _MADE[style]] for name, style in styled.items()}
    count = max((len(styles) for styles in made.values()), default=0)
    return [{name: styles[index] for name, styles in made.items() if index < len(styles)} for index in range(count)]
