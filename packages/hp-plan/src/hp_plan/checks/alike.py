"""What ranks have alike: the plan, the weights, the samples that they share; and what of their random numbers.

Note [Rank 0's weights]
Ranks that draw a model's weights from seeds of their own, or of which one alone has loaded a checkpoint, would join
shards of different models. So `apply` compares a digest of each parameter and buffer, and where ranks differ, all take
the first rank's, with a warning. What has no memory yet, or is sharded already, is not compared.

Note [Draws of a step]
What is dropped depends on the sample, not on the rank that has it: else all ranks would drop the same of different
samples. So before each micro-batch a rank seeds its generators with the step's seed and the micro-batch's number in
the global batch. Ranks that share samples but hold other tokens (`cp`) or other layers (`pp`) have numbers of their
own. Those of `tp` have the same ones: activations that are replicated have to stay equal, and a DTensor's shard
takes its part of what all ranks draw alike.
"""

from __future__ import annotations

import functools
import itertools
import struct
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from hp_plan.plan import ParallelPlan, data_parallel_place
from hp_plan.port import models
from hp_plan.reading.diagnostics import Diagnostic, PlanError
from hp_platform import collectives, get_platform
from hp_platform.extend import agree, launcher_place, say_once, share_bytes

# Those that `apply` reads.
_SECTIONS = ("mesh", "styles", "communication", "context", "pipeline", "fsdp", "experts", "memory", "compile")
_SHOWN = 3  # names in a text


def agree_on_plan(
    plan: ParallelPlan, model: Any, diagnose: Callable[[], Sequence[Diagnostic]], ranks: Sequence[int], group: Any
) -> None:
    """Check the plan on every rank, and that all have the same plan and a model of the same shapes.

    Args:
        plan: this rank's.
        model: this rank's.
        diagnose: finds what is wrong with them.
        ranks: global ranks of the group, in its order.
        group: the ranks that call this.

    Raises:
        PlanError: this rank's diagnostics.
        ValueError: on all ranks: another rank has diagnostics, another plan or other shapes.
    """

    def own() -> bytes:
        diagnostics = diagnose()
        if diagnostics:
            raise PlanError(diagnostics)
        lines = [f"{name} = {getattr(plan, name)!r}" for name in _SECTIONS]
        lines += [f"{name}: {models().describe(tensor)}" for name, tensor in models().named_tensors(model)]
        return "\n".join(lines).encode()

    def failed(texts: Mapping[int, str], error: Exception | None) -> Exception:
        place, alike = launcher_place(), len(texts) == len(ranks) and len(set(texts.values())) == 1
        if isinstance(error, PlanError) and alike and place is not None and place.world_size == len(ranks):
            keys = ", ".join(diagnostic.key for diagnostic in error.diagnostics)
            say_once(error, f"the plan has errors, listed above: {keys}")
        some = "; ".join(f"rank {ranks[place]}: {text}" for place, text in list(texts.items())[:_SHOWN])
        return error or ValueError(f"apply: the plan is refused by {some}")

    texts = [each.decode().split("\n") for each in agree(own, failed, functools.partial(share_bytes, group=group))]
    for rank, lines in zip(ranks, texts, strict=True):
        if lines != texts[0]:
            there, here = _first_difference(texts[0], lines)
            raise ValueError(
                "apply: every rank must pass the same plan and a model of the same shapes, but rank"
                f" {ranks[0]} has {there} where rank {rank} has {here}"
            )


def take_first_weights(model: Any, ranks: Sequence[int], group: Any) -> None:
    """Give all ranks the first rank's weights and buffers where they differ; see Note [Rank 0's weights].

    Args:
        model: with the same shapes on all ranks.
        ranks: global ranks of the group, in its order.
        group: the ranks that call this.
    """
    own = models()
    tensors = [(name, tensor) for name, tensor in own.named_tensors(model) if own.is_comparable(tensor)]
    record = struct.Struct(f"<{len(tensors)}q")
    digests = record.pack(*own.digests([tensor for _, tensor in tensors]))
    everyone = [record.unpack(each) for each in share_bytes(digests, group)]
    if all(each == everyone[0] for each in everyone):
        return
    different = [place for place in range(len(tensors)) if len({each[place] for each in everyone}) > 1]
    for place in different:
        own.overwrite(tensors[place][1], lambda memory: collectives.broadcast(memory, 0, group=group))
    others = [ranks[at] for at, each in enumerate(everyone) if each != everyone[0]]
    names = ", ".join(repr(tensors[place][0]) for place in different[:_SHOWN])
    warnings.warn(
        f"apply: ranks {others} have other initial weights than rank {ranks[0]} in {len(different)} of"
        f" {len(tensors)} tensors ({names}{', ...' if len(different) > _SHOWN else ''}), and take those of rank"
        f" {ranks[0]}; seed all ranks alike before the model is built, or load the same checkpoint on each",
        stacklevel=3,
    )


class SharedSamples:
    """Refuses inputs that differ between ranks that compute one model on the same samples.

    Ranks compare their first inputs in training and their first ones in evaluation: a sampler that gives each rank
    samples of its own does so from the start, and later calls cost nothing.

    Args:
        axis: of the mesh, for the error.
        group: the ranks that share samples.
        some: a rank may be passed some of the inputs alone, as the stages of a pipeline; those that two have are
            compared.
    """

    def __init__(self, axis: str, group: Any, *, some: bool = False) -> None:
        self._axis, self._some = axis, some
        self._ranks, self._group = get_platform().groups.ranks(group), group
        self._compared: set[bool] = set()

    def compare(self, training: bool, args: Sequence[Any], keywords: Mapping[str, Any]) -> None:
        """Compare the inputs of a call, the first time in this mode.

        Args:
            training: the model's mode.
            args: inputs by place.
            keywords: inputs by name.

        Raises:
            ValueError: on all ranks: their inputs differ.
        """
        if training in self._compared:
            return
        own, found = models(), dict(_tensors("", {**dict(enumerate(args)), **keywords}))
        described = zip(found, map(own.describe, found.values()), own.digests(list(found.values())), strict=True)
        text = "\n".join(f"{name} {kind}, digest {digest}" for name, kind, digest in described)
        texts = [each.decode().split("\n") for each in share_bytes(text.encode(), self._group)]
        for rank, lines in zip(self._ranks, texts, strict=True):
            first = texts[0]
            if self._some:
                first, lines = _of_both(first, lines), _of_both(lines, first)
            if lines != first:
                there, here = _first_difference(first, lines)
                raise ValueError(
                    f"{self._axis}: ranks {self._ranks} compute the same samples together, but rank {self._ranks[0]}"
                    f" is passed {there} where rank {rank} is passed {here}; pass them the same batch, from a sampler"
                    " that counts data-parallel ranks alone"
                )
        self._compared.add(training)


def _first_difference(first: Sequence[str], other: Sequence[str]) -> tuple[str, str]:
    pairs = itertools.zip_longest(first, other, fillvalue="nothing")
    return next((a or "nothing", b or "nothing") for a, b in pairs if a != b)


def _of_both(lines: Sequence[str], others: Sequence[str]) -> list[str]:
    """Return the lines whose first word, the input's name, others have as well."""
    names = {line.split(" ", 1)[0] for line in others}
    return [line for line in lines if line.split(" ", 1)[0] in names]


def _tensors(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """List the tensors in nested inputs, by names such as `labels` or `targets.0.mask`."""
    if isinstance(value, (list, tuple)):
        value = dict(enumerate(value))
    if isinstance(value, Mapping):
        for key, each in value.items():
            yield from _tensors(f"{name}.{key}" if name else str(key), each)
    elif models().is_comparable(value):
        yield name, value


_ORDERS = {
    "pp": "gradients of stages are added up in the order of their schedule",
    "cp": "the ranks of cp add up parts of one sample",
    "ep": "experts and all else would be added up in two orders",
}


def check_deterministic(plan: ParallelPlan) -> list[Diagnostic]:
    """Check that gradients are added up in one order, whatever the number of data parallel ranks."""
    if not plan.run.deterministic:
        return []
    return [
        Diagnostic("run.deterministic", f"got true with mesh.{axis} = {getattr(plan.mesh, axis)}, but {why}", fix)
        for axis, why in _ORDERS.items()
        if getattr(plan.mesh, axis) > 1
        for fix in [f"leave run.deterministic out, or make mesh.{axis} 1; dp_replicate, dp_shard and tp go with it"]
    ]


def draws(plan: ParallelPlan, micro_batches: int, *, part: int | None = None) -> Callable[[int], None]:
    """Begin a step's draws; call the result with the number of each micro-batch before it.

    The step's seed is the last one given to `hp_platform.manual_seed`, the same on all ranks. Without one, generators
    go on as they are.

    Args:
        plan: says which samples, tokens and layers this rank has.
        micro_batches: of this rank in the step.
        part: of the batch, whose samples are computed; None is this rank's own.
    """
    platform, mesh = get_platform(), plan.mesh
    seed = platform.random.seeded()
    if seed is None:
        return lambda number: None
    at = mesh.coordinate(platform.groups.rank())
    part = data_parallel_place(plan) if part is None else part
    own, parts = at.get("cp", 0) * mesh.pp + at.get("pp", 0), mesh.cp * mesh.pp

    def begin(number: int) -> None:
        place = (part * micro_batches + number) * parts + own
        platform.random.reseed((seed * mesh.data_parallel * micro_batches * parts + place) % 2**63)

    return begin
