"""A stage, the part of a model that a rank runs as one step, and the weights that several stages hold.

Note [One weight on several ranks]
    Each rank has a copy. At the first run, and where a Parameter is another object than in the run before, all ranks
    compare what their stages declare, and the first stage of ``shared_stage`` sends its values to the others. After
    each run the ranks of a weight exchange the gradients of this run, and each adds them in the order of the stages:
    the copies stay the same, bit by bit. What earlier runs have left is set aside before, for it holds the other
    ranks' part already. Stages on one rank have one Parameter, whose gradients backward adds up itself.

Note [Copies that drift]
    Before each run ranks tell each other how often their copies were written to since the last one. Where that differs,
    as when one stage alone has loaded a checkpoint, the copies are compared, and values that differ are refused. A copy
    that was frozen, or is no longer, is compared like a new one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hp_pipeline.orders.pipeline import Pipeline
from hp_pipeline.port import port
from hp_pipeline.stages.layouts import TensorLayout, mesh_like
from hp_platform import get_platform

Weight = tuple[tuple[int, ...], int]
"""A shared weight: its stages, and its place among those that these stages share."""


Facts = dict[tuple[int, Weight], tuple[bool, str, str]]
"""By stage and weight: (True, its description), or (False, an error); then its name."""


@dataclass(frozen=True)
class SharedParameterInfo:
    """A weight that a stage shares with others.

    Every stage that has it lists it. Several weights of the same stages are listed in the same order on all.

    Attributes:
        parameter: its name in the stage's module, or the Parameter itself.
        shared_stage: all stages that have it; the first one's values are used.

    Raises:
        ValueError: fewer than two stages, or one twice.
    """

    parameter: Any
    shared_stage: tuple[int, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "shared_stage", tuple(self.shared_stage))
        if len(self.shared_stage) < 2 or len(set(self.shared_stage)) < len(self.shared_stage):
            raise ValueError(
                "SharedParameterInfo: shared_stage lists two stages or more, each once, the owner of the values first;"
                f" got {self.shared_stage}."
            )


@dataclass(frozen=True)
class _Copy:
    """This rank's copy of a weight that other ranks have too; ``ranks`` are all that have it, by their first stage."""

    parameter: Any
    ranks: tuple[int, ...]
    owner: int


class SharedParameters:
    """The shared weights of one rank's stages: Note [One weight on several ranks].

    Args:
        stages: of this rank.
        pipeline: where stages are.
        rank: this rank.
        group: the pipeline's ranks.

    Attributes:
        facts: what this rank's stages declare, for the other ranks.
        keys: the weights that are on several ranks, once the ranks have compared them: the same list on all.
    """

    def __init__(self, stages: Sequence[PipelineStage], pipeline: Pipeline, rank: int, group: Any) -> None:
        self.stages, self.pipeline, self.rank, self.group = stages, pipeline, rank, group
        self.keys: list[Weight] = []
        self._parameters: dict[tuple[int, Weight], Any] = {}
        self._trained: dict[Weight, bool] = {}
        self._copies: dict[Weight, _Copy] = {}
        self._aside: dict[Weight, Any] = {}
        self._versions: dict[Weight, int] = {}
        self._collectives = get_platform().collectives
        self.facts: Facts = {
            (stage.stage_index, weight): self._facts(stage, weight, info) for stage, weight, info in _infos(stages)
        }

    def _facts(self, stage: PipelineStage, key: Weight, info: SharedParameterInfo) -> tuple[bool, str, str]:
        """Describe a weight: (True, its description), or (False, an error); then its name."""
        name = repr(info.parameter) if isinstance(info.parameter, str) else f"{key[1]}"
        try:
            parameter = _find(info, stage.submodule)
            for (other, weight), each in self._parameters.items():
                if weight != key and each is parameter:
                    raise ValueError(f"the parameter {info.parameter!r}, which stage {other} shares as another weight")
                if weight == key and each is not parameter:
                    raise ValueError(f"a Parameter of its own, but stage {other} is on the same rank: use one object")
            self._parameters[stage.stage_index, key] = parameter
            self._trained[key] = port().needs_gradient(parameter)
            return True, port().describe_parameter(parameter), name
        except (ValueError, NotImplementedError) as error:
            return False, str(error), name

    def replaced(self) -> bool:
        """Tell whether a stage has another Parameter than the one that the ranks have compared, or has frozen it."""
        try:
            return any(
                _find(info, stage.submodule) is not self._parameters[stage.stage_index, key]
                or port().needs_gradient(self._parameters[stage.stage_index, key]) is not self._trained[key]
                for stage, key, info in _infos(self.stages)
            )
        except ValueError:  # it has none now: all ranks compare again, and raise
            return True

    def agree(self, everyone: Sequence[Facts]) -> None:
        """Compare what all ranks declare, and send the values of each weight from its first stage to the others.

        Args:
            everyone: the ``facts`` of each rank.

        Raises:
            ValueError: stages that declare different weights, or weights that differ: on all ranks, before anything
                is sent.
        """
        facts = {at: fact for own in everyone for at, fact in own.items()}
        for (stage, (stages, _)), (right, text, name) in sorted(facts.items()):
            if not right:
                raise ValueError(f"The weight {name} that the stages {stages} share: stage {stage} has {text}.")
        for (stage, (stages, place)), (_, text, name) in sorted(facts.items()):
            head = f"The weight {name} that the stages {stages} share"
            for other in stages:
                if (other, (stages, place)) not in facts:
                    raise ValueError(
                        f"{head} is not listed by stage {other}: pass SharedParameterInfo(..., {stages}) in the"
                        " shared_parameters of each of these stages."
                    )
                if facts[other, (stages, place)][1] != text:
                    raise ValueError(
                        f"{head} is {text} on stage {stage}, but {facts[other, (stages, place)][1]} on stage {other}."
                        " It must have the same shape, dtype and layout on all; what is sharded in groups of parameters"
                        " must be a group of its own, as fully_shard(layer) makes it."
                    )
        placement = self.pipeline.placement
        for key in sorted({key for _, key in facts}):
            ranks = tuple(dict.fromkeys(placement[stage] for stage in sorted(key[0])))
            if len(ranks) == 1:
                continue
            self.keys.append(key)
            own = [parameter for (_, weight), parameter in self._parameters.items() if weight == key]
            if own:
                self._copies[key] = _Copy(own[0], ranks, placement[key[0][0]])
        for copy in self._copies.values():
            self._send_values(copy)
        self._versions = {key: port().version(copy.parameter) for key, copy in self._copies.items()}

    def writes(self) -> bytes:
        """Before a run: tell for each of ``keys`` how often it was written to since the last one, 255 if not here."""
        now = {key: port().version(copy.parameter) for key, copy in self._copies.items()}
        before, self._versions = self._versions, now
        return bytes((now[key] - before[key]) % 255 if key in now else 255 for key in self.keys)

    def compare(self, keys: Sequence[Weight]) -> str:
        """Compare this rank's copies of weights with those of their first stage; say which differ."""
        said = []
        for key in keys:
            copy = self._copies.get(key)
            if copy is None:
                continue
            own = port().sendable(port().local(copy.parameter))
            if self.rank == copy.owner:
                for rank in copy.ranks:
                    if rank != self.rank:
                        self._collectives.send(own, rank, group=self.group)
            elif not port().equal(own, self._receive(own, copy.owner)):
                name = next(fact[2] for (_, weight), fact in self.facts.items() if weight == key)
                said.append(f"the weight {name} that stages {key[0]} share has other values than on stage {key[0][0]}")
        return "; ".join(said)

    def _send_values(self, copy: _Copy) -> None:
        value = port().sendable(port().local(copy.parameter))
        if self.rank != copy.owner:
            port().fill(copy.parameter, self._receive(value, copy.owner))
            return
        for rank in copy.ranks:
            if rank != self.rank:
                self._collectives.send(value, rank, group=self.group)

    def _receive(self, like: Any, rank: int) -> Any:
        tensor = port().empty(port().describe(like), port().device_of_tensor(like))
        self._collectives.recv(tensor, rank, group=self.group)
        return tensor

    def set_aside(self) -> None:
        """Before a run: keep what earlier runs have left apart from what this one adds."""
        self._aside = {key: port().gradient(copy.parameter) for key, copy in self._copies.items()}
        for copy in self._copies.values():
            port().set_gradient(copy.parameter, None)

    def present(self) -> bytes:
        """After a run: tell for each of ``keys`` whether this rank has a gradient of it."""
        return bytes(
            key in self._copies and port().gradient(self._copies[key].parameter) is not None for key in self.keys
        )

    def add(self, present: Sequence[bytes]) -> None:
        """After a run: add the gradients of all ranks to what was set aside.

        Args:
            present: by rank, what ``present`` says there.
        """
        for place, key in enumerate(self.keys):
            copy = self._copies.get(key)
            if copy is None:
                continue
            total = self._total(copy, [rank for rank in copy.ranks if present[rank][place]])
            aside = self._aside.pop(key, None)
            if total is not None:
                own = port().gradient_of(copy.parameter, total)
                aside = own if aside is None else port().added(aside, own)
            port().set_gradient(copy.parameter, aside)

    def _total(self, copy: _Copy, givers: Sequence[int]) -> Any:
        """Exchange the gradients of those ranks that have one, and add them in their order.

        Of two ranks the one that comes first sends first, so that no backend without tags waits for itself.
        """
        gradient = port().gradient(copy.parameter)
        own = None if gradient is None else port().sendable(port().local(gradient))
        like = port().sendable(port().local(copy.parameter)) if own is None else own
        parts = {self.rank: own}
        handles = []
        for one, other in ((a, b) for place, a in enumerate(copy.ranks) for b in copy.ranks[place + 1 :]):
            for source, target in ((one, other), (other, one)):
                if source not in givers or self.rank not in (source, target):
                    continue
                if self.rank == source:
                    handle = self._collectives.send(own, target, group=self.group, async_op=True)
                else:
                    parts[source] = port().empty(port().describe(like), port().device_of_tensor(like))
                    handle = self._collectives.recv(parts[source], source, group=self.group, async_op=True)
                handles.append(handle)
        for handle in handles:
            if handle is not None:
                handle.wait()
        total = None
        for rank in givers:
            total = parts[rank] if total is None else total + parts[rank]
        return total


def _find(info: SharedParameterInfo, module: Any) -> Any:
    """Return the Parameter; a name is looked up anew, for sharding a module replaces its parameters.

    Raises:
        ValueError: the stage's module has none of the name, or another object of it.
    """
    named = port().named_parameters(module)
    if not isinstance(info.parameter, str):
        if named and not any(each is info.parameter for each in named.values()):
            raise ValueError("a Parameter that is not in the stage's module; name it, or pass the present one")
        return info.parameter
    if info.parameter not in named:
        raise ValueError(f"no parameter {info.parameter!r}; the stage's module has {sorted(named)}")
    return named[info.parameter]


def _infos(stages: Sequence[PipelineStage]) -> Iterator[tuple[PipelineStage, Weight, SharedParameterInfo]]:
    for stage in stages:
        counts: dict[tuple[int, ...], int] = {}
        for info in stage.shared_parameters:
            place = counts[info.shared_stage] = counts.get(info.shared_stage, -1) + 1
            yield stage, (info.shared_stage, place), info


def copies(stages: Sequence[PipelineStage], pipeline: Pipeline, rank: int) -> list[Any]:
    """List the shared weights of a rank's stages of which another rank has the first stage, each once."""
    parameters = {}
    for stage, (shared, _), info in _infos(stages):
        if pipeline.placement[min(shared)] != rank:
            parameter = _find(info, stage.submodule)
            parameters[id(parameter)] = parameter
    return list(parameters.values())


def shared_weights(stages: Sequence[PipelineStage]) -> dict[int, Weight]:
    """Return which shared weight a parameter of these stages is, by its `id`; the others have none."""
    return {id(_find(info, stage.submodule)): weight for stage, weight, info in _infos(stages)}


class PipelineStage:
    """A part of a model in a pipeline.

    The first stage is called with a micro-batch of what ``run`` was given; the others with what the stage before
    returned: a tuple is their positional arguments, anything else their only one. Every stage also gets the keyword
    arguments that ``run`` was given on its own rank. The last stage returns the loss of the micro-batch, a scalar, or
    a dictionary with ``loss``, or something with an attribute of that name.

    Args:
        module: a module; on PyTorch also a function of modules.
        stage_index: its place in the model, from 0.
        stage_num: how many stages the model has, over all ranks.
        device: where received tensors are; None is the device of the module's first parameter, or the current one.
        dyn_shape: what the stage receives and returns may change its shapes from micro-batch to micro-batch, at the
            cost of a header a message; it need not be said of the stages before and after.
        has_backward: False for a stage that is only run forwards.
        shared_parameters: weights that other stages have too, such as an embedding that is also the output layer.
        mesh: where DTensors that the stage before returns are put. None looks for a mesh of the same axes among those
            of the module's own DTensors. In a pipeline of stages on several ranks each, the ranks of this one.
        placements: in which DTensors arrive on ``mesh``; None keeps theirs.

    Raises:
        ValueError: an index outside of the number of stages, here or in ``shared_parameters``.
        TypeError: something that cannot be a stage.
    """

    def __init__(
        self,
        module: Callable[..., Any],
        stage_index: int,
        stage_num: int,
        device: Any = None,
        *,
        dyn_shape: bool = False,
        has_backward: bool = True,
        shared_parameters: Sequence[SharedParameterInfo] | None = None,
        mesh: Any = None,
        placements: Sequence[Any] | None = None,
    ) -> None:
        if not 0 <= stage_index < stage_num:
            raise ValueError(f"PipelineStage: stage_index={stage_index} is not one of stage_num={stage_num} from 0.")
        why = port().refuse_stage(module)
        if why:
            raise TypeError(f"PipelineStage: module {why}.")
        self.shared_parameters = tuple(shared_parameters or ())
        for info in self.shared_parameters:
            if stage_index not in info.shared_stage or not set(info.shared_stage) <= set(range(stage_num)):
                raise ValueError(
                    f"PipelineStage: {info} of stage {stage_index} must name this stage and others below"
                    f" stage_num={stage_num}; stages that do not have the weight do not list it."
                )
        self.submodule = module
        self.stage_index, self.stage_num = stage_index, stage_num
        self.device = port().device_of(module) if device is None else device
        self.dyn_shape, self.has_backward = dyn_shape, has_backward
        self.mesh, self.placements = mesh, None if placements is None else tuple(placements)
        self._meshes: dict[Any, Any] = {}

    def wrapped(self, local: Any, layout: TensorLayout) -> Any:
        """Return what arrived as a distributed tensor on this stage's mesh."""
        key = layout.axes, layout.place
        if key not in self._meshes:
            self._meshes[key] = mesh_like(layout, self.mesh, port().named_parameters(self.submodule).values())
        tensor = layout.wrapped(local, self._meshes[key])
        if self.placements in (None, layout.placements):
            return tensor
        return tensor.redistribute(self._meshes[key], self.placements)

    @property
    def is_first_stage(self) -> bool:
        """Tell whether the stage takes the model's inputs."""
        return self.stage_index == 0

    @property
    def is_last_stage(self) -> bool:
        """Tell whether the stage returns the loss."""
        return self.stage_index == self.stage_num - 1

    def prepare_batch(self, kwargs: Mapping[str, Any], micro_batches: int) -> Mapping[str, Any]:
        """Return the keyword inputs of a whole batch as the module wants them, before they are cut.

        A module may have a method of this name, to weight the losses of micro-batches: see ``split_model``.
        """
        prepare = getattr(self.submodule, "prepare_batch", None)
        return kwargs if prepare is None else prepare(kwargs, micro_batches)

    def __repr__(self) -> str:
        """Name the stage by its place and what it runs."""
        return f"PipelineStage({self.stage_index} of {self.stage_num}: {type(self.submodule).__name__})"
