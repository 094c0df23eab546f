"""Group: the parameters that one call of `fully_shard` manages, their state, and checks that all ranks agree."""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Protocol, TypeVar

from hp_dtensor import DeviceMesh
from hp_fsdp.axes import DataAxes, PostForwardRanks
from hp_fsdp.groups.managed_params import find_parameters, ignore, is_copy
from hp_fsdp.steps.order import ExecutionOrder
from hp_platform.extend import attribute_to, reduce_numbers

if TYPE_CHECKING:
    from hp_fsdp.options import BucketPlan, GroupOptions


def check_alike(groups: Sequence[Any], axes: DataAxes) -> None:
    """Raise on all ranks alike if their groups differ; it costs one reduction of two numbers if they don't.

    Only whole numbers are sent, and each rank gets the largest: a text travels as its bytes, each rank's at its own
    offset.

    Args:
        groups: of a model.
        axes: of its outermost group.

    Raises:
        ValueError: the groups differ; the text shows the first that does.
    """
    lines = [_described(group) for group in groups]
    digest = int.from_bytes(hashlib.sha256("\n".join(lines).encode()).digest()[:7], "big")
    if _extremes(digest, axes) == (digest, digest):
        return
    expected, different = (text.split("\n") for text in _two_texts("\n".join(lines), digest, axes))
    for one, other in zip(expected, different):
        if one != other:
            break
    else:
        one, other = (f"{len(each)} groups" for each in (expected, different))
    raise ValueError(
        "fully_shard: ranks sharded different models, or the same model in different ways, and would hang or mix up"
        f" parameters. On some: {one}. On others: {other}. Build the same model and make the same calls on all ranks"
    )


def check_counts(axes: DataAxes, count: int) -> None:
    """Raise on all ranks alike if they ran different numbers of micro-batches.

    Args:
        axes: of the ranks to compare.
        count: this rank's number.

    Raises:
        ValueError: the numbers differ.
    """
    most, least = _extremes(count, axes)
    if most != least:
        raise ValueError(
            f"fully_shard(deterministic=True): this rank ran {count} micro-batches since the last step, others from"
            f" {least} to {most}. Their order is global, so give each rank as many (consecutive ones)"
        )


def _extremes(number: int, axes: DataAxes) -> tuple[int, int]:
    """Return the largest and the smallest of the ranks' numbers."""
    most, least = _largest([number, -number], axes)
    return most, -least


def _largest(numbers: Sequence[int], axes: DataAxes) -> list[int]:
    """Return the largest of the ranks' numbers, element by element; wait for all ranks of the axes."""
    return reduce_numbers(reduce_numbers(numbers, "max", axes.shard_group), "max", axes.replicate_group)


def _described(group: Any) -> str:
    buckets = [
        f"{bucket.dtype} as {bucket.compute_dtype} of {[p.name + str(list(p.global_shape)) for p in bucket.parameters]}"
        for bucket in group.buckets
    ]
    options = f"deterministic={group.deterministic}, {group.axes.replicate_size} x {group.axes.shard_size} ranks"
    return f"group {group.name!r} with {'; '.join(buckets)} ({options})"


def _two_texts(text: str, digest: int, axes: DataAxes) -> list[str]:
    """Return the text of the first rank, and of the first rank with another digest."""
    me = axes.row + axes.shard_rank
    digests = _largest(_at(me, [digest], axes.ranks), axes)
    chosen = (0, next(rank for rank, each in enumerate(digests) if each != digests[0]))
    own = text.encode()
    (length,) = _largest([len(own)], axes)
    texts = _largest(_at(chosen.index(me), own, 2, length) if me in chosen else [0] * (2 * length), axes)
    return [bytes(texts[at : at + length]).rstrip(b"\0").decode() for at in (0, length)]


def _at(index: int, numbers: Sequence[int], count: int, size: int = 1) -> list[int]:
    """Put numbers into one of ``count`` slots of a size, zeros into the others."""
    slots = [0] * (count * size)
    slots[index * size : index * size + len(numbers)] = numbers
    return slots


class Steps(Protocol):
    """What a group asks of its context; see `hp_fsdp.steps.context.Context`."""

    @property
    def outermost(self) -> Any: ...
    @property
    def backward(self) -> bool: ...
    @property
    def trace(self) -> list[Any]: ...
    @property
    def agreed(self) -> dict[DeviceMesh, int]: ...


C = TypeVar("C", bound=Steps)


class Group(Generic[C]):
    """The parameters that are gathered, freed and reduced together, around the forward and backward of their modules.

    A framework's ``ParameterGroup`` adds how buckets are filled, shown in the modules, and reduced.

    Args:
        members: the modules; they compute with the unsharded parameters.
        parameters: those that are this group's.
        axes: the axes of data parallelism.
        device: of the buffers; None if there is no choice.
        options: the arguments of `fully_shard`.
        ignored: parameters that stay as they are.

    Attributes:
        managed: the framework's class of parameters of a group.
        bucket: the framework's class of buckets.
        overlaps: gathers run beside the computation, so that it pays to start them ahead of time.
        name: the module's name from the root; its class's before the first forward.
        module: the first of the members, most often the only one.
        modules: the members and, from the first forward on, the root, for observers of `attribute_to`.
        context: the shared state of the groups of one model; None before the first forward.
        order: the order in which groups run while this one is the outermost.
        reshard_after_forward: None stands for "all groups but the root", whose parameters backward needs first.
        reduces: backward reduces the gradients.
        reduces_over_replicas: on two axes, over the first as well.
        divisor: of the reduced gradients; None for 1.
        layout_ranks: how many ranks of the root's data parallelism this group's own layouts divide its parameters over:
            see ``DataAxes.layout_ranks``.
        scale: factor of the reduced gradients.
        waits: the end of a backward pass waits for the reductions.
        unshard_in_backward: backward gathers the parameters, unless they are gathered.
        post_forward_ranks: the smaller group of ranks that keeps a shard between forward and backward, if there is one.
        unsharded: the unsharded parameters are gathered.
        user_unsharded: the user asked for them by `unshard`.
        gathering: handles of the gather under way; None if there is none.
        calls: the calls in forward whose backward is still to come, in deterministic mode.
        micro_batches: number of backward passes since the last step, in deterministic mode.
        ended: the gradients of the backward pass under way are complete, in deterministic mode.
    """

    managed: ClassVar[Any]
    bucket: ClassVar[Any]
    overlaps: bool = True

    def __init__(
        self,
        members: Sequence[Any],
        parameters: Sequence[Any],
        axes: DataAxes,
        device: Any,
        options: GroupOptions,
        ignored: Sequence[Any] = (),
    ) -> None:
        self.members = tuple(members)
        self.module = self.members[0]
        self.modules: tuple[Any, ...] = self.members
        self.axes = axes
        self.device = device
        self.options = options
        self.policy = options.policy
        self.deterministic = options.deterministic
        self.ignored: list[Any] = list(ignored)
        self.context: C | None = None
        self.order: ExecutionOrder[Any] = ExecutionOrder()
        self.reshard_after_forward: bool | None = None if options.reshards else False
        self.reshard_after_backward = True
        self.reduces = True
        self.reduces_over_replicas = True
        self.reduce_op = "avg"
        self.divisor: float | None = None
        self.layout_ranks = 1
        self.scale = 1.0
        self.waits = True
        self.unshard_in_backward = True
        self.prefetch_in_forward: list[Any] = []
        self.prefetch_in_backward: list[Any] = []
        self.post_forward_ranks = axes.post_forward_ranks(options.reshard_after_forward)
        self.unsharded = self.user_unsharded = False
        self.gathering: list[Any] | None = None
        self.calls: weakref.WeakSet[Any] = weakref.WeakSet()
        self.micro_batches = 0
        self.ended = False
        self.class_name = ", ".join(type(module).__name__ for module in members)
        self.buckets: list[Any] = []
        self.parameters: list[Any] = []
        self.add(parameters)
        self.rename("")

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r}, {len(self.parameters)} parameters in {len(self.buckets)} buckets)"

    # ---- which parameters ----
    def registered_tensors(self) -> Iterator[tuple[Any, Any]]:
        """List all tensors that may stand in the modules for parameters of this group, with the parameter."""
        raise NotImplementedError

    def add(self, parameters: Sequence[Any]) -> None:
        """Shard parameters and make them the group's."""
        buckets = [
            self.bucket_of(plan)(
                plan,
                self.axes if plan.sharded else self.axes.replicated(),
                self.device,
                self.options,
                self.class_name,
            )
            for plan in self.options.together(parameter.facts() for parameter in parameters)
        ]
        for bucket in buckets:
            bucket.shard_originals()
        self.buckets += buckets
        self.parameters = [parameter for bucket in self.buckets for parameter in bucket.parameters]

    def bucket_of(self, plan: BucketPlan) -> Any:
        """Return the class of a plan's bucket."""
        return self.bucket

    def add_late_parameters(self, ignored: Sequence[Any], inner: DeviceMesh | None) -> bool:
        """Shard parameters that joined the members after they were sharded.

        Args:
            ignored: parameters to leave as they are.
            inner: the mesh of all parameters on other axes (tensor parallel), if they share one: plain parameters are
                replicated on it.

        Returns:
            True if there were any.

        Raises:
            RuntimeError: they have no values, or are copies of parameters that are sharded over other axes as well; on
                MindSpore, a parameter was replaced or removed.
            ValueError, TypeError: see `fully_shard`.
        """
        counts = [len(parameter.places) for parameter in self.parameters]
        joined = []
        own = {id(tensor): parameter for tensor, parameter in self.registered_tensors()}
        for parameter in find_parameters(self.members, ignored, self.managed, own):
            original = parameter.facts().original
            if not is_copy(original) and self.axes.divided(parameter.name, parameter.inner):
                self.ignored.append(original)
                ignore(original)
            else:
                joined.append(parameter)
        if not joined and counts == [len(parameter.places) for parameter in self.parameters]:
            return False
        self.reshard()
        for parameter in joined:
            parameter.join(self.axes.mesh, inner, self.class_name)
        self.add(joined)
        return bool(joined)

    def rename(self, name: str) -> None:
        """Set the name that profiles and errors show; an empty one stands for that of the class."""
        self.name = name or self.class_name

    # ---- gathered or not ----
    def check(self) -> None:
        """Follow changes that were made to the sharded parameters from outside."""

    def start_unshard(self) -> None:
        """Start the all-gathers, unless the parameters are there or on their way."""
        if self.unsharded or self.gathering is not None:
            return
        self.note("gather")
        with self.while_gathering():
            self.gathering = attribute_to(self.modules, self._gather)

    def _gather(self) -> list[Any]:
        return [bucket.gather() for bucket in self.buckets]

    def while_gathering(self) -> AbstractContextManager[Any]:
        """Return the context in which gathers are started."""
        raise NotImplementedError

    def while_waiting(self) -> AbstractContextManager[Any]:
        """Return the context in which gathers are waited for."""
        return nullcontext()

    def finish_unshard(self) -> None:
        """Wait for the all-gathers; the unsharded parameters are there."""
        arrived = self.gathering is not None
        if self.gathering is not None:
            with self.while_waiting():
                for handle in self.gathering:
                    if handle is not None:
                        handle.wait()
            self.gathering = None
            self.unsharded = True
        self.show_unsharded(arrived)

    def show_unsharded(self, arrived: bool) -> None:
        """Register the unsharded parameters where they are to be seen; ``arrived``: for the first time."""
        raise NotImplementedError

    def stale(self) -> bool:
        """Tell whether gathered parameters may be older than the sharded ones."""
        raise NotImplementedError

    def free(self, ranks: PostForwardRanks | None) -> None:
        """Register the sharded parameters again and free the gathered buffers.

        Args:
            ranks: the ranks among which to keep a post-forward shard.
        """
        raise NotImplementedError

    def reshard(self, *, before_backward: bool = False) -> None:
        """Register the sharded parameters again and free the gathered buffers, where they are gathered.

        Args:
            before_backward: it will be gathered again for backward, from the smaller group's shards if there is one.
        """
        if self.gathering is not None:
            self.finish_unshard()
        ranks = self.post_forward_ranks if before_backward else None
        if not self.unsharded:
            if ranks is None and self.post_forward_ranks is not None:
                self.drop_post_forward_shards()
            return
        self.unsharded = self.user_unsharded = False
        self.free(ranks)
        self.note("free")

    def note(self, kind: str) -> None:
        """Add an event to the trace of the pass under way; see `hp_fsdp.explanation.timeline`."""
        context = self.context
        if context is not None and (context.outermost is not None or context.backward):
            context.trace.append((kind, self, perf_counter_ns()))

    def drop_post_forward_shards(self) -> None:
        """Free the smaller group's shards."""
        for bucket in self.buckets:
            bucket.post_forward_shard = None

    def keep(self) -> None:
        """Leave the parameters gathered after forward."""

    # ---- gradients ----
    @property
    def trains(self) -> bool:
        """True if any parameter requires gradients."""
        return any(bucket.trains for bucket in self.buckets)

    def abandon(self) -> None:
        """Reset to the state between steps after an error, without the gradients of the failed step."""
        raise NotImplementedError

    @property
    def total_divisor(self) -> float | None:
        """Divisor of the reduced gradients, with ``scale``; None for 1."""
        divisor = self.divisor
        if self.layout_ranks > 1 and self.reduce_op == "avg":
            divisor = float(self.layout_ranks)
        if self.scale == 1.0:
            return divisor
        return (1.0 if divisor is None else divisor) / self.scale

    @property
    def sums_now(self) -> bool:
        """True if a backward pass ends with the sum over all passes since the last step, in deterministic mode."""
        return self.reduces and (self.reduces_over_replicas or self.axes.replicate_group is None)

    def agree(self, count: int) -> None:
        """Raise if ranks ran different numbers of micro-batches.

        It waits for all ranks of the group's mesh. So of the groups on a mesh, the first one of a backward pass
        compares, and one whose number is another.
        """
        assert self.context is not None
        agreed, mesh = self.context.agreed, self.axes.mesh
        if count != agreed.get(mesh):
            attribute_to(self.modules, check_counts, self.axes, count)
            agreed[mesh] = count
