"""Checks of arguments before a collective sends anything, and counts of the collectives that a process issues."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from hp_platform.port import Tensor

if TYPE_CHECKING:
    from hp_platform.port import Handle


def unknown_op(op: str, ops: Iterable[str]) -> ValueError:
    """Make the error for an unknown reduction."""
    return ValueError(f"Unknown reduction op {op!r}; expected one of: {', '.join(ops)}.")


def not_contiguous(name: str, tensor: Tensor) -> ValueError:
    """Make the error for a tensor that is not contiguous."""
    return ValueError(
        f"{name} must be contiguous, got shape {tuple(tensor.shape)} with strides {tuple(tensor.stride())}: "
        f"pass {name}.contiguous()."
    )


def integer_average(tensor: Tensor) -> TypeError:
    """Make the error for an average of integers, which would have to be rounded."""
    return TypeError(f"avg needs a floating-point dtype, got {tensor.dtype}: use sum, then divide and round.")


def check_complex(op: str) -> None:
    """Refuse reductions that are not defined on complex numbers."""
    if op not in ("sum", "avg"):
        raise TypeError(f"Reduction op {op!r} is not defined on complex numbers: use sum or avg.")


def check_pair(kind: str, output: Tensor, tensor: Tensor) -> None:
    """Refuse an output and a tensor that differ in dtype or are not contiguous."""
    if output.dtype is not tensor.dtype:
        raise TypeError(f"{kind}: output and tensor must have the same dtype, got {output.dtype} and {tensor.dtype}.")
    if not output.is_contiguous():
        strides = tuple(output.stride())
        raise ValueError(f"{kind}: output must be contiguous, got shape {tuple(output.shape)} with strides {strides}.")
    if not tensor.is_contiguous():
        raise not_contiguous("tensor", tensor)


def gather_mismatch(output: Tensor, piece: Tensor, size: int) -> ValueError:
    """Make the error for an output that does not hold the tensors of all ranks."""
    return ValueError(
        f"all_gather: {size} ranks with a tensor of shape {tuple(piece.shape)} have {piece.numel() * size} elements, "
        f"but output has {output.numel()} (shape {tuple(output.shape)})."
    )


def scatter_mismatch(piece: Tensor, tensor: Tensor, size: int) -> ValueError:
    """Make the error for a tensor that does not hold the outputs of all ranks."""
    return ValueError(
        f"reduce_scatter: {size} ranks with an output of shape {tuple(piece.shape)} need {piece.numel() * size} "
        f"elements, but tensor has {tensor.numel()} (shape {tuple(tensor.shape)})."
    )


def checked_splits(name: str, tensor: Tensor, splits: Sequence[int] | None, size: int) -> list[int]:
    """Get the sizes that dim 0 is split into over ``size`` ranks, or an empty list for equal sizes."""
    if splits is None:
        if tensor.ndim == 0 or tensor.shape[0] % size:
            raise ValueError(
                f"all_to_all: dim 0 of the {name} of shape {tuple(tensor.shape)} is not divisible by {size} ranks: "
                f"pass {name}_splits."
            )
        return []
    if len(splits) != size or sum(splits) != tensor.shape[0]:
        raise ValueError(
            f"all_to_all: {name}_splits must be {size} numbers (one per rank) that sum to {tensor.shape[0]} "
            f"(dim 0 of the {name} of shape {tuple(tensor.shape)}), got {list(splits)}."
        )
    return splits if type(splits) is list else list(splits)


def check_peer(name: str, rank: int, size: int) -> None:
    """Refuse a rank that is not in a group of ``size`` ranks."""
    if not 0 <= rank < size:
        raise ValueError(f"{name} must be a rank of the group, from 0 to {size - 1}, got {rank}.")


def check_ranks(ranks: tuple[int, ...], rank: int, size: int) -> None:
    """Refuse sorted ranks that repeat, are outside a world of ``size`` ranks, or lack ``rank``."""
    if not ranks or len(set(ranks)) != len(ranks) or ranks[0] < 0 or ranks[-1] >= size:
        raise ValueError(f"A group needs unique ranks from 0 to {size - 1} (the world size is {size}), got {ranks}.")
    if rank not in ranks:
        raise ValueError(f"Rank {rank} is not in the group {ranks}: only its members may call new_group().")


def check_options(requested: object, existing: object, ranks: Sequence[int]) -> None:
    """Refuse options for an existing group, unless it was created with them."""
    if requested is not None and requested != existing:
        raise ValueError(
            f"pg_options={requested!r}, but the group of ranks {tuple(ranks)} already exists, created with {existing!r}"
            ": pass the options to the first call, which creates the group."
        )


def choose_parent(parent: Any, parent_pg: Any) -> Any:
    """Choose the parent of ``split_group``, which may be passed under our name or torch's."""
    if parent is not None and parent_pg is not None and parent is not parent_pg:
        raise ValueError(f"parent={parent!r} and parent_pg={parent_pg!r} are the same argument: pass only one.")
    return parent_pg if parent is None else parent


def check_child_backend(backend: object, parent: str) -> None:
    """Refuse a child whose backend is not its parent's."""
    if backend is not None and str(backend).lower() != parent:
        raise ValueError(
            f"backend={str(backend)!r}, but a child has the backend of its parent, {parent!r}: leave it out."
        )


def check_timeout(timeout: object, of_groups: bool) -> None:
    """Refuse a timeout for one group if the framework does not support it."""
    if timeout is not None and not of_groups:
        raise ValueError(f"timeout={timeout!r}: MindSpore does not support a timeout per group, leave it out.")


def read_split_ranks(split_ranks: int | Sequence[Sequence[int]] | None, size: int) -> Sequence[Sequence[int]]:
    """List each child's ranks in a parent of ``size`` ranks; refuse children that overlap or have other ranks.

    >>> read_split_ranks(2, 4)
    [[0, 1], [2, 3]]
    """
    if isinstance(split_ranks, int) and not isinstance(split_ranks, bool):
        if split_ranks < 1 or size % split_ranks:
            raise ValueError(
                f"split_ranks={split_ranks} is the size of each child and must divide the parent's {size} ranks: "
                "for children of unequal sizes, list the ranks of each."
            )
        return [list(range(first, first + split_ranks)) for first in range(0, size, split_ranks)]
    if not split_ranks:
        raise ValueError(f"split_ranks needs at least one list of ranks, got {split_ranks!r}.")
    if isinstance(split_ranks, bool) or not all(isinstance(ranks, Sequence) for ranks in split_ranks):
        raise TypeError(
            f"split_ranks must be a list of ranks per child, such as [[0, 1], [2, 3]], or the size of a child, got "
            f"{split_ranks!r}."
        )
    flat = [rank for ranks in split_ranks for rank in ranks]
    if len(set(flat)) != len(flat) or min(flat, default=-1) < 0 or max(flat) >= size:
        raise ValueError(
            f"split_ranks needs unique ranks from 0 to {size - 1} (the parent has {size}), "
            f"got {[list(ranks) for ranks in split_ranks]}."
        )
    return split_ranks


def no_default_group() -> RuntimeError:
    """Make the error for a call that needs the default group before it exists."""
    return RuntimeError("There is no default process group: call init_process_group() first.")


def check_same_world(here: Mapping[str, object], requested: Mapping[str, object]) -> None:
    """Refuse another initialization that disagrees with the existing default group."""
    # mccl can't be initialised twice in a process.
    first = "Restart the ranks with these" if here["backend"] == "mccl" else "Call destroy_process_group() first"
    different = [f"{name} is {here[name]!r}, got {requested[name]!r}" for name in here if requested[name] != here[name]]
    if different:
        raise RuntimeError(
            f"The default process group already exists: its {'; '.join(different)}. "
            f"{first}, or leave the arguments out."
        )


Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")
Done = Callable[[], None]
Observer = Callable[[str, int, Any], Done | None]

# Called with (kind, bytes, group) before each collective; every platform's collectives read this one list. What an
# observer returns is called once the collective has been waited for: at its end, with `async_op` in the handle's wait.
observers: list[Observer] = []


def begin(kind: str, size: int, group: Any) -> list[Done]:
    """Tell all observers that a collective begins.

    Args:
        kind: "all_reduce", "all_gather", ...
        size: bytes.
        group: the platform's group.

    Returns:
        The functions to call when it is over.
    """
    callbacks = [observer(kind, size, group) for observer in tuple(observers)]
    return [done for done in callbacks if done is not None]


_local = threading.local()


def attribute_to(
    modules: Sequence[Any], run: Callable[Arguments, Result], *args: Arguments.args, **kwargs: Arguments.kwargs
) -> Result:
    """Run a function whose collectives observers shall attribute to a module other than the running one.

    Such collectives are issued ahead of the module's call, or after it. If nobody observes, this only calls ``run``.

    Args:
        modules: the module, then the modules around it, the outermost last; some in between may be left out.
        run: the function.
        args: its positional arguments.
        kwargs: its keyword arguments.

    Returns:
        The result of ``run``.
    """
    if not observers:
        return run(*args, **kwargs)
    before = attributed_modules()
    _local.modules = modules
    try:
        return run(*args, **kwargs)
    finally:
        _local.modules = before


def attributed_modules() -> Sequence[Any]:
    """Return the modules of the innermost `attribute_to` in this thread; empty outside of any."""
    return getattr(_local, "modules", ())


class Observed:
    """A collective under way whose end is reported to observers.

    Args:
        work: the platform's handle; None where the collective has been waited for.
        done: functions to call, once, at its end.
    """

    def __init__(self, work: Handle | None, done: Sequence[Done]) -> None:
        self.work, self.done = work, done

    def wait(self) -> None:
        """Wait for the collective and report its end."""
        if self.work is not None:
            self.work.wait()
        for each in self.done:
            each()
        self.done = ()


class CollectiveCounts(Counter[str]):
    """Number of calls of each kind of collective.

    Attributes:
        bytes: sum over the calls of the size of the larger tensor.
    """

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def observe(self, kind: str, size: int, group: Any) -> None:
        """Count one call."""
        self[kind] += 1
        self.bytes += size


@contextmanager
def count_collectives() -> Iterator[CollectiveCounts]:
    """Count the collectives that this process issues inside the block.

        with count_collectives() as counts:
            all_reduce(tensor, group=group)
        counts["all_reduce"]  # 1

    Yields:
        The counts, which stay readable afterwards. Threads that issue collectives meanwhile (the backward pass) are
        counted too.
    """
    counts = CollectiveCounts()
    observers.append(counts.observe)
    try:
        yield counts
    finally:
        observers.remove(counts.observe)
