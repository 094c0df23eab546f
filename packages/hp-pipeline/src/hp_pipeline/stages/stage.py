"""A stage: the part of a model that a rank runs as one step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hp_pipeline.port import port
from hp_pipeline.stages.layouts import TensorLayout, mesh_like
from hp_pipeline.stages.shared import SharedParameterInfo


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
