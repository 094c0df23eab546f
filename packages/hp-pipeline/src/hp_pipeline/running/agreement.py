"""What the ranks of a pipeline tell each other before and after a run, so that all raise or none.

Note [A stage that failed on one of its ranks]
    A stage may have collectives of its own: among tensor parallel ranks, or the shards of a module. A rank whose stage
    raised takes part in none of them any more, so the others of the stage wait for it, and all stages for them. The
    rank can't see that; but it gets nowhere itself, in a receive or at the end of the run. So once it has failed a
    thread of it watches whether its steps go on, and if they don't it gives up for all: every rank's collective ends
    with its error, where the backend can (`hp_platform.groups.give_up`). Stages without collectives of their own come
    to the end of the run, and the next run works.
"""

from __future__ import annotations

import struct
import threading
import time
from collections.abc import Mapping
from typing import Any

from hp_pipeline.port import port
from hp_platform import get_platform
from hp_platform.extend import FailedRankError, agree, share_bytes

# ---- ending a run that cannot end ----
_POLL = 0.1


class StallWatchdog:
    """A thread that gives a run up when this rank has failed and its steps don't go on; a context manager.

    Args:
        patience: seconds without a step.
    """

    def __init__(self, patience: float) -> None:
        self._patience, self._over = patience, threading.Event()
        self._moved = 0.0
        self._thread: threading.Thread | None = None

    def __enter__(self) -> StallWatchdog:
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        if self._thread is not None:
            self._thread.join()

    def failed(self, text: str) -> None:
        """Begin to watch: this rank's stage raised.

        Args:
            text: what the others are told.
        """
        if self._thread is None:
            self._moved = time.monotonic()
            self._thread = threading.Thread(target=self._watch, args=(text,), name="hp_pipeline patience", daemon=True)
            self._thread.start()

    def move(self) -> None:
        """Note that this rank goes on."""
        self._moved = time.monotonic()

    def _watch(self, text: str) -> None:
        while not self._over.wait(_POLL):
            if time.monotonic() - self._moved > self._patience:
                get_platform().groups.give_up(text)
                return


_BEGIN = struct.Struct("<Q??")
_HEAD = "A stage failed; gradients are incomplete, set them to zero (zero_grad or take_gradients) before the next run"


class PipelineError(RuntimeError):
    """A stage failed on some rank; every rank raises it, with the texts of all that failed."""


class Agreement:
    """Short texts from each rank to all.

    Args:
        group: the pipeline's ranks.
        peers: those of all pipelines that run together; this one's are among them.

    Attributes:
        rank: this one, inside the pipeline.
        name: its global rank.
        ranks: of the pipeline.
    """

    def __init__(self, group: Any, peers: Any) -> None:
        groups = get_platform().groups
        self.group, self.rank, self.ranks, self.name = group, groups.rank(group), groups.size(group), groups.rank()
        everyone = groups.ranks(peers)
        self._peers, self._everyone = peers, everyone
        places = {rank: place for place, rank in enumerate(everyone)}
        self._places = [places[rank] for rank in groups.ranks(group)]
        self._inputs: list[Any] | None = []
        self._begun: list[Any] = []

    def share(self, payload: bytes) -> list[bytes]:
        """Return each rank's payload."""
        return share_bytes(payload, self.group)

    def begin(
        self,
        fingerprint: int,
        micro_batches: int,
        batches: Mapping[Any, Any],
        problem: Exception | None,
        *,
        bound: bool,
        writes: bytes,
    ) -> tuple[bool, bool, list[int]]:
        """Refuse a run, on all ranks of all pipelines alike, for which orders differ or an input does not fit.

        Args:
            fingerprint: of the order.
            micro_batches: of this rank, for errors.
            batches: its inputs.
            problem: an error of this rank.
            bound: this rank has opened its channels, and may go on with them.
            writes: to each shared weight, as `SharedParameters.writes` tells.

        Returns:
            True if all ranks are bound; True if the tensors of some rank's batches have other shapes or dtypes than in
            the run before, or that run failed; and the places of the shared weights that ranks wrote to unequally.
        """
        leaves = port().flatten(next(iter(batches.values()), None))[0]
        inputs = [port().describe(leaf) for leaf in leaves if port().is_tensor(leaf)]

        own = problem or _BEGIN.pack(fingerprint, inputs != self._inputs, bound) + writes
        self._inputs = None  # if the run fails, the next one describes its messages anew

        def failed(texts: Mapping[int, str], _: Exception | None) -> Exception:
            return ValueError(_joined("An input does not fit", texts))

        told = agree(lambda: own, failed, self._share_with_peers)
        rows = [_BEGIN.unpack(row[: _BEGIN.size]) for row in told]
        others = [rank for rank, row in zip(self._everyone, rows, strict=True) if row[0] != rows[0][0]]
        if others:
            raise ValueError(
                f"The ranks {others} of the pipeline have another order than rank {self._everyone[0]}: micro_batch_num"
                f" ({micro_batches} on rank {self.name}), the schedule and its options must be equal."
            )
        self._begun = inputs
        columns = zip(*(row[_BEGIN.size :] for row in told), strict=False)  # of ranks that are not bound there are none
        apart = [place for place, counts in enumerate(columns) if len({*counts} - {255}) > 1]
        return all(row[2] for row in rows), any(row[1] for row in rows), apart

    def refuse(self, said: str) -> None:
        """Raise on all ranks of all pipelines if one of them has something to say.

        Raises:
            ValueError: they have.
        """

        def failed(texts: Mapping[int, str], _: Exception | None) -> Exception:
            return ValueError(_joined("Copies of a weight differ", texts))

        agree(lambda: ValueError(said) if said else b"", failed, self._share_with_peers, str)

    def end(self, failure: Exception | None, text: str, present: bytes) -> list[bytes]:
        """Raise on all ranks if a stage failed on any; return what each rank has of the shared weights."""

        def failed(texts: Mapping[int, str], _: Exception | None) -> Exception:
            return PipelineError(_joined(_HEAD, texts))

        rows = agree(lambda: failure or present, failed, self._share_with_peers, lambda _: text)
        self._inputs = self._begun
        return [rows[place] for place in self._places]

    def _share_with_peers(self, payload: bytes) -> list[bytes]:
        return share_bytes(payload, self._peers)


def gave_up(error: FailedRankError) -> PipelineError:
    """Return the error of a run that a rank gave up: Note [A stage that failed on one of its ranks]."""
    head = f"{_HEAD}. Its ranks wait for each other, so the process groups are broken: start the processes again"
    return PipelineError(_joined(head, error.texts))


def _joined(head: str, texts: Mapping[int, str]) -> str:
    different = dict.fromkeys(text.strip().rstrip(".") for text in texts.values() if text)
    return "; ".join([head, *different]) + "."
