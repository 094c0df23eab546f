"""What `hp_optim.muon.ownership.Exchange` plans, done with gathers.

Each message to owners begins with its flags: which gradients of the sender are not finite, and whether it can't step by
this plan. There is such a message between any two ranks, so all of them know after the first exchange.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mindspore
import numpy as np
from mindspore import Tensor, ops

from hp_optim.muon.index_copy import gathers_of
from hp_optim.muon.ownership import OwnerPlan
from hp_platform import collectives, get_platform


class Exchanger:
    """One rank's part of a plan, for local tensors of given shapes.

    Args:
        plan: the owners.
        rank: of this process.
        shapes: of the local tensors, one for each parameter.
        dtype: of what is exchanged.
    """

    def __init__(self, plan: OwnerPlan, rank: int, shapes: Sequence[tuple[int, ...]], dtype: Any) -> None:
        self.exchange = plan.exchange(rank)
        self.shapes, self.dtype, self.world = list(shapes), dtype, len(plan.world)
        self.group = get_platform().groups.new_group(plan.world) if self.world > 1 else None
        gathers = gathers_of(self.exchange, shapes)
        self.index = {
            name: Tensor(getattr(gathers, name).astype(np.int32))
            for name in ("sent", "batches", "results_sent", "locals")
        }

    def to_owners(
        self, tensors: Sequence[Tensor], broken: np.ndarray, *, alarm: bool = False
    ) -> tuple[list[Tensor], np.ndarray, bool]:
        """Bring the matrices together; a collective, if there are other ranks.

        Args:
            tensors: this rank's part of each parameter's matrices; with an alarm there are none.
            broken: whether it has a gradient that is not finite, for each parameter.
            alarm: this rank can't step by this plan.

        Returns:
            The batches, ``[matrices, rows, columns]``, ``broken`` of any rank, and whether any raised the alarm; then
            there are no batches.
        """
        flat = _joined([ops.reshape(each, (-1,)) for each in tensors], self.dtype)
        if self.group is not None:
            there = self.exchange
            stream = ops.zeros((sum(there.send_sizes),), dtype=self.dtype) if alarm else self._gathered(flat, "sent")
            head = np.append(broken, alarm)
            arrived, heads = self._sent(stream, there.send_sizes, there.receive_sizes, head)
            broken, alarm = heads.max(axis=0)[:-1] > 0, bool(heads[:, -1].max() > 0) or alarm
            flat = _joined([flat, arrived], self.dtype) if not alarm else flat
        if alarm:
            return [], broken, True
        matrices = self._gathered(flat, "batches")
        batches, start = [], 0
        for batch in self.exchange.batches:
            part = matrices[start : start + batch.elements]
            batches.append(ops.reshape(part, (len(batch.members), batch.rows, batch.columns)))
            start += batch.elements
        return batches, broken, False

    def to_holders(self, results: Sequence[Tensor]) -> list[Tensor]:
        """Return this rank's part of each parameter's results; a collective, if there are other ranks.

        Args:
            results: of each batch.
        """
        flat = _joined([ops.reshape(each, (-1,)) for each in results], self.dtype)
        if self.group is not None:
            there = self.exchange
            sizes = there.results_send_sizes, there.results_receive_sizes
            arrived, _ = self._sent(self._gathered(flat, "results_sent"), *sizes, np.empty(0, dtype=bool))
            flat = _joined([flat, arrived], self.dtype)
        parts = self._gathered(flat, "locals")
        tensors, start = [], 0
        for shape in self.shapes:
            size = int(np.prod(shape, dtype=np.int64))
            tensors.append(ops.reshape(parts[start : start + size], shape))
            start += size
        return tensors

    def _gathered(self, flat: Tensor, name: str) -> Tensor:
        index = self.index[name]
        return ops.gather(flat, index, 0) if index.size else ops.zeros((0,), dtype=self.dtype)

    def _sent(
        self, stream: Tensor, send: Sequence[int], receive: Sequence[int], head: np.ndarray
    ) -> tuple[Tensor, np.ndarray]:
        """Exchange a stream with a head before each message; return what came without heads, and the heads."""
        size = len(head)
        first, pieces, start = Tensor(head.astype(np.float32)).astype(self.dtype), [], 0
        for elements in send:
            pieces += [first, stream[start : start + elements]] if size else [stream[start : start + elements]]
            start += elements
        outgoing = _joined(pieces, self.dtype)
        arrived = ops.zeros((sum(receive) + size * self.world,), dtype=self.dtype)
        collectives.all_to_all(
            arrived, outgoing, [size + each for each in receive], [size + each for each in send], group=self.group
        )
        heads, bodies, start = [], [], 0
        for elements in receive:
            heads.append(arrived[start : start + size].astype(mindspore.float32).asnumpy())
            bodies.append(arrived[start + size : start + size + elements])
            start += size + elements
        return _joined(bodies, self.dtype), np.stack(heads)


def _joined(tensors: Sequence[Tensor], dtype: Any) -> Tensor:
    filled = [each for each in tensors if each.size]
    return ops.cat(filled) if filled else ops.zeros((0,), dtype=dtype)
