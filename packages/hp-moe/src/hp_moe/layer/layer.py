"""A layer of experts over ranks: tokens go to their experts and come back, other micro-batches' work beside."""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from hp_dtensor import DeviceMesh
from hp_dtensor.extend import mark_summed_gradients
from hp_moe.layer import inputs
from hp_moe.layer.experts import compute, describe
from hp_moe.layer.inputs import local_inputs, local_part
from hp_moe.placement.placement import ExpertPlacement
from hp_moe.placement.replicas import Loans, borrow, check_slots, choose_holders
from hp_moe.port import port
from hp_moe.routes.capacity import DropCount, Seated
from hp_moe.routes.dispatch import HEADER, Combine, Message, Sources, fit
from hp_moe.routes.routes import Axes, Begin, Exact, Fast, Gathered, Route, TwoHops, at_once
from hp_platform import get_platform
from hp_platform.extend import share_bytes

Tensor = Any
Beside = Callable[[], Any]
Function = Callable[..., Any]
PendingRoute = tuple[Route, Callable[[], tuple[list[int], list[int]]], Callable[[], ValueError], list[int], list[int]]
"""A route, what waits for the numbers of its exchange, what builds the error of all ranks where inputs are wrong, and
how many numbers go to each rank and come from each."""


class Style(Protocol):
    """What a layer asks of its style: see ``BaseExpertParallel`` and ``ExpertParallel``."""

    token_dispatcher: str
    combine_tokens: Combine
    async_combine: bool
    capacity: int | None
    chunks: int
    slots: int
    deterministic: bool

    @property
    def settings(self) -> str: ...
    def dispatch(self, exchange: Any, tokens: Any, weights: Any) -> Any: ...
    def combine(self, exchange: Any, rows: Any) -> Any: ...


class ExpertLayer:
    """The forward of a module of experts whose experts are spread over ranks.

    Args:
        module: of experts.
        style: that it runs by.
        placement: which rank has which expert.
        experts: the mesh axis that experts are spread over; None where each rank has all.
        features: the mesh axis that the features of each are sharded over, or None.
        axes: two axes that ``experts`` is made of, where tokens travel over one after the other; or None.

    Attributes:
        launch: what begins the exchanges of dispatch and of combine: see ``overlap_experts``.
        agreed: the kinds of inputs that ranks have told each other to have in common.
        drops: what experts have dropped, with a capacity.
    """

    def __init__(
        self,
        module: Any,
        style: Style,
        placement: ExpertPlacement,
        experts: DeviceMesh | None,
        features: DeviceMesh | None,
        axes: Axes | None = None,
    ) -> None:
        self.axes = axes
        self.own, self.style = describe(module), style
        self.experts, self.features = experts, features
        self.group = None if experts is None else experts.get_group()
        self.ranks = [get_platform().groups.rank()] if experts is None else experts.ranks.flatten().tolist()
        self.rank = 0 if self.group is None else get_platform().groups.rank(self.group)
        self.launch: tuple[Begin, Begin] = (at_once, at_once)
        self.agreed: set[int] = set()
        self.drops = DropCount()
        self.load = [0] * self.own.experts
        self.sums = port().piece_sums() if style.deterministic else None
        self.place(placement)

    def __deepcopy__(self, memo: dict[int, Any]) -> ExpertLayer:
        """Copy the layer, with the model that it is of: meshes and groups stay those of the original."""
        same = (self.group, self.experts, self.features, self.axes)
        memo.update((id(each), each) for each in same if each is not None)
        copied = memo[id(self)] = object.__new__(type(self))
        vars(copied).update(copy.deepcopy(vars(self), memo))
        return copied

    def place(self, placement: ExpertPlacement) -> None:
        """Run by a placement from now on.

        Args:
            placement: its homes are those of the parameters' layout.
        """
        self.placement = placement
        self.widths = [len(local) for local in placement.local]
        self.computed = list(itertools.chain.from_iterable(placement.local))
        self.loans = Loans.of(placement, self.rank)
        first = {expert: place for place, expert in reversed([*enumerate(self.computed)])}
        self.slots = tuple(first[expert] for expert in range(self.own.experts))

    def check(self, placement: ExpertPlacement) -> None:
        """Refuse a placement that does not fit.

        Raises:
            ValueError: see ``check_slots``.
        """
        check_slots(self.own.name, placement, self.own.experts, len(self.widths), self.style.slots)

    def __call__(
        self,
        module: Any,
        tokens: Tensor,
        chosen: Tensor,
        weights: Tensor,
        beside: Beside | None = None,
        problem: str | None = None,
    ) -> Any:
        """Compute the sum over choices of weight times expert, for each token.

        Args:
            module: of experts.
            tokens: ``[tokens, hidden]``.
            chosen: the numbers of experts, ``[tokens, choices]``.
            weights: of the choices.
            beside: computed while counts travel, or with ``async_combine`` results.
            problem: what is wrong with them on this rank, if anything is known to be.

        Returns:
            The sums, and what ``beside`` returned if there is one.

        Raises:
            ValueError: there is a problem, or the inputs of any rank are wrong; on all ranks.
        """
        (tokens, chosen, weights), restore = local_inputs(
            self.own.name, self.experts, self.features, (tokens, chosen, weights)
        )
        parts = {name: local_part(getattr(module, name), self.features) for name in self.own.parameters}
        guests = borrow(self.own.name, self.loans, parts, self.group, deterministic=self.sums is not None)
        chunks = self._chunks(tokens, chosen, weights)
        last = Once(beside)
        routes = self._routes(module, chunks, problem, None if self.style.async_combine else last)
        if len(routes) == 1 and not self.style.async_combine:
            own = dict(parts)
            routes[0].ahead = functools.partial(_defer_weight_gradients, own)
            rows = self._rows(module, routes[0], self.style.dispatch(routes[0], tokens, weights), own, guests)
            out = self.style.combine(routes[0], rows)
        else:
            out = self._interleaved(module, chunks, routes, parts, guests, last)
        if isinstance(routes[0], Seated) and module.training and not port().recomputes():
            self.drops.add(routes[0])
        out = restore(port().cast(port().pinned(out, chosen, self.own.name), tokens))
        return out if beside is None else (out, last.result)

    def _chunks(self, *inputs: Tensor) -> list[tuple[Tensor, ...]]:
        """Cut the tokens of this rank into as many parts as the style says, the first one token longer or equal."""
        count, tokens = self.style.chunks, len(inputs[0])
        if count == 1:
            return [inputs]
        ends = [tokens * place // count for place in range(count + 1)]
        return [tuple(each[first:end] for each in inputs) for first, end in itertools.pairwise(ends)]

    def _routes(
        self,
        module: Any,
        chunks: Sequence[tuple[Tensor, ...]],
        problem: str | None,
        meanwhile: Callable[[], None] | None,
    ) -> list[Route]:
        """Plan the ways of all parts; run what there is meanwhile."""
        if self.agreed and self.style.capacity is not None:
            chunk = self._checked(module, chunks[0], problem)
            if self._common(*chunk)[0] in self.agreed:  # on all ranks or on none
                route = self._seated(*chunk)
                if meanwhile is not None:
                    meanwhile()
                return [route]
        elif self.agreed:
            pending = [self._ask(module, chunk, problem) for chunk in chunks]
            if meanwhile is not None:
                meanwhile()
            return [self._plan(each) for each in pending]
        # Ranks that disagree must not begin a second exchange: after the first call they don't.
        routes = [self._plan(self._ask(module, chunk, problem)) for chunk in chunks]
        self.agreed.update(self._common(*chunk)[0] for chunk in chunks)
        if meanwhile is not None:
            meanwhile()
        return routes

    def _interleaved(
        self,
        module: Any,
        chunks: Sequence[tuple[Tensor, ...]],
        routes: Sequence[Route],
        parts: Mapping[str, Tensor],
        guests: Mapping[str, Tensor],
        last: Callable[[], None],
    ) -> Tensor:
        """Compute each part while another one's exchange is under way."""
        held = [dict(parts) for _ in routes]
        for route, (tokens, _, weights), own in zip(routes, chunks, held, strict=True):
            route.ahead = functools.partial(_defer_weight_gradients, own)
            route.begin_dispatch(tokens, weights)
        for route, own in zip(routes, held, strict=True):
            route.begin_combine(self._rows(module, route, route.end_dispatch(), own, guests))
        last()
        return port().joined([route.end_combine() for route in routes])

    def _rows(
        self, module: Any, route: Route, rows: Tensor, parts: Mapping[str, Tensor], guests: Mapping[str, Tensor]
    ) -> Tensor:
        scale = None if route.scale is None else port().cast(route.scale, rows)
        return self._compute(module, rows, route, parts, guests, scale)

    def _compute(
        self,
        module: Any,
        rows: Tensor,
        route: Route,
        parts: Mapping[str, Tensor],
        guests: Mapping[str, Tensor],
        scale: Tensor | None,
    ) -> Tensor:
        """Compute the rows of this rank's own experts, then those of its replicas."""
        sizes = route.sizes
        if self.sums is not None:
            assert isinstance(route, Exact)
            pieces = [count for _, count in route.exchange.blocks]
            sources = Sources.of(self.placement, self.rank, pieces, route.shares)
            leaves = [getattr(module, name) for name in parts]
            run = functools.partial(compute, module, self.own)
            return port().in_pieces(self.sums, sources, self.group, leaves, parts, guests, rows, run)
        if self.loans is None:
            return compute(module, self.own, rows, sizes, parts.__getitem__, scale)
        count = self.placement.home.count(self.rank)
        end, here, there = sum(sizes[:count]), list(sizes[:count]), self.loans.sizes(sizes[count:])
        scales = (None, None) if scale is None else (scale[:end], scale[end:])
        own = compute(module, self.own, rows[:end], here, parts.__getitem__, scales[0])
        return port().joined([own, compute(module, self.own, rows[end:], there, guests.__getitem__, scales[1])])

    def rows(
        self,
        module: Any,
        rows: Tensor,
        counts: Tensor | Sequence[int],
        scores: Tensor | None,
        beside: Beside | None = None,
    ) -> Any:
        """Compute rows ordered by expert, as ``GroupedExperts`` does."""
        problem = None
        if len(counts) != self.own.experts:
            problem = f"has counts of {len(counts)} experts, but there are {self.own.experts}"
            counts = (0,) * self.own.experts
        chosen = port().repeated_numbers(counts, rows)
        if problem is None and len(chosen) != len(rows):
            problem = f"has counts that add up to {len(chosen)} rows, but there are {len(rows)}"
        weights = port().ones(rows) if scores is None else scores
        return self(module, rows, chosen.reshape(-1, 1), weights.reshape(-1, 1), beside, problem)

    # ---- where tokens go ----
    def _ask(self, module: Any, chunk: Sequence[Tensor], problem: str | None) -> PendingRoute:
        """Begin to tell all ranks what goes to them."""
        tokens, chosen, weights = chunk
        f, ranks = port(), len(self.widths)
        problem = problem or inputs.problem(self.own, getattr(module, self.own.second), tokens, chosen, weights)
        if problem:  # this rank takes part without tokens
            chosen = f.repeated_numbers((0,) * self.own.experts, tokens).reshape(-1, 1)
        choices = chosen.shape[-1]
        kind, words = self._common(tokens, chosen, weights)
        table = tuple(range(self.own.experts)) if self.loans else self.slots
        slots, unknown = f.slots(chosen, table)
        shares = None
        if self.loans:
            whole = self.style.deterministic
            slots, shares = choose_holders(slots, self.placement, self.group, self.rank, whole=whole)
        route = self._kind(choices, unknown)(slots, choices, self.widths, self.group)
        route.launch, route.shares = self.launch, shares
        told = f.message([(kind,), (1,) if problem else unknown + f.not_finite(weights)], slots)
        counts, copies = f.split(f.count(slots, len(self.computed)), self.widths), route.copies()
        parts = zip(counts, copies, [told] * ranks, route.further(counts), strict=True)
        message = f.message([part for *own, further in parts for part in (*own, *further)], slots)
        own = self.widths[self.rank] + len(HEADER)
        to_each, of_each = route.further_sizes()
        sent = [width + len(HEADER) + more for width, more in zip(self.widths, to_each, strict=True)]
        received = [own + more for more in of_each]

        def refused() -> ValueError:
            said = problem or inputs.wrong_values(self.own, chosen, weights)
            return inputs.refusal(self.own.name, said, words, self.ranks, self.group, slots)

        return route, f.exchange_numbers(message, sent, received, self.group), refused, sent, received

    def _common(self, tokens: Tensor, chosen: Tensor, weights: Tensor) -> tuple[int, str]:
        """Return what ranks must have in common."""
        f = port()
        return inputs.kind(chosen.shape[-1], f.traits(tokens), f.traits(weights), self.style.settings)

    def _checked(self, module: Any, chunk: Sequence[Tensor], problem: str | None) -> Sequence[Tensor]:
        """Refuse wrong inputs, and on hosts those of another kind than other ranks have: Note [Seats]."""
        problem = problem or inputs.problem(self.own, getattr(module, self.own.second), *chunk)
        if get_platform().devices.kind == "cpu":
            kind, words = self._common(*chunk)
            said = share_bytes(f"{kind} {bool(problem)}".encode(), self.group)
            if problem or len(set(said)) > 1:
                raise inputs.refusal(self.own.name, problem or "", words, self.ranks, self.group, chunk[1])
        if problem:
            raise ValueError(f"{self.own.name}: rank {self.ranks[self.rank]} {problem}.")
        return chunk

    def _seated(self, tokens: Tensor, chosen: Tensor, weights: Tensor) -> Route:
        """Plan a way that asks no other rank."""
        slots, unknown = port().slots(chosen, self.slots)
        route = self._kind(chosen.shape[-1], unknown)(slots, chosen.shape[-1], self.widths, self.group)
        route.launch = self.launch
        return route

    def _kind(self, choices: int, unknown: Tensor) -> Callable[..., Route]:
        if self.style.capacity is not None:
            return functools.partial(Seated, capacity=self.style.capacity, own=self.widths[self.rank], wrong=unknown)
        if self.style.token_dispatcher == "all_gather":
            return Gathered
        if self.axes is not None:
            return functools.partial(TwoHops, axes=self.axes)
        return Fast if self.style.combine_tokens == "fast" and choices > 1 else Exact

    def _plan(self, pending: PendingRoute) -> Route:
        """Wait for what ranks tell each other, which is the layer's one wait of the host; refuse what is wrong."""
        route, wait, refused, *sizes = pending
        (sent, to_each), (received, of_each) = zip(wait(), sizes, strict=True)
        sent = [Message(list(each), width) for each, width in zip(_parts(sent, to_each), self.widths, strict=True)]
        received = [Message(list(each), self.widths[self.rank]) for each in _parts(received, of_each)]
        if not fit(received):
            raise refused()
        if self.style.slots:
            rows = itertools.chain.from_iterable(each.rows for each in sent)
            for expert, count in zip(self.computed, rows, strict=True):
                self.load[expert] += count
        route.plan(sent, received)
        return route


class Once:
    """A function that is called once, and its result."""

    def __init__(self, function: Beside | None) -> None:
        self.function, self.result = function, None

    def __call__(self) -> None:
        function, self.function = self.function, None
        if function is not None:
            self.result = function()


def _defer_weight_gradients(parts: dict[str, Tensor]) -> None:
    """Hold the gradients of weights back until those of tokens travel."""
    for name, part in parts.items():
        parts[name] = port().held(part)


def _parts(numbers: Sequence[int], sizes: Sequence[int]) -> Iterator[Sequence[int]]:
    """Cut numbers into parts."""
    ends = list(itertools.accumulate(sizes, initial=0))
    return (numbers[first:end] for first, end in itertools.pairwise(ends))


def run_over_ranks(
    module: Any,
    style: Style,
    placement: ExpertPlacement,
    experts: DeviceMesh | None,
    features: DeviceMesh | None,
    axes: Axes | None = None,
) -> None:
    """Put an ``ExpertLayer`` in place of a module's forward; its hooks stay."""
    layer = ExpertLayer(module, style, placement, experts, features, axes)
    if len(layer.own.first) == 2:
        port().replace_forward(
            module,
            lambda module, x, counts, scores=None, beside=None: module._expert_layer.rows(
                module, x, counts, scores, beside
            ),
        )
    else:
        port().replace_forward(
            module,
            lambda module, hidden_states, top_k_index, top_k_weights: module._expert_layer(
                module, hidden_states, top_k_index, top_k_weights
            ),
        )
    module._expert_layer = layer
    mark_summed_gradients(module)  # which `fully_shard` asks for


class Overlap(Protocol):
    """The part of ``hp_pipeline.CommComputeOverlap`` that is used here."""

    def wrap_dispatch(self, fn: Function, *, stage: int = 0) -> Function:
        """Return an exchange with a meeting before and after it."""
        ...

    def wrap_combine(self, fn: Function, is_last_layer: bool = False, *, stage: int = 0) -> Function:
        """Return an exchange with a meeting before and after it, for the stage's last layer before it alone."""
        ...


def overlap_experts(model: Any, overlap: Overlap, *, stage: int = 0) -> int:
    """Let a pipeline run another micro-batch's computation under the exchanges of experts.

    To be called once on each stage, after the styles have been applied, before a schedule is built with ``overlap=``::

        overlap = CommComputeOverlap()
        for stage in stages:
            overlap_experts(stage.submodule, overlap, stage=stage.stage_index)
        schedule = ScheduleInterleaved1F1B(stages, 8, overlap_b_f=True, overlap=overlap)

    Args:
        model: of a stage; its modules of experts run once in a forward, in the order of its modules.
        overlap: such as ``hp_pipeline.CommComputeOverlap``.
        stage: its number.

    Returns:
        The number of modules of experts, 0 where the stage has none.

    Raises:
        ValueError: experts whose exchanges are waited for at once, or run in parts already.
    """
    named = ((name, getattr(module, "_expert_layer", None)) for name, module in port().named_modules(model))
    layers = [(name, layer) for name, layer in named if layer is not None and layer.group is not None]
    for name, layer in layers:
        style = layer.style
        if style.token_dispatcher == "all_gather" or style.chunks > 1 or style.async_combine:
            raise ValueError(
                f"overlap_experts: {name} runs by {style!r}, whose exchanges are not one dispatch and one combine that"
                " another micro-batch could run under: use ExpertParallel() or ExpertParallel('deredundency')"
            )
    for place, (_, layer) in enumerate(layers):
        last = place == len(layers) - 1
        layer.launch = (
            overlap.wrap_dispatch(at_once, stage=stage),
            overlap.wrap_combine(at_once, last, stage=stage),
        )
    return len(layers)
