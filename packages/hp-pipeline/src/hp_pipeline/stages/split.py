"""A model, split into stages: a line of units with their operations, and where it is cut.

Note [How a model is split]
    The model is a line: what runs before its blocks, the blocks, what runs after them. It is cut between blocks. A
    stage runs the model's own forward on a copy of the few modules that lead to the list of blocks; of the others it
    has the model's own, with their parameters, or stand-ins without any. In a stage the blocks before its own pass
    through what they get, the last of them passes on what was received, and the first after its own keeps what is
    sent on. So masks, position embeddings and tables by layer are made as the model makes them, and names
    of parameters are those of the whole model.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Literal, Protocol

from hp_pipeline.orders.pipeline import Costs
from hp_pipeline.stages.stage import PipelineStage, SharedParameterInfo
from hp_platform import get_platform
from hp_platform.extend import load_port

if TYPE_CHECKING:  # the package imports without NumPy
    import numpy as np
    from numpy.typing import NDArray


@dataclass(frozen=True)
class Unit:
    """A part of a model that is not cut: a block, or all that runs before or after the blocks.

    Attributes:
        names: the modules in it, by their names in the model.
        forward: its cost in a forward of one micro-batch: seconds, or operations where they are counted.
        input: in the backward for its inputs.
        weight: in the backward for its weights.
        saved: bytes that its forward saves for its backward.
        parameters: bytes of its parameters.
    """

    names: tuple[str, ...]
    forward: float
    input: float
    weight: float
    saved: float = 0.0
    parameters: int = 0

    @property
    def total(self) -> float:
        """The cost of a forward and a backward."""
        return self.forward + self.input + self.weight


class SplitError(ValueError):
    """A model that `split_model` cannot split as it was told to.

    Args:
        problem: what is wrong.
        advice: what to do next, where the problem does not say it.
    """

    def __init__(self, problem: str, advice: str = "") -> None:
        super().__init__(f"split_model: {problem} {advice}" if advice else f"split_model: {problem}")
        self.problem, self.advice = problem, advice

    def __reduce__(self) -> tuple[type[SplitError], tuple[str, str]]:
        return type(self), (self.problem, self.advice)


def partition(
    costs: Sequence[float], stages: int, sizes: Sequence[float] | None = None, limit: float | None = None
) -> tuple[int, ...]:
    """Cut a line of blocks into stages so that the slowest stage takes the least time; exact.

    The least time of the slowest of `k` stages that end before block `n` is the least, over the last cut, of the
    greater of the two sides. Where several are equal, the one whose stages have the lesser sum of squares is preferred.

        partition([1, 1, 1, 3], 2)  # (3, 1)

    Args:
        costs: of each block; what runs before the first and after the last is added to those.
        stages: how many, at least 1; each gets at least one block.
        sizes: bytes of each block.
        limit: bytes that no stage may pass.

    Returns:
        The number of blocks of each stage.

    Raises:
        ValueError: more stages than blocks, or no cut within the limit.
    """
    count = len(costs)
    if not 1 <= stages <= count:
        raise ValueError(f"{stages} stages cannot be cut out of {count} blocks: a stage takes at least one.")
    time = [0.0, *accumulate(costs)]
    size = [0.0, *accumulate(sizes or [0.0] * count)]
    bound = math.inf if limit is None else limit
    # rows[k][n]: slowest stage, sum of squares and last cut of the best k stages of the first n blocks.
    rows: list[list[tuple[float, float, int]]] = [[(0.0, 0.0, 0), *[(math.inf, math.inf, 0)] * count]]
    for _ in range(stages):
        row = [(math.inf, math.inf, 0)]
        for end in range(1, count + 1):
            best = (math.inf, math.inf, 0)
            for cut in range(end - 1, -1, -1):
                own = time[end] - time[cut]
                if own > best[0] or size[end] - size[cut] > bound:
                    break  # longer stages only take more
                slowest, squares, _ = rows[-1][cut]
                best = min(best, (max(slowest, own), squares + own * own, cut))
            row.append(best)
        rows.append(row)
    if rows[-1][count][0] == math.inf:
        largest = max(sizes or [0.0])
        raise ValueError(
            f"no cut of {count} blocks into {stages} stages keeps each stage within {limit} bytes: the blocks take"
            f" {size[-1]:.0f} bytes in all, the largest {largest:.0f}; raise the limit or the number of stages."
        )
    counts, end = [], count
    for row in reversed(rows[1:]):
        cut = row[end][2]
        counts.append(end - cut)
        end = cut
    return tuple(reversed(counts))


# ---- names of a part of a model ----


def merge_names(by_stage: Mapping[int, Mapping[str, Any]]) -> dict[str, Any]:
    """Join what is named in a rank's stages, by the whole model's names.

    Raises:
        ValueError: two stages have different things of one name.
    """
    merged: dict[str, Any] = {}
    for index, named in by_stage.items():
        for name, value in named.items():
            if merged.setdefault(name, value) is not value:
                raise ValueError(
                    f"PipelinedModel: stage {index} and one before it have different tensors of the name {name!r};"
                    " names must be those of the whole model."
                )
    return merged


Module = Any


class Outline(Protocol):
    """A model as a line of units; `<framework>/outline.py`."""

    units: tuple[Unit, ...]
    """What runs before the blocks, each block, what runs after them."""
    uses: Mapping[str, tuple[tuple[str, int], ...]]
    """Parameters that several units use: by the first name, each name and its unit."""

    def stage(self, first: int, end: int) -> Module:
        """Return the stage of the blocks from first to before end."""
        ...


class Outliner(Protocol):
    """What a framework supplies to split models; `<framework>/outline.py`."""

    def outline(self, model: Module, example: Mapping[str, Any] | None, blocks: str | None) -> Outline: ...


@dataclass(frozen=True)
class StageSummary:
    """One stage of a split.

    Attributes:
        blocks: the blocks that it runs, by their names in the model.
        modules: the other modules with parameters that it runs.
        forward: the cost of its forward of one micro-batch: seconds if they were measured, else operations.
        input: of the backward for its inputs.
        weight: of the backward for its weights.
        saved: bytes that its forward saves, as counted.
        parameters: bytes of its parameters.
    """

    blocks: tuple[str, ...]
    modules: tuple[str, ...]
    forward: float
    input: float
    weight: float
    saved: float
    parameters: int


@dataclass(frozen=True)
class Split:
    """A model, split into stages: Note [How a model is split].

    Attributes:
        stages: what each stage runs, and what it costs.
        shared: the weights that several stages have, by their first name in the model.
        measured: the costs are seconds that were measured, not operations that were counted.
    """

    stages: tuple[StageSummary, ...]
    shared: tuple[SharedParameterInfo, ...]
    measured: bool
    _build: Callable[[int], Module] = field(repr=False, compare=False)
    _names: Mapping[str, Mapping[int, str]] = field(repr=False, compare=False)

    def stage(self, index: int) -> Module:
        """Return a stage's module, the same one each time.

        Its parameters are the model's own objects under the whole model's names; of other stages it has none. The
        first stage is called as the model is, the others with what the stage before returns, hidden states.
        All take ``attention_mask``, ``position_ids`` and the like, and refuse a run in which not all stages have them;
        each leaves aside what is not its own: ``input_ids`` if not the first, ``labels`` if not the last.
        """
        if not 0 <= index < len(self.stages):
            raise ValueError(f"Split.stage: index={index} is not one of {len(self.stages)} stages from 0.")
        return self._build(index)

    def shared_in(self, index: int) -> tuple[SharedParameterInfo, ...]:
        """List the weights that a stage shares with others, by their names in that stage."""
        return tuple(
            SharedParameterInfo(self._names[info.parameter][index], info.shared_stage)
            for info in self.shared
            if index in info.shared_stage
        )

    def pipeline_stage(self, index: int, device: Any = None, **options: Any) -> PipelineStage:
        """Return a stage as a schedule takes it; options are those of ``PipelineStage``."""
        shared = self.shared_in(index)
        return PipelineStage(self.stage(index), index, len(self.stages), device, shared_parameters=shared, **options)

    def cost(self, operations_per_second: float = 1e12) -> Costs:
        """Return the costs of the stages, for ``simulate`` and ``synthesize``; messages take no time.

        Args:
            operations_per_second: of a rank; it turns counted operations into seconds.
        """
        unit = 1.0 if self.measured else operations_per_second
        return Costs(
            forward=tuple(stage.forward / unit for stage in self.stages),
            input=tuple(stage.input / unit for stage in self.stages),
            weight=tuple(stage.weight / unit for stage in self.stages),
            saved=tuple(stage.saved for stage in self.stages),
            held=tuple(stage.saved for stage in self.stages),
            static=tuple(float(stage.parameters) for stage in self.stages),
        )


def split_model(
    model: Module,
    stages: int,
    *,
    split: Literal["auto", "even"] | Sequence[int] | Sequence[str] = "auto",
    costs: Sequence[float] | None = None,
    memory: float | None = None,
    blocks: str | None = None,
    example: Mapping[str, Any] | None = None,
) -> Split:
    """Split a model of transformers into the stages of a pipeline, at the blocks that it has a list of.

    The model is neither edited nor run, and may be on the meta device. Split it first, then shard the stages.

    Costs are counted from shapes. Each matrix takes 2 operations a token and entry in forward, and as many for each
    half of the backward; of experts, those that a token is sent to. Attention's two products take 4 operations a
    token, token that it sees (half of the sequence, or a sliding window) and entry of its heads, twice that in
    backward. Embeddings, norms and element-wise operations count as none.

    Args:
        model: the whole model.
        stages: how many, over all ranks.
        split: ``"auto"``: the slowest stage takes the least time, exactly (``partition``); ``"even"``: equal numbers
            of blocks, of the first stages one more; or the number of blocks of each stage; or the names of
            the first block of each stage but the first.
        costs: measured seconds of a forward of each unit: all before the blocks, each block, all after them. The
            backward is put at as many times those as it is counted.
        memory: bytes of parameters that no stage may pass, for ``"auto"``.
        blocks: the name of the list of blocks, where there are several, such as ``"model.language_model.layers"``.
        example: keyword inputs of one micro-batch, whose shapes alone are used; by default ``input_ids`` of shape
            (1, 128). The forward is traced with them, which shows the inputs (images) that only the first stage uses.

    Returns:
        The split.

    Raises:
        ValueError: the model has no list of blocks that can be cut, or the numbers do not fit.
        NotImplementedError: a framework other than PyTorch.
    """
    if get_platform().name != "torch":
        raise NotImplementedError(
            f"split_model: models of transformers are PyTorch's, this is {get_platform().name}; write each stage as a"
            " Cell and pass it to PipelineStage."
        )
    outline = load_port(Outliner, "outline").outline(model, example, blocks)
    head, *units, tail = outline.units
    names = [unit.names[0] for unit in units]
    if not 1 <= stages <= len(units):
        raise SplitError(
            f"{stages} stages cannot be cut out of {len(units)} blocks ({names[0]} to {names[-1]}): a"
            f" stage takes at least one; pass stages from 1 to {len(units)}."
        )
    line = _measured([head, *units, tail], costs)
    if memory is not None and split != "auto":
        raise SplitError(f"memory={memory} limits split='auto' alone, got split={split!r}.")
    counts = _counts(split, stages, names, line, memory)
    cuts = [sum(counts[:index]) for index in range(stages + 1)]
    owner = [0, *(index for index, count in enumerate(counts) for _ in range(count)), stages - 1]
    summaries = tuple(_summary(line, owner, index) for index in range(stages))
    named: dict[str, dict[int, str]] = {}
    for first, uses in outline.uses.items():
        by_stage: dict[int, str] = {}
        for name, unit in uses:
            by_stage.setdefault(owner[unit], name)
        if len(by_stage) > 1:
            named[first] = by_stage
    shared = tuple(SharedParameterInfo(first, tuple(sorted(by_stage))) for first, by_stage in named.items())
    build = functools.cache(lambda index: outline.stage(cuts[index], cuts[index + 1]))
    return Split(summaries, shared, costs is not None, build, named)


def _summary(line: Sequence[Unit], owner: Sequence[int], index: int) -> StageSummary:
    own = [(place, unit) for place, (unit, stage) in enumerate(zip(line, owner, strict=True)) if stage == index]
    blocks = tuple(unit.names[0] for place, unit in own if 0 < place < len(line) - 1)
    modules = tuple(name for place, unit in own if place in (0, len(line) - 1) for name in unit.names)
    total = {name: sum(getattr(unit, name) for _, unit in own) for name in ("forward", "input", "weight", "saved")}
    return StageSummary(blocks, modules, **total, parameters=sum(unit.parameters for _, unit in own))


def _measured(units: list[Unit], costs: Sequence[float] | None) -> list[Unit]:
    if costs is None:
        return units
    if len(costs) != len(units):
        raise SplitError(
            f"costs has {len(costs)} entries, and the model {len(units)} units: all before the blocks,"
            f" {len(units) - 2} blocks, all after them."
        )
    measured = []
    for unit, seconds in zip(units, costs, strict=True):
        if seconds < 0:
            raise SplitError(f"costs must not be negative, got {seconds} for {unit.names}.")
        ratios = [unit.input / unit.forward, unit.weight / unit.forward] if unit.forward else [1.0, 1.0]
        inputs, weights = (seconds * ratio for ratio in ratios)
        measured.append(Unit(unit.names, seconds, inputs, weights, unit.saved, unit.parameters))
    return measured


def _counts(split: Any, stages: int, names: list[str], line: list[Unit], memory: float | None) -> tuple[int, ...]:
    """Return the number of blocks of each stage."""
    count = len(names)
    if split == "even":
        return tuple(count // stages + (index < count % stages) for index in range(stages))
    if split == "auto":
        try:
            return partition(_ends(line, "total"), stages, _ends(line, "parameters"), memory)
        except ValueError as error:
            raise SplitError(str(error)) from None
    if isinstance(split, str) or not isinstance(split, Sequence):
        raise SplitError(
            f"split is 'auto', 'even', the number of blocks of each stage or names of blocks; got {split!r}."
        )
    if split and all(isinstance(each, str) for each in split):
        return _between(split, stages, names)
    if len(split) != stages or any(not isinstance(each, int) or each < 1 for each in split) or sum(split) != count:
        raise SplitError(
            f"split={list(split)} must list {stages} numbers of blocks, each at least 1, that sum to {count}."
        )
    return tuple(split)


def _ends(line: list[Unit], name: str) -> list[float]:
    """List a cost of each block, those of the ends added to the first and the last."""
    values = [getattr(unit, name) for unit in line]
    inner = values[1:-1]
    inner[0] += values[0]
    inner[-1] += values[-1]
    return inner


def _between(split: Sequence[str], stages: int, names: list[str]) -> tuple[int, ...]:
    unknown = [name for name in split if name not in names]
    if unknown:
        raise SplitError(
            f"split names {unknown}, and the blocks are {names[0]!r} to {names[-1]!r}; name the first"
            " block of each stage but the first."
        )
    starts = [names.index(name) for name in split]
    starts = starts if starts[0] == 0 else [0, *starts]
    if len(starts) != stages or sorted(set(starts)) != starts:
        raise SplitError(
            f"split={list(split)} must name the first block of each of the {stages} stages but the first,"
            f" {stages - 1} names in the model's order."
        )
    ends = [*starts[1:], len(names)]
    return tuple(end - start for start, end in zip(starts, ends, strict=True))


@dataclass(frozen=True)
class Operations:
    """Multiplications and additions of a model's matrices and of its attention.

    Norms, activations, softmax, and what linear attention and state spaces do beside their matrices are left out.

    Attributes:
        matrices: in the forward of a token: two for each weight that it meets; of experts, those of the chosen ones.
        attention: in the forward of a token, for each token that it sees, by how many it sees at most (the size of a
            sliding window; None: all before it).
    """

    matrices: float
    attention: Mapping[int | None, float]

    def training(self, positions: NDArray[np.int64]) -> float:
        """Return the operations of a forward and a backward, which takes twice those of the forward.

        Args:
            positions: of each token in its document: the tokens before it are those that it sees. A token counts
                itself by half, so that a document of `n` tokens has `n * n / 2` pairs.
        """
        forward = self.matrices * positions.size
        for window, each in self.attention.items():
            seen = positions + 0.5
            forward += each * float((seen if window is None else seen.clip(max=window)).sum())
        return 3 * forward
