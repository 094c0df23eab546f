"""FlatBucket: a group's parameters of one dtype in one flat buffer: dtypes, offsets and layouts, on any framework."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hp_fsdp.axes import DataAxes, PostForwardRanks
from hp_fsdp.groups.managed_params import FlatLayout

if TYPE_CHECKING:
    from hp_fsdp.options import BucketPlan, GroupOptions


class FlatBucket:
    """Parameters of one dtype, sharded, gathered and reduced together; a framework's ``Bucket`` adds the buffers.

    Args:
        plan: the parameters, in the order in which they lie in the buffer, all of one dtype, and how they are sharded.
        axes: the axes of data parallelism.
        device: of the buffers; meta if the parameters are materialised later; None if there is no choice.
        options: the arguments of `fully_shard`.
        owner: text that names the group in errors.

    Attributes:
        eight_bit_states: parameters of many elements are cut where optimizer states of eight bits can be.
        source: the shard that a gather reads, until it is done.
        post_forward_shard: what a smaller group of ranks keeps between forward and backward; None if there is none.
        owns_full: the gathered buffer has memory of its own to free.
    """

    eight_bit_states = False
    owns_full: bool

    def __init__(self, plan: BucketPlan, axes: DataAxes, device: Any, options: GroupOptions, owner: str) -> None:
        self.parameters: list[Any] = plan.parameters
        self.axes = axes
        self.device = device
        self.owner = owner
        self.offload = options.offload
        self.policy = options.policy
        self.deterministic = options.deterministic
        self.dtype: Any = self.parameters[0].facts().dtype
        self.choose_dtypes()
        self.layout = FlatLayout.of(
            [parameter.numel for parameter in self.parameters],
            axes.shard_size,
            align=options.alignment(plan, min(map(self.itemsize, (self.dtype, self.compute_dtype, self.reduce_dtype)))),
            align_large=options.alignment_of_large(plan) if self.eight_bit_states else 1,
        )
        self.source: Any = None
        self.post_forward_shard: Any = None
        self.post_forward_group: Any = None
        # Layouts first: what can't be laid out raises before any parameter is changed.
        self.specs = [
            axes.sharded_spec(
                parameter.name, self.layout.units(index), parameter.global_shape, parameter.inner, plan.dim
            )
            for index, parameter in enumerate(self.parameters)
        ]

    @staticmethod
    def itemsize(dtype: Any) -> int:
        """Return the bytes of an element."""
        raise NotImplementedError

    def is_floating(self) -> bool:
        """Tell whether the parameters' dtype is one of floating point."""
        raise NotImplementedError

    def choose_dtypes(self) -> None:
        """Set the dtypes of computation and of reductions."""
        compute, reduce = self.policy.param_dtype, self.policy.reduce_dtype
        casts = self.is_floating()
        self.compute_dtype: Any = compute if casts and compute is not None else self.dtype
        self.reduce_dtype: Any = reduce if casts and reduce is not None else self.compute_dtype

    @property
    def trains(self) -> bool:
        """True if any parameter requires gradients."""
        return any(parameter.trains for parameter in self.parameters)

    def piece_of_full(self, place: int, size: int) -> Any:
        """Copy piece number ``place`` of the gathered buffer, in ``size`` equal pieces."""
        raise NotImplementedError

    def free(self) -> None:
        """Free the gathered buffer's memory."""
        raise NotImplementedError

    def release(self, ranks: PostForwardRanks | None = None) -> None:
        """Free the gathered buffer.

        Args:
            ranks: the ranks among which to keep a post-forward shard. Default: keep nothing.
        """
        self.source = self.post_forward_shard = None
        if self.owns_full:
            if ranks is not None:
                self.post_forward_group = ranks.group
                self.post_forward_shard = self.piece_of_full(ranks.place, ranks.size)
            self.free()
