"""The options of `fully_shard`, checked."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

from hp_fsdp.groups.managed_params import BLOCK
from hp_platform import get_platform
from hp_platform.extend import CopyLink

ALIGNMENT = 64
"""Parameters and pieces start at multiples of this many bytes: a cache line, and more than vector loads ask for."""


@dataclass(frozen=True, slots=True)
class MixedPrecisionPolicy:
    """Dtypes of a group's computation and communication. Sharded parameters keep theirs: the optimizer step is exact.

    Args:
        param_dtype: dtype of the unsharded parameters, so of forward, backward and the all-gather. Each rank casts its
            own piece before the all-gather. Default None: the parameters' own dtype.
        reduce_dtype: dtype in which gradients are reduced over ranks and accumulated over backward passes.
            Default None: ``param_dtype``, or the parameters' own without one.
        output_dtype: floating-point outputs of the module's forward are cast to this. Default None: no cast.
        cast_forward_inputs: cast floating-point inputs of the module's forward to ``param_dtype``. Default True.
    """

    param_dtype: Any = None
    reduce_dtype: Any = None
    output_dtype: Any = None
    cast_forward_inputs: bool = True


@dataclass(frozen=True, slots=True)
class OffloadPolicy:
    """Nothing is offloaded: the default, and the base of the other policies."""


@dataclass(frozen=True, slots=True)
class CPUOffloadPolicy(OffloadPolicy):
    """Sharded parameters, gradients and optimizer states live on the host.

    Args:
        pin_memory: keep them in page-locked memory, so that copies overlap computation. Default True.
        link: the streams of the copies. Default: their own; pass ``hp_offload.SwapManager()`` to share those of swapped
            activations, so that copies run in the order in which they are needed.
    """

    pin_memory: bool = True
    link: CopyLink | None = None


@dataclass(frozen=True, slots=True)
class ParameterFacts:
    """Properties of a parameter that decide how it is communicated.

    Attributes:
        parameter: the managed parameter.
        name: the parameter's.
        original: the object that ``shard_placement_fn`` is asked about.
        dtype: of its elements.
        trains: it requires gradients.
        shape: of the unsharded tensor on this rank.
        nbytes: of the full parameter, the same on all ranks.
        encoded: it is gathered as bytes that its class makes of whole rows.
    """

    parameter: Any
    name: str
    original: Any
    dtype: Any
    trains: bool
    shape: Sequence[int]
    nbytes: int
    encoded: bool = False


@dataclass(frozen=True, slots=True)
class BucketPlan:
    """Parameters that are communicated together, and how they are sharded.

    Attributes:
        parameters: the managed parameters.
        unit: number of elements that stay together: a row's, or those of a slice along ``dim``.
        sharded: False for parameters that stay replicated.
        dim: the sharded dim of its one parameter; None for ranges of flattened elements.
        encoded: they are gathered as bytes that their classes make of whole rows.
    """

    parameters: list[Any]
    unit: int = 1
    sharded: bool = True
    dim: int | None = None
    encoded: bool = False


@dataclass(frozen=True, slots=True)
class GroupOptions:
    """Options of a group, from the arguments of `fully_shard` or `hsdp`.

    Attributes:
        policy: dtypes of computation and communication.
        reshard_after_forward: True, False, or the size of the smaller group to reshard to.
        offload: the policy of shards on the host; None for shards on the device.
        by_parameter: communicate each parameter by itself, not the group's together.
        placement_of: the user's ``shard_placement_fn``; None for ranges of elements.
        deterministic: sums don't depend on the number of ranks.
        threshold: parameters of fewer bytes stay replicated, and their gradients are averaged.
        bucket_bytes: limit of a bucket, which holds one parameter at least; None for no limit.
        any_dim: the framework can shard parameters along any dim.
    """

    policy: MixedPrecisionPolicy = MixedPrecisionPolicy()
    reshard_after_forward: bool | int = True
    offload: CPUOffloadPolicy | None = None
    by_parameter: bool = False
    placement_of: Callable[[Any], Any] | None = None
    deterministic: bool = False
    threshold: float = 0
    bucket_bytes: int | None = None
    any_dim: bool = False

    @property
    def reshards(self) -> bool:
        """True if gathered parameters are freed after forward; a smaller group of one rank keeps them."""
        return self.reshard_after_forward is True or self.reshard_after_forward > 1

    def together(self, facts: Iterable[ParameterFacts]) -> list[BucketPlan]:
        """Plan which parameters of a group are communicated together.

        Args:
            facts: of the group's parameters, in order.
        """
        kinds: dict[Any, list[ParameterFacts]] = {}
        for each in facts:
            # Parameters sharded between slices have a bucket of their own; others share one by dtype and requires_grad.
            unit, dim = self.sharding_of(each.name, each.original, each.shape)
            alone = each.name if self.by_parameter or unit > 1 or dim is not None else ""
            if each.encoded:
                unit = _row(each, dim)
            key = (each.dtype, each.trains, alone, unit, each.nbytes >= self.threshold, dim, each.encoded)
            kinds.setdefault(key, []).append(each)
        return [
            BucketPlan([each.parameter for each in members], unit, sharded, dim, encoded)
            for (*_, unit, sharded, dim, encoded), alike in _joined_rows(kinds).items()
            for members in self._in_buckets(alike)
        ]

    def _in_buckets(self, alike: list[ParameterFacts]) -> Iterator[list[ParameterFacts]]:
        if self.bucket_bytes is None:
            yield alike
            return
        bucket: list[ParameterFacts] = []
        for each in alike:
            if bucket and sum(one.nbytes for one in bucket) + each.nbytes > self.bucket_bytes:
                yield bucket
                bucket = []
            bucket.append(each)
        yield bucket

    def alignment(self, plan: BucketPlan, itemsize: int) -> int:
        """Return the alignment of parameters and pieces in a flat buffer, in elements.

        Args:
            plan: of the bucket.
            itemsize: bytes of an element, in the smallest of the buffer's dtypes.
        """
        if self.deterministic or plan.unit > 1 or plan.dim is not None:
            return math.lcm(plan.unit, BLOCK if self.deterministic else 1)
        return max(1, ALIGNMENT // itemsize)

    def alignment_of_large(self, plan: BucketPlan) -> int:
        """Return the alignment of parameters of many elements: blocks of 256, as states of eight bits have them.

        Args:
            plan: of the bucket.
        """
        return 1 if self.deterministic or plan.unit > 1 or plan.dim is not None else 256

    def sharding_of(self, name: str, parameter: Any, shape: Sequence[int]) -> tuple[int, int | None]:
        """Return how many elements of a parameter stay together, and the sharded dim, None for the first.

        Args:
            name: the parameter's, for errors.
            parameter: the argument of ``shard_placement_fn``.
            shape: of the unsharded tensor on this rank.

        Raises:
            TypeError: it returns something that is neither a ``Shard`` nor None.
            ValueError: it returns a ``Shard`` of a dim that the parameter lacks.
            NotImplementedError: it returns a ``Shard`` of a dim that can't be sharded here, or a mesh.
        """
        placement = None if self.placement_of is None else self.placement_of(parameter)
        if placement is None:
            return 1, None
        if type(placement).__name__ == "ShardPlacementResult":
            raise NotImplementedError(
                f"fully_shard: shard_placement_fn returned a mesh for {name!r}, but parameters of one group are on one"
                " mesh. Make a group of those on another mesh: call fully_shard(experts, mesh_of_experts) on their"
                " module, laid out over the other ranks before, and then on the module around it"
            )
        dim = getattr(placement, "dim", None)
        if type(placement).__name__ != "Shard" or not isinstance(dim, int):
            raise TypeError(
                f"fully_shard: shard_placement_fn must return a Shard or None, got {placement!r} for {name!r}"
            )
        what = f"fully_shard: shard_placement_fn returned {placement!r} for {name!r} of shape {tuple(shape)}"
        if not -len(shape) <= dim < len(shape):
            raise ValueError(f"{what}, which has no such dim. Return a Shard of one of its dims, or None")
        dim %= len(shape)
        if dim and (self.deterministic or not self.any_dim):
            why = (
                "deterministic=True adds in blocks of consecutive elements"
                if self.any_dim
                else "on MindSpore a rank holds one range of a parameter's elements"
            )
            raise NotImplementedError(
                f"{what}: {why}, so it can be sharded between rows (Shard(0)), not along another dim. Return Shard(0),"
                " or None to shard it at any element"
            )
        unit = math.prod(size for at, size in enumerate(shape) if at != dim)
        return (unit, dim or None) if unit else (1, None)


_LONGEST = 64
"""How many times the longest row the common multiple of rows in a bucket may be: pieces are padded to it."""


def _row(facts: ParameterFacts, dim: int | None) -> int:
    """Return the elements of a row of an encoded parameter.

    Raises:
        NotImplementedError: it is to be sharded along another dim.
    """
    if dim is not None:
        raise NotImplementedError(
            f"fully_shard: shard_placement_fn returned Shard({dim}) for {facts.name!r}, which has an all-gather"
            " extension: it encodes whole rows. Return Shard(0) or None"
        )
    return max(1, math.prod(facts.shape[1:]))


def _joined_rows(kinds: dict[Any, list[ParameterFacts]]) -> dict[Any, list[ParameterFacts]]:
    """Put encoded parameters with rows of several lengths together, in buckets that are cut between all their rows."""
    joined: dict[Any, list[ParameterFacts]] = {}
    units: dict[Any, int] = {}
    for key, members in kinds.items():
        *first, unit, large, dim, encoded = key
        alike = (*first, large, dim)
        common = math.lcm(units.get(alike, 1), unit)
        if not encoded or first[-1] or common > _LONGEST * max(units.get(alike, 1), unit):
            joined[key] = members
            continue
        before = joined.pop((*first, units[alike], large, dim, True), []) if alike in units else []
        units[alike] = common
        joined[*first, common, large, dim, True] = [*before, *members]
    return joined


def _ours(policy: Any) -> Any:
    """Convert a policy of torch's FSDP2 to ours of the same name and fields; return others as they are."""
    kind: Any = {each.__name__: each for each in (MixedPrecisionPolicy, OffloadPolicy, CPUOffloadPolicy)}.get(
        type(policy).__name__
    )
    if kind is None or not type(policy).__module__.startswith("torch.distributed."):
        return policy
    return kind(**{field.name: getattr(policy, field.name) for field in fields(kind) if hasattr(policy, field.name)})


def check_options(
    *,
    reshard_after_forward: Any,
    mixed_precision: Any,
    mp_policy: Any,
    offload_policy: Any,
    comm_fusion: Any,
    comm_fusion_zero_copy: Any,
    shard_placement_fn: Any,
    deterministic: Any,
    zero_copy: bool,
    any_dim: bool = False,
) -> GroupOptions:
    """Check the options of `fully_shard`.

    Args:
        reshard_after_forward: this and the following are arguments of `fully_shard`.
        mixed_precision: see there.
        mp_policy: see there.
        offload_policy: see there.
        comm_fusion: see there.
        comm_fusion_zero_copy: see there.
        shard_placement_fn: see there.
        deterministic: see there.
        zero_copy: the framework's value of ``comm_fusion_zero_copy``.
        any_dim: the framework can shard parameters along any dim.

    Raises:
        ValueError, TypeError, NotImplementedError: see `fully_shard`.
    """
    check_reshard(reshard_after_forward, "fully_shard", sizes=True)
    if mixed_precision is not None and mp_policy is not None:
        raise ValueError("fully_shard: mixed_precision and mp_policy are the same argument; pass only one")
    policy, offload_policy = _ours(mixed_precision or mp_policy or MixedPrecisionPolicy()), _ours(offload_policy)
    if not isinstance(policy, MixedPrecisionPolicy):
        raise TypeError(f"fully_shard: expected an hp_fsdp.MixedPrecisionPolicy, got {type(policy).__name__}")
    if offload_policy is not None and not isinstance(offload_policy, OffloadPolicy):
        raise TypeError(f"fully_shard: expected an hp_fsdp.OffloadPolicy, got {type(offload_policy).__name__}")
    if shard_placement_fn is not None and not callable(shard_placement_fn):
        raise TypeError(
            "fully_shard: shard_placement_fn must be a function of a parameter, got"
            f" {type(shard_placement_fn).__name__}"
        )
    offload = offload_policy if isinstance(offload_policy, CPUOffloadPolicy) else None
    if offload is not None and offload.link is not None and get_platform().name != "torch":
        raise NotImplementedError(
            "fully_shard: CPUOffloadPolicy(link=...) is not supported on MindSpore, where copies are done at once;"
            " leave it out"
        )
    if comm_fusion_zero_copy not in (None, zero_copy):
        advice = "nothing is copied" if zero_copy else "no write to a view reaches its base"
        raise NotImplementedError(
            f"fully_shard: comm_fusion_zero_copy={comm_fusion_zero_copy} is not supported yet; leave it out: {advice}"
        )
    return GroupOptions(
        policy,
        reshard_after_forward,
        offload,
        not comm_fusion,
        shard_placement_fn,
        bool(deterministic),
        any_dim=any_dim,
    )


def check_reshard(value: Any, where: str, *, sizes: bool) -> None:
    """Raise if ``reshard_after_forward`` has a wrong type.

    Args:
        value: the argument.
        where: the function's name.
        sizes: accept the size of a smaller group.
    """
    if not isinstance(value, bool):
        if isinstance(value, int):
            if sizes:
                return
            raise NotImplementedError(
                f"{where}: reshard_after_forward={value}, the size of a smaller group to reshard to, is not supported "
                "yet. Use True (reshard over all ranks, least memory) or False (keep gathered until backward, least "
                "communication)"
            )
        raise TypeError(f"{where}: reshard_after_forward must be True or False, got {value!r}")
