"""When saved storages are on the device, under each policy: the model of memory that planning and replay share.

Note [Where the peak is]
    Blocks run one after the other, in backward the other way round. What is kept stays from its making to its use. What
    is computed again is there from the begin of its block's backward to its use. What is swapped is there while its
    block and the next one are in their forward, and again while the next one and its block are in their backward
    (`SwapManager`). So memory only falls inside a block's backward, and grows where one begins: there it is compared
    with the budget. A block's forward is no higher than its backward's begin.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hp_offload.policies import CheckpointPolicy
from hp_offload.saved import Saved, block_of

KEEP, SWAP, RECOMPUTE = CheckpointPolicy.MUST_SAVE, CheckpointPolicy.MUST_SWAP, CheckpointPolicy.MUST_RECOMPUTE


class Blocks:
    """The blocks of a step, in the order of forward.

    Attributes:
        names: of the blocks.
        index: the block of each saved storage.
        begins: when each block's backward begins.
        forward: seconds of each block's forward.
        backward: seconds of each block's backward.
        rerun: seconds that each block's second run takes whatever is kept.
        saved: the storages, aliases left out.
    """

    def __init__(self, saved: Sequence[Saved]) -> None:
        self.saved = [each for each in saved if each.alias_of is None]
        by_block: dict[str, list[Saved]] = {}
        for each in self.saved:
            by_block.setdefault(block_of(each.site), []).append(each)
        self.names = sorted(by_block, key=lambda name: max(each.made_at for each in by_block[name]))
        place = {name: index for index, name in enumerate(self.names)}
        self.index = [place[block_of(each.site)] for each in self.saved]
        self.begins = [min(each.needed_at for each in by_block[name]) for name in self.names]
        ends = [max(each.made_at for each in by_block[name]) for name in self.names]
        self.rerun = [sum(each.rerun for each in by_block[name]) for name in self.names]
        self.end = max((each.needed_at for each in self.saved), default=0.0)
        self.forward = [end - before for end, before in zip(ends, [0.0, *ends])]
        following = [self.end, *self.begins]  # backward goes on to the block before
        self.backward = [max(0.0, after - begin) for begin, after in zip(self.begins, following)]

    def choices(self, number: int) -> list[CheckpointPolicy]:
        """List the policies that a storage may have."""
        each = self.saved[number]
        swap = each.swappable and self.index[number] < len(self.names) - 1
        again = not math.isinf(each.recompute)
        return [KEEP, *([SWAP] if swap else []), *([RECOMPUTE] if again else [])]

    def present(self, number: int, policy: CheckpointPolicy, block: int) -> bool:
        """Tell if a storage is on the device when a block's backward begins."""
        each, own = self.saved[number], self.index[number]
        time = self.begins[block]
        if each.needed_at < time:
            return False
        if policy is KEEP:
            return True
        first = own + 1 if policy is SWAP else own  # the block whose backward brings it
        return time >= self.begins[min(first, len(self.names) - 1)]

    def stalls(self, block: int, swapped: int, bandwidth: float) -> float:
        """Count the seconds that a block's copies take beyond the block after it, out and back."""
        if not swapped:
            return 0.0
        copy = swapped / bandwidth
        return max(0.0, copy - self.forward[block + 1]) + max(0.0, copy - self.backward[block + 1])


@dataclass(frozen=True)
class Replay:
    """A step under policies.

    Attributes:
        peak: the most bytes on the device.
        step: seconds.
    """

    peak: int
    step: float


def replay(
    saved: Sequence[Saved], policies: Mapping[str, CheckpointPolicy], bandwidth: float, *, in_flight: int = 1
) -> Replay:
    """Go through a step's memory and time under policies; see Note [Where the peak is].

    Args:
        saved: what the step saves.
        policies: of each site.
        bandwidth: bytes a second, in each direction.
        in_flight: micro-batches that are alive at once; what the others keep is there throughout.
    """
    blocks = Blocks(saved)
    chosen = [policies[each.site] for each in blocks.saved]
    kept = sum(each.bytes for each, policy in zip(blocks.saved, chosen) if policy is KEEP)
    peak = 0
    for block in range(len(blocks.names)):
        present = (
            each.bytes
            for number, (each, policy) in enumerate(zip(blocks.saved, chosen))
            if blocks.present(number, policy, block)
        )
        peak = max(peak, sum(present))
    again = sum(each.recompute for each, policy in zip(blocks.saved, chosen) if policy is RECOMPUTE)
    again += sum(
        blocks.rerun[block] for block in {blocks.index[n] for n, each in enumerate(chosen) if each is RECOMPUTE}
    )
    swapped = [0] * len(blocks.names)
    for number, (each, policy) in enumerate(zip(blocks.saved, chosen)):
        if policy is SWAP:
            swapped[blocks.index[number]] += each.bytes
    stalls = sum(blocks.stalls(block, count, bandwidth) for block, count in enumerate(swapped) if count)
    return Replay(peak + (in_flight - 1) * kept, blocks.end + again + stalls)
