"""The options of `fully_shard`, checked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hp_fsdp.controls import check_reshard
from hp_fsdp.policies import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

__all__ = ["GroupOptions", "check_options"]


@dataclass(frozen=True, slots=True)
class GroupOptions:
    """How a group communicates and where it lives, as `fully_shard` was told.

    Attributes:
        policy: dtypes of computation and communication.
        reshard_after_forward: True, False, or the size of the smaller group to reshard to.
        offload: where shards live, if on the host.
        by_parameter: each parameter is communicated by itself, not the group's as one.
        placement_of: gives a parameter's wanted placement, or None.
        deterministic: sums don't depend on the number of ranks.
    """

    policy: MixedPrecisionPolicy = MixedPrecisionPolicy()
    reshard_after_forward: bool | int = True
    offload: CPUOffloadPolicy | None = None
    by_parameter: bool = False
    placement_of: Callable[[Any], Any] | None = None
    deterministic: bool = False


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
    complete: bool,
) -> GroupOptions:
    """Checks the options of `fully_shard`.

    Args:
        reshard_after_forward: as given.
        mixed_precision: as given.
        mp_policy: as given.
        offload_policy: as given.
        comm_fusion: as given.
        comm_fusion_zero_copy: as given.
        shard_placement_fn: as given.
        deterministic: as given.
        zero_copy: what ``comm_fusion_zero_copy`` is with this framework.
        complete: this framework has all options.

    Raises:
        ValueError, TypeError, NotImplementedError: see `fully_shard`.
    """
    check_reshard(reshard_after_forward, "fully_shard", sizes=complete)
    if mixed_precision is not None and mp_policy is not None:
        raise ValueError("fully_shard: mixed_precision and mp_policy are two names of one argument, give one of them")
    policy = mixed_precision or mp_policy or MixedPrecisionPolicy()
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
    later = {
        f"offload_policy={offload_policy!r}": (offload is not None and not complete, "leave it out"),
        "comm_fusion=False": (not comm_fusion and not complete, "leave it out: communication is by group"),
        f"comm_fusion_zero_copy={comm_fusion_zero_copy}": (
            comm_fusion_zero_copy not in (None, zero_copy),
            "leave it out: nothing is copied" if zero_copy else "leave it out: no write to a view reaches its base",
        ),
        "shard_placement_fn": (
            shard_placement_fn is not None and not complete,
            "leave it out: parameters are cut where the flat buffer is",
        ),
        "deterministic=True": (
            deterministic and not complete,
            "leave it out: sums over ranks then depend on their number",
        ),
    }
    for argument, (given, advice) in later.items():
        if given:
            raise NotImplementedError(f"fully_shard: {argument} is not supported yet; {advice}")
    return GroupOptions(
        policy, reshard_after_forward, offload, not comm_fusion, shard_placement_fn, bool(deterministic)
    )
