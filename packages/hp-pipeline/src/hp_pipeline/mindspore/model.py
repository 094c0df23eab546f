"""The part of a model that one rank of a pipeline trains."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from mindspore import Parameter, nn

from hp_pipeline.running.schedule import PipelineSchedule
from hp_pipeline.stages.split import merge_names


class PipelinedModel(nn.Cell):
    """This rank's stages of a model, and the schedule that runs them.

    Parameters go by their ``name``, that of the whole model.

        model = PipelinedModel(Schedule1F1B(PipelineStage(cell, rank, ranks), micro_batch_num=8))
        optimizer = nn.AdamWeightDecay(model.trainable_params())
        losses = model.run(x, target=target)
        optimizer(model.schedule.take_gradients(optimizer.parameters))

    Args:
        schedule: with the stages of this rank.

    Raises:
        ValueError: two stages with different parameters of one name.
    """

    def __init__(self, schedule: PipelineSchedule) -> None:
        super().__init__(auto_prefix=False)
        self.schedule = schedule
        self.stage_cells = nn.CellList(list(self.stages.values()), auto_prefix=False)
        self.state_dict()

    @property
    def stages(self) -> dict[int, Any]:
        """The Cells of this rank's stages, by their place in the model."""
        return {stage.stage_index: stage.submodule for stage in self.schedule.stages}

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Run one batch: see ``PipelineSchedule.run``."""
        return self.schedule.run(*args, **kwargs)

    def construct(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse to run without backward.

        Raises:
            RuntimeError: always; a pipeline runs forwards and backwards in one.
        """
        raise RuntimeError("A PipelinedModel runs forwards and backwards in one: call model.run(...), not model(...).")

    def parameters_and_names(self, name_prefix: str = "", expand: bool = True) -> Iterator[tuple[str, Parameter]]:
        """List the parameters of this rank's stages by the whole model's names, each once."""
        seen: set[int] = set()
        for name, parameter in self.state_dict().items() if expand else ():
            if id(parameter) not in seen:
                seen.add(id(parameter))
                yield f"{name_prefix}.{name}" if name_prefix else name, parameter

    def state_dict(self) -> dict[str, Parameter]:
        """Return the parameters of this rank's stages by the whole model's names."""
        return merge_names(
            {index: {each.name: each for each in cell.get_parameters()} for index, cell in self.stages.items()}
        )

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Write values to this rank's parameters.

        Args:
            state_dict: by the whole model's names; those of other ranks' stages are left aside.

        Raises:
            KeyError: a parameter of this rank is not there.
        """
        own = self.state_dict()
        missing = sorted(own.keys() - state_dict.keys())
        if missing:
            raise KeyError(f"PipelinedModel.load_state_dict: no values for {missing} of the stages {[*self.stages]}.")
        for name, parameter in own.items():
            parameter.set_data(state_dict[name])

    def __repr__(self) -> str:
        """Name the schedule and the stages."""
        stages = ", ".join(map(repr, self.schedule.stages))
        return f"PipelinedModel({type(self.schedule).__name__}: {stages})"
