"""Context: the shared state of the groups of one model, and the order of events in a step, on any framework."""

from __future__ import annotations

from collections.abc import Iterable
from time import perf_counter_ns
from typing import Any, Generic, Self, TypeVar

from hp_dtensor import DeviceMesh
from hp_fsdp.groups.group import Group, check_alike
from hp_fsdp.groups.managed_params import Roster, check_inside, groups_in, inner_mesh, several_outermost
from hp_fsdp.steps.order import ExecutionOrder, check_modes

G = TypeVar("G", bound=Group)


class Context(Generic[G]):
    """Made by the first forward of the outermost sharded module, for that module and all groups inside it.

    At most two groups are gathered at a time (besides those that stay so): the one that computes and, where gathers run
    beside the computation, the one that the last pass ran after it. A framework's ``RootContext`` adds where backward
    begins and ends, and the reductions.

    Args:
        root: the outermost group.

    Attributes:
        groups: all groups, the root too, outer before inner.
        roster: notices what joined the model since the last forward.
        compared: the ranks have compared their models.
        finished: the groups in the order in which their forward ended.
        outermost: the group whose forward is under way, inside no other group's.
        backward: a backward pass is under way.
        agreed: by mesh, how many micro-batches its ranks ran, as compared since the backward pass began.
        ahead: groups gathered ahead of time that have not computed yet.
        trace: events of the pass under way, see `hp_fsdp.explanation.timeline`: kind, group, nanoseconds of a clock.
        last_trace: the same of the last forward and backward that came to their end.
    """

    roster: Roster

    def __init__(self, root: G) -> None:
        self.root = root
        self.groups: list[G] = []
        self.compared = False
        self.order: ExecutionOrder[G] = ExecutionOrder()
        self.backward_order: ExecutionOrder[G] = ExecutionOrder()
        self.finished: list[G] = []
        self.outermost: G | None = None
        self.backward = False
        self.agreed: dict[DeviceMesh, int] = {}
        self.ahead: list[G] = []
        self.trace: list[tuple[str, G | None, int]] = []
        self.last_trace: list[tuple[str, G | None, int]] = []

    @classmethod
    def of(cls, root: G) -> Self:
        """Make the context of the model under ``root``; replaces those of parts of it that ran on their own before."""
        context = cls(root)
        context.enrol()
        return context

    # ---- which groups ----
    def named_modules(self) -> Iterable[tuple[str, Any]]:
        """List the root and the modules inside, with their names."""
        raise NotImplementedError

    def enrol(self) -> None:
        """Find the groups of the model, and shard parameters that no group has: Note [What joins later].

        Raises:
            ValueError, TypeError, RuntimeError: a parameter that can't join.
        """
        if len(self.root.members) > 1:
            raise RuntimeError(several_outermost([type(module).__name__ for module in self.root.members]))
        named = list(self.named_modules())
        names = {id(module): name for name, module in named}
        groups = groups_in(module for _, module in named)
        for group in groups:
            check_inside(group.members, names, type(self.root.module).__name__)
            group.rename(", ".join(names[id(module)] for module in group.members))
        check_modes(groups)
        for group in groups:
            group.check()
        ignored = [parameter for group in groups for parameter in group.ignored]
        inner = inner_mesh(groups)
        joined = [group.add_late_parameters(ignored, inner) for group in groups]
        if any(joined) or groups != self.groups:
            self.compared = False
        self.groups = groups
        for group in groups:
            group.context = self
            group.modules = (*group.members, self.root.module)
            group.layout_ranks = group.axes.layout_ranks(
                self.root.axes, [(parameter.name, parameter.inner) for parameter in group.parameters]
            )
        tensors = [tensor for group in groups for tensor, _ in group.registered_tensors()]
        self.roster = Roster((module for _, module in named), [*tensors, *ignored], self.root.managed.stores)

    # ---- forward ----
    def begin_forward(self, group: G) -> None:
        """Begin the forward of ``group``, which is inside no other group's."""
        if self.backward:  # a backward pass that raised never came to its end
            self.abandon()
        if not self.roster.complete():
            self.enrol()
        self.compare()
        for each in self.groups:
            if each.post_forward_ranks is not None:
                each.drop_post_forward_shards()
            each.check()
            if (each.unsharded or each.gathering is not None) and each.stale():
                each.reshard()
        self.outermost = group
        self.trace = []
        self.order = group.order
        self.order.start()
        self.finished.clear()

    def compare(self) -> None:
        """Compare the models of all ranks, once; raise on all alike if they differ."""
        if not self.compared:
            check_alike(self.groups, self.root.axes)
            self.compared = True

    def end_forward(self) -> None:
        """End the outermost forward."""
        self.drop_ahead()
        self.outermost = None

    def unshard(self, group: G, order: ExecutionOrder[G], chosen: list[G]) -> None:
        """Make the parameters of ``group`` ready, and start to gather the next group.

        Args:
            group: computes now.
            order: predicts the next group.
            chosen: the user's choice of next groups, if any.
        """
        coming = order.visit(group)
        group.start_unshard()
        self.trace.append(("wait", group, perf_counter_ns()))
        if self.ahead and group in self.ahead:
            self.ahead.remove(group)
        if group.overlaps:
            for each in chosen or (() if coming is None else (coming,)):
                if not each.unsharded and each.gathering is None:
                    each.start_unshard()
                    self.ahead.append(each)
        group.finish_unshard()
        self.trace.append(("run", group, perf_counter_ns()))

    def drop_ahead(self) -> None:
        """Free groups that were gathered ahead of time and not used."""
        while self.ahead:
            self.ahead.pop().reshard()

    # ---- backward ----
    def call_at_end(self) -> None:
        """Have the engine call `end_backward` when the backward pass under way is over."""
        raise NotImplementedError

    def begin_backward(self) -> None:
        """Begin the backward pass, and arrange for its end."""
        if self.backward:
            return
        self.backward = True
        self.agreed.clear()
        self.trace.append(("backward", None, perf_counter_ns()))
        self.call_at_end()
        if not self.backward_order.known:
            self.backward_order.start([group for group in reversed(self.finished) if group.unshard_in_backward])

    def end_backward(self) -> None:
        """End the backward pass of all groups."""
        self.drop_ahead()
        self.backward = False
        self.backward_order.start()
        self.trace.append(("end", None, perf_counter_ns()))
        self.last_trace, self.trace = self.trace, []

    def abandon(self) -> None:
        """Reset to the state between steps after an error."""
        self.outermost = None
        self.backward = False
        self.ahead.clear()
        for group in self.groups:
            group.abandon()
        self.backward_order.start()
