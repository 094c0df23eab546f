"""The part of a model that one rank of a pipeline trains."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from hp_pipeline.running.schedule import PipelineSchedule
from hp_pipeline.stages.split import merge_names


class PipelinedModel(nn.Module):
    """This rank's stages of a model, and the schedule that runs them.

    Parameters and states have the names of the whole model, on each rank those of its stages, so that an
    optimizer and a checkpoint see one model of which every rank has a part.

        model = PipelinedModel(Schedule1F1B(split.pipeline_stage(rank), micro_batch_num=8))
        optimizer = torch.optim.AdamW(model.parameters())
        losses = model.run(input_ids, labels=labels)
        optimizer.step()

    Args:
        schedule: with the stages of this rank, which are modules.

    Raises:
        TypeError: a stage that is no module, and so has no parameters.
        ValueError: two stages with different parameters or buffers of one name.
    """

    def __init__(self, schedule: PipelineSchedule) -> None:
        super().__init__()
        self.schedule = schedule
        for stage in schedule.stages:
            if not isinstance(stage.submodule, nn.Module):
                raise TypeError(
                    f"PipelinedModel: the stage {stage.stage_index} is a {type(stage.submodule).__name__}, not a"
                    " module, so that it has no parameters; write it as an nn.Module."
                )
            self.add_module(f"stage_{stage.stage_index}", stage.submodule)
        merge_names({index: stage.state_dict(keep_vars=True) for index, stage in self.stages.items()})

    @property
    def stages(self) -> dict[int, nn.Module]:
        """The modules of this rank's stages, by their place in the model."""
        return {stage.stage_index: stage.submodule for stage in self.schedule.stages}  # type: ignore[misc]

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Run one batch: see ``PipelineSchedule.run``."""
        return self.schedule.run(*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse to run without backward.

        Raises:
            RuntimeError: always; a pipeline runs forwards and backwards in one.
        """
        raise RuntimeError("A PipelinedModel runs forwards and backwards in one: call model.run(...), not model(...).")

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """List the parameters of this rank's stages by the whole model's names, each once."""
        yield from self._named("named_parameters", prefix, recurse, remove_duplicate)

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Any]]:
        """List the buffers of this rank's stages by the whole model's names, each once."""
        yield from self._named("named_buffers", prefix, recurse, remove_duplicate)

    def _named(self, listed: str, prefix: str, recurse: bool, remove_duplicate: bool) -> Iterator[tuple[str, Any]]:
        names, tensors = set(), set()
        for stage in self.stages.values():
            for name, tensor in getattr(stage, listed)(prefix, recurse, remove_duplicate):
                if name in names or (remove_duplicate and id(tensor) in tensors):
                    continue
                names.add(name)
                tensors.add(id(tensor))
                yield name, tensor

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return the states of this rank's stages by the whole model's names; arguments are those of a module."""
        states: dict[str, Any] = {}
        for stage in self.stages.values():
            states.update(stage.state_dict(*args, **kwargs))
        return states

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load the states of this rank's stages, of a state dict of the whole model or of this rank.

        Args:
            state_dict: by the whole model's names; those of other ranks' stages are left aside.
            strict: every state of this rank's stages must be there.
            assign: take the tensors themselves, as ``nn.Module.load_state_dict`` does.

        Returns:
            The missing names; no name is unexpected, as other ranks may have it.
        """
        missing: list[str] = []
        result = None
        for stage in self.stages.values():
            own = {name: state_dict[name] for name in stage.state_dict() if name in state_dict}
            result = stage.load_state_dict(own, strict=strict, assign=assign)
            missing += result.missing_keys
        assert result is not None, "a schedule has stages"
        return type(result)(missing, [])

    def __repr__(self) -> str:
        """Name the schedule and the stages."""
        stages = ", ".join(map(repr, self.schedule.stages))
        return f"PipelinedModel({type(self.schedule).__name__}: {stages})"
