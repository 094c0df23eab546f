"""A user's policy on operations, made a table of heavy operations; torch's selective checkpoint where it is none.

Note [A policy is asked once]
    torch asks a policy about every operation of every run, in a dispatch mode (48 to 101 us an operation). Here the
    first run of a region asks it, in torch's mode, about stand-ins on the meta device. Where all that it keeps are
    outputs of heavy operations, later runs go by the table of its answers. A policy that keeps something else, or
    looks at values, stays with torch's mode, and a warning says so.

Note [What is never kept]
    An output that was drawn at random: handing it back would not move the generator, and what is drawn after it in the
    second run would differ. An operation that writes to its arguments: handing back its output would not write. Memory
    without values, which others write to.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import CheckpointPolicy as TorchPolicy
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from hp_offload.saved import KEEPS, CheckpointPolicy, checked_answer
from hp_offload.torch.regions.functions import Calls, Filling, Site, Walk, Watched
from hp_offload.torch.regions.region import Passes
from hp_offload.torch.regions.sites import Computed, Group, Key, Ordinals, SitePasses
from hp_platform.frames import frame
from hp_platform.torch.heavy import EXCHANGE
from hp_platform.torch.internals import without_torch_function

T = torch.Tensor
PolicyFn = Callable[..., Any]
_FREE = frozenset(
    {torch.ops.aten.t.default, torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default}
    | {torch.ops.aten.transpose.int, torch.ops.aten.expand.default, torch.ops.aten.detach.default}
)
"""Operations that compute nothing: keeping their outputs keeps nothing."""


@dataclass(frozen=True)
class _Context:
    """The `ctx` of a policy, as torch's."""

    is_recompute: bool = False
    op_output: Any = None


class Selection:
    """What one policy says about one function.

    Args:
        policy_fn: torch's: `(ctx, op, *args, **kwargs) -> CheckpointPolicy`.
        name: of the function, for errors and warnings.
        group: opens what takes the outputs of `MUST_SWAP` of one run.
    """

    def __init__(self, policy_fn: PolicyFn, name: str, group: Callable[[], Group]) -> None:
        self._policy_fn, self._name, self._group = policy_fn, name, group
        self.answers: dict[Key, CheckpointPolicy] | None = None
        self.unsuited: list[str] = []

    def passes(self) -> Passes:
        """Return the contexts of one run of the region."""
        if self.unsuited:
            return _Torch(self._ask)
        if self.answers is None:
            return _Recording(self)
        return SitePasses(self._name, self.answers, self._group(), self._forget)

    def _forget(self, key: Key) -> None:
        """Ask anew in the next run: this one reached an operation that the first did not."""
        self.answers = None

    def _ask(self, op: Any, out: Any, args: Any, kwargs: Any) -> CheckpointPolicy:
        answer = checked_answer(self._policy_fn(_Context(op_output=out), op, *args, **kwargs), f"{op}")
        return answer

    def ask_once(self, op: Any, out: Any, args: Any, kwargs: Any) -> CheckpointPolicy:
        """Ask about stand-ins; about the tensors themselves if the policy needs their values."""
        if not self.unsuited:
            try:
                return self._ask(op, *tree_map_only(T, _stand_in, (out, args, kwargs)))
            except TypeError:
                raise
            except Exception as error:
                reason = str(error).split("\n")[0][:120]
                self.unsuited.append(f"it looks at the values of {op} ({type(error).__name__}: {reason})")
        return self._ask(op, out, args, kwargs)

    def conclude(self, answers: dict[Key, CheckpointPolicy], others: dict[str, CheckpointPolicy]) -> None:
        """Take the answers of the first run.

        Args:
            answers: of heavy operations.
            others: of other operations, those that are kept.
        """
        swapped = sorted(op for op, answer in others.items() if answer is CheckpointPolicy.MUST_SWAP)
        if swapped:
            raise NotImplementedError(
                f"policy_fn of {self._name} answers MUST_SWAP for {', '.join(swapped)}: only outputs of heavy"
                " operations (linear layers, attention, matrix products, convolutions, embeddings) can be swapped one"
                " by one. Swap all that is saved, by `swap`, or answer MUST_RECOMPUTE."
            )
        must = sorted(op for op, answer in others.items() if answer is CheckpointPolicy.MUST_SAVE)
        if must:
            self.unsuited.append(f"it keeps {', '.join(must)} outside of heavy operations")
        if self.unsuited:
            if CheckpointPolicy.MUST_SWAP in answers.values():
                raise NotImplementedError(
                    f"policy_fn of {self._name} answers MUST_SWAP, which torch's selective checkpoint cannot do,"
                    f" and needs that because {self.unsuited[0]}."
                )
            kind = self._name.partition(".")[0]
            warnings.warn(
                f"policy_fn of {kind} cannot become a table of heavy operations: {self.unsuited[0]}."
                " torch's selective checkpoint does what it says, with a Python call for every operation.",
                stacklevel=2,
            )
        self.answers = answers


def _never_kept(op: Any) -> bool:
    """See Note [What is never kept]."""
    if not isinstance(op, torch._ops.OpOverload):
        return False
    random, name = torch.Tag.nondeterministic_seeded in op.tags, op._schema.name
    return (
        random
        or name.startswith("c10d::")
        or op._schema.is_mutable
        or name.split("::")[-1].startswith(("empty", "new_empty"))
    )


def _stand_in(tensor: T) -> T:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


class _Torch:
    """Passes in torch's dispatch modes."""

    def __init__(self, ask: Callable[[Any, Any, Any, Any], CheckpointPolicy]) -> None:
        self._ask = ask
        self._contexts = create_selective_checkpoint_contexts(self._policy)

    def _policy(self, ctx: Any, op: Any, *args: Any, **kwargs: Any) -> TorchPolicy:
        answer = self._ask(op, getattr(ctx, "op_output", None), args, kwargs)
        return TorchPolicy.MUST_SAVE if answer in KEEPS and not _never_kept(op) else TorchPolicy.MUST_RECOMPUTE

    @contextlib.contextmanager
    def first(self, walk: Walk) -> Iterator[None]:
        with self._contexts[0]:
            yield

    @contextlib.contextmanager
    def again(self, filling: Filling) -> Iterator[None]:
        with self._contexts[1]:
            yield

    def pack(self, index: int, tensor: T) -> None:
        return None


class _Recording(_Torch):
    """The first run: in torch's modes, with the answers written down."""

    def __init__(self, selection: Selection) -> None:
        super().__init__(self._record)
        self._selection = selection
        self._answers: dict[Key, CheckpointPolicy] = {}
        self._others: dict[str, CheckpointPolicy] = {}
        self._ordinals = Ordinals()
        self._current: Key | None = None
        self._site: Site | None = None
        self._watched: Watched
        self._ops: list[str] = []
        self._over = False

    @contextlib.contextmanager
    def first(self, walk: Walk) -> Iterator[None]:
        with frame(outputs=self), Calls(self), super().first(walk):
            yield
        self._over = True
        self._selection.conclude(self._answers, self._others)

    @contextlib.contextmanager
    def again(self, filling: Filling) -> Iterator[None]:
        with (
            frame(outputs=Computed()),
            super().again(filling),
        ):  # in a frame, as the first run: operations save the same
            yield

    def output(self, site: str | None, compute: Callable[[], T]) -> T:
        """Run a heavy operation, and note what the policy says about what it runs."""
        if self._over:
            return compute()
        outer, self._current = self._current, self._ordinals.key(site)
        self._answers[self._current] = CheckpointPolicy.MUST_RECOMPUTE
        try:
            return compute()
        finally:
            self._current = outer

    def call(self, site: Site) -> T:
        """Call a function, and note what the policy says about what it runs."""
        if self._over:
            return site.run()
        key = self._current = self._ordinals.key(site.name)
        self._answers[key] = CheckpointPolicy.MUST_RECOMPUTE
        self._site, self._watched = site, Watched(site)
        self._ops: list[str] = []
        try:
            out = site.run()
            with without_torch_function():
                unfit = self._watched.copies(out)
        finally:
            self._current = self._site = None
        if unfit and self._answers[key] in KEEPS:  # it is no site
            answer = self._answers.pop(key)
            if answer is not CheckpointPolicy.PREFER_SAVE:
                self._others.update(dict.fromkeys(self._ops, answer))
        return out

    def pack(self, index: int, tensor: T) -> None:
        if self._site is not None:
            self._watched.note(index, tensor)

    def _record(self, op: Any, out: Any, args: Any, kwargs: Any) -> CheckpointPolicy:
        answer = self._selection.ask_once(op, out, args, kwargs)
        if answer in KEEPS and op not in _FREE:
            exchange = self._current is not None and self._current[0] == EXCHANGE  # its result is nobody's argument
            if _never_kept(op) and not exchange and (self._site is None or op._schema.is_mutable):
                pass
            elif self._current is not None:
                self._ops.append(str(op))
                self._answers[self._current] = max(self._answers[self._current], answer, key=_strength)
            elif answer is not CheckpointPolicy.PREFER_SAVE:
                self._others[str(op)] = answer
        return answer


def _strength(answer: CheckpointPolicy) -> int:
    """Return how much an answer weighs against another's about the same heavy operation."""
    return (
        [CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_SAVE, CheckpointPolicy.MUST_SAVE].index(answer)
        if answer is not CheckpointPolicy.MUST_SWAP
        else 3
    )
