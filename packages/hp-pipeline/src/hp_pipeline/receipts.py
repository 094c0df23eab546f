"""The messages that a rank had received before it sent another, so that the memory of what was sent to it is let go."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hp_pipeline.steps import TRANSFERS, MetaStep, MetaStepType, Order

__all__ = ["Key", "Piece", "receipts"]

_T = MetaStepType
Key = tuple[int, int, bool]
"""A channel: from stage, to stage, forward."""
Piece = tuple[int, int]
"""A micro-batch, and a slice of its sequences."""


def receipts(
    order: Order, placement: Sequence[int], rank: int, keys: Callable[[MetaStep], Sequence[Key]]
) -> dict[tuple[Key, Piece], list[tuple[Key, Piece]]]:
    """List for each message that a rank receives those of its own that its sender must have received before.

    Args:
        order: all steps of all ranks.
        placement: the rank of each stage.
        rank: this rank.
        keys: the channels of a send or receive.
    """
    result: dict[tuple[Key, Piece], list[tuple[Key, Piece]]] = {}
    for other, steps in order.items():
        received: list[tuple[Key, Piece]] = []
        for step in steps if other != rank else ():
            if step.step_type not in TRANSFERS or step.micro_index is None:
                continue
            piece = step.micro_index, step.seq_index
            for key in keys(step):
                if rank not in (placement[key[0]], placement[key[1]]):
                    continue
                if step.step_type in (_T.FWD_RECV, _T.BWD_RECV):
                    received.append((key, piece))
                else:
                    result[key, piece], received = received, []
    return result
