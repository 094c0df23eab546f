"""What the ranks of a pipeline tell each other before and after a run, so that all raise or none."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hp_pipeline.port import port
from hp_platform import get_platform

__all__ = ["Agreement", "PipelineError"]

_TEXT = 2048  # bytes of a failure's text that other ranks are told


class PipelineError(RuntimeError):
    """A stage failed on some rank; every rank raises it, with the texts of all that failed."""


class Agreement:
    """Small messages from each rank to all.

    Args:
        group: the pipeline's ranks.
        device: of the messages.
    """

    def __init__(self, group: Any, device: Any) -> None:
        groups = get_platform().groups
        self.group, self.rank, self.ranks, self.device = group, groups.rank(group), groups.size(group), device
        self._inputs: list[Any] = []

    def gather(self, values: list[int]) -> list[list[int]]:
        """Return each rank's numbers."""
        count = len(values)
        if self.ranks == 1:
            return [values]
        everyone = port().numbers([0] * (self.ranks * count), self.device)
        get_platform().collectives.all_gather(everyone, port().numbers(values, self.device), group=self.group)
        numbers = port().to_numbers(everyone)
        return [numbers[rank * count : (rank + 1) * count] for rank in range(self.ranks)]

    def gather_bytes(self, data: bytes) -> list[bytes]:
        """Return each rank's bytes, of which the last is not zero."""
        size = max(size for (size,) in self.gather([len(data)]))
        if not size:
            return [data] * self.ranks
        return [bytes(row).rstrip(b"\0") for row in self.gather(list(data.ljust(size, b"\0")))]

    def begin(
        self,
        fingerprint: int,
        micro_batches: int,
        batches: Mapping[Any, Any],
        problem: Exception | None,
        *,
        bound: bool,
    ) -> tuple[bool, bool]:
        """Refuse a run, on all ranks alike, for which orders differ or an input does not fit.

        Args:
            fingerprint: of the order.
            micro_batches: of this rank, for errors.
            batches: its inputs.
            problem: an error of this rank.
            bound: this rank has opened its channels, and may go on with them.

        Returns:
            True if all ranks are bound; and True if the tensors of some rank's batches have other shapes or dtypes
            than in the run before.
        """
        leaves = port().flatten(next(iter(batches.values()), None))[0]
        inputs = [port().describe(leaf) for leaf in leaves if port().is_tensor(leaf)]
        gathered = self.gather([fingerprint, int(problem is not None), int(inputs != self._inputs), int(bound)])
        others = [rank for rank, (number, *_) in enumerate(gathered) if number != gathered[0][0]]
        if others:
            raise ValueError(
                f"The ranks {others} of the pipeline have another order than rank 0: micro_batch_num"
                f" ({micro_batches} on rank {self.rank}), the schedule and its options must be equal."
            )
        if any(failed for _, failed, *_ in gathered):
            name = "" if problem is None or isinstance(problem, ValueError) else f"{type(problem).__name__}: "
            self._raise("An input does not fit", ValueError, problem, f"{name}{problem or ''}")
        self._inputs = inputs
        return all(row[3] for row in gathered), any(row[2] for row in gathered)

    def end(self, failure: BaseException | None, text: str, numbers: list[int]) -> list[list[int]]:
        """Raise on all ranks if a stage failed on any; return each rank's numbers."""
        gathered = self.gather([int(failure is not None), *numbers])
        if any(row[0] for row in gathered):
            head = "A stage failed; gradients are incomplete, set them to zero before the next run"
            self._raise(head, PipelineError, failure, text)
        return [row[1:] for row in gathered]

    def _raise(self, head: str, kind: type[Exception], cause: BaseException | None, text: str) -> None:
        data = text.encode()[:_TEXT].ljust(_TEXT)
        texts = [bytes(row).decode(errors="replace").strip().rstrip(".") for row in self.gather(list(data))]
        different = dict.fromkeys(text for text in texts if text)
        raise kind("; ".join([head, *different]) + ".") from cause
