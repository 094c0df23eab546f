"""Forwards of a model in stages, without backwards: of texts to generate, and of texts that are there.

Note [Every rank generates]
    Each rank of a pipeline runs `generate` by itself, on the same prompts, with a stand-in for the model whose forward
    is that of all stages: the stages take turns, and the last one's logits go to all. So all ranks choose the same
    tokens, and nobody tells them how.

Note [A cache of a stage]
    A cache of transformers has a layer for each block of the model, and models read from the first layers how long the
    texts are. On each rank the blocks of its stages fill their layers. In each other layer are keys of one element a
    token, so that it is as long. A stage sees the layers of the rank's other stages as they were before the step, for
    a stage that comes first has added its tokens already.
"""

from __future__ import annotations

import copy
import functools
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from hp_dtensor import DTensor
from hp_fsdp import HSDPModule
from hp_pipeline import MetaStep, MetaStepType, Pipeline, PipelinedModel, PipelineSchedule, PipelineStage
from hp_pipeline.torch.extend import caching, is_stand_in
from hp_plan.checks.alike import SharedSamples
from hp_platform import get_platform
from hp_platform.extend import share_bytes

T = torch.Tensor
_INPUTS = {"input_ids", "inputs_embeds", "attention_mask", "position_ids", "token_type_ids", "logits_to_keep"}


class _ForwardStage(PipelineStage):
    """A stage that is run forwards, beside the one that trains the same module.

    It is a function, so that the schedule leaves gathered parameters alone.
    """

    def __init__(self, trained: PipelineStage, run: Callable[..., Any]) -> None:
        super().__init__(run, trained.stage_index, trained.stage_num, trained.device, has_backward=False)
        self._trained = trained

    def wrapped(self, local: Any, layout: Any) -> Any:
        return self._trained.wrapped(local, layout)


def forwards_of(model: PipelinedModel, caller: str) -> Forwards:
    """Return the forwards of a model in stages, the same each time.

    Args:
        model: this rank's stages.
        caller: for errors.

    Raises:
        NotImplementedError: see `Forwards`.
    """
    owner: Any = model
    found = vars(owner).get("_forwards")
    if found is None or found.trained is not model.schedule:
        owner._forwards = found = Forwards(model, caller)
    return found


class Forwards:
    """Forwards of a model in stages, without gradients. All ranks of the model make it, and run it together.

    Args:
        model: this rank's stages.
        caller: for errors.

    Raises:
        NotImplementedError: stages that are not of `split_model`, or of which each is on several ranks.
    """

    def __init__(self, model: PipelinedModel, caller: str) -> None:
        schedule, groups = model.schedule, get_platform().groups
        self.model, self.trained = model, schedule
        self._group, self._last = schedule.group, schedule.pipeline.placement[-1]
        if schedule.pipeline.ranks != groups.size(self._group):
            raise NotImplementedError(
                f"{caller}: stages of several ranks each, joined by PipelineStage(mesh=), are not supported; make"
                " pipelines of one rank a stage, by the group of the ranks of one place"
            )
        self.is_last = groups.rank(self._group) == self._last
        self.in_step = groups.size(schedule.peers) > groups.size(self._group)
        self._blocks = {stage.stage_index: _blocks(stage.submodule, caller) for stage in schedule.stages}
        self._caches: dict[int, Any] = {}
        self._schedule = PipelineSchedule(
            [_ForwardStage(stage, functools.partial(self._run_stage, stage)) for stage in schedule.stages],
            1,
            scale_grads=False,
            group=self._group,
            peers=schedule.peers,
            placement=schedule.pipeline.placement,
            order=_order,
            patience=schedule.patience,
        )

    @property
    def last(self) -> Any:
        """The module of this rank's last stage."""
        return self.model.schedule.stages[-1].submodule

    def _run_stage(self, stage: PipelineStage, *args: Any, **inputs: Any) -> Any:
        module: Any = stage.submodule
        cache = self._caches.get(stage.stage_index)
        if cache is None:
            return module(*args, **inputs)
        before = {block: cache.get_seq_length(block) for block in self._blocks[stage.stage_index]}
        with caching(module, cache):
            output = module(*args, **inputs)
        if any(cache.get_seq_length(block) <= length for block, length in before.items()):
            raise NotImplementedError("the stage has blocks that fill no cache; pass use_cache=False")
        return output

    def compare(self, inputs: Mapping[str, Any]) -> None:
        """Refuse inputs that are not the same on all ranks of a pipeline, and on those that share its samples.

        Raises:
            ValueError: they are not.
        """
        kinds = (bool, int, float, str)
        options = {
            name: value
            for name, value in inputs.items()
            if isinstance(value, kinds) or (isinstance(value, list) and all(isinstance(each, kinds) for each in value))
        }
        groups = getattr(self.model, "sample_groups", {"pp": self._group})
        for axis, group in groups.items():
            _compare_options(axis, group, options)
            SharedSamples(axis, group).compare(False, (), inputs)

    def run(self, cache: Any = None, **inputs: Any) -> Any:
        """Return what the last stage returns, on its rank.

        Args:
            cache: with layers of all blocks; those of this rank's stages are filled.
            inputs: of the model, on all ranks.
        """
        if cache is None:
            return self._outputs(inputs)
        given = inputs.get("input_ids")
        given = inputs["inputs_embeds"] if given is None else given
        seen = [_as_long(layer) for layer in cache.layers]
        for index, blocks in self._blocks.items():
            view = copy.copy(cache)
            view.layers = [cache.layers[place] if place in blocks else layer for place, layer in enumerate(seen)]
            self._caches[index] = view
        try:
            output = self._outputs(inputs)
        finally:
            self._caches.clear()
        tokens = given.new_zeros((), dtype=torch.bool).expand(len(given), 1, given.shape[1], 1)
        for place in set(range(len(seen))).difference(*self._blocks.values()):
            cache.layers[place].update(tokens, tokens)
        return output

    def _outputs(self, inputs: Mapping[str, Any]) -> Any:
        with torch.no_grad():
            outputs = self._schedule.run(**inputs)
        return outputs[0] if outputs else None

    def from_last(self, tensor: T | None, shape: Sequence[int] | None = None) -> T:
        """Return a tensor of the last stage's rank on all ranks of the pipeline.

        Args:
            tensor: there; None on the other ranks.
            shape: of the tensor, which is in float32. Default: ranks are told shape and dtype.
        """
        told: Any = (shape, "float32")
        if shape is None:
            own = None if tensor is None else (list(tensor.shape), str(tensor.dtype).removeprefix("torch."))
            told = json.loads(share_bytes(json.dumps(own).encode(), self._group)[self._last])
        sizes, dtype = told
        if tensor is None:
            tensor = torch.empty(sizes, dtype=getattr(torch, dtype), device=self._schedule.stages[0].device)
        found = tensor.contiguous()
        get_platform().collectives.broadcast(found, self._last, group=self._group)
        return found


def _compare_options(axis: str, group: Any, own: Mapping[str, Any]) -> None:
    ranks = get_platform().groups.ranks(group)
    first, *others = (json.loads(each) for each in share_bytes(json.dumps(own).encode(), group))
    for rank, other in zip(ranks[1:], others, strict=True):
        for name in {**first, **other}:
            here, there = first.get(name), other.get(name)
            if here != there:
                raise ValueError(
                    f"{axis}: ranks {ranks} generate the same texts together, but {name} is {here!r} on rank {ranks[0]}"
                    f" and {there!r} on rank {rank}; pass them the same options, samples and seed"
                )


def _order(pipeline: Pipeline) -> dict[int, tuple[MetaStep, ...]]:
    return {
        rank: tuple(MetaStep(0, MetaStepType.FORWARD, stage) for stage in stages)
        for rank, stages in enumerate(pipeline.stages)
    }


def _blocks(stage: Any, caller: str) -> set[int]:
    """Return the numbers of the layers of a cache that a stage's blocks fill."""
    try:
        with caching(stage, None):
            own = [module for module in stage.modules() if not is_stand_in(module)]
    except TypeError as error:
        raise NotImplementedError(f"{caller}: {error}") from error
    found = {each for module in own for each in [getattr(module, "layer_idx", None)] if isinstance(each, int)}
    if not found:
        raise NotImplementedError(f"{caller}: no module of {type(stage).__name__} says which layer it is (layer_idx)")
    return found


def _as_long(layer: Any) -> Any:
    """Return a layer of a cache that is as long as another one, without its keys."""
    seen = copy.copy(layer)
    if layer.is_initialized:
        rows, _, length, _ = layer.keys.shape
        seen.keys = seen.values = torch.zeros((), dtype=torch.bool).expand(rows, 1, length, 1)
    return seen


def stand_in(forwards: Forwards) -> Any:
    """Return a model that generates as transformers' models do, by the forwards of all stages.

    It is a copy of one of this rank's stages, whose modules and configurations are its own.

    Args:
        forwards: of the stages.
    """
    stage: Any = forwards.model.schedule.stages[0].submodule
    # Not of the class by which fully_shard gathers around a forward: stages do that themselves.
    kinds = (kind for kind in type(stage).__mro__ if issubclass(kind, nn.Module) and not issubclass(kind, HSDPModule))
    owner: Any = object.__new__(next(kinds))
    hooks = {name: value for name, value in vars(nn.Module()).items() if "_hooks" in name}
    vars(owner).update({**vars(stage), **hooks})
    for name in ("config", "generation_config"):
        if hasattr(forwards.model, name):
            setattr(owner, name, getattr(forwards.model, name))
    owner.forward = _WholeForward(forwards, owner)
    return owner


class _WholeForward:
    """The forward of all stages: the logits of the last token, on all ranks."""

    def __init__(self, forwards: Forwards, owner: Any) -> None:
        self._forwards, self._config = forwards, owner.config
        self._vocabulary = 0
        self.__signature__ = inspect.signature(type(owner).forward.__get__(owner))

    def __call__(self, *args: Any, **inputs: Any) -> Any:
        from transformers import DynamicCache
        from transformers.modeling_outputs import CausalLMOutputWithPast

        inputs = {**dict(zip(self.__signature__.parameters, args, strict=False)), **inputs}
        cache, use_cache = inputs.pop("past_key_values", None), inputs.pop("use_cache", None)
        inputs.pop("return_dict", None)
        inputs = {name: value for name, value in inputs.items() if value is not None and value is not False}
        unknown = sorted(inputs.keys() - _INPUTS)
        if unknown:
            raise NotImplementedError(f"generate: a model under pp takes no {', '.join(unknown)}; leave it out")
        if cache is None and use_cache:
            cache = DynamicCache(config=self._config)
        if cache is not None:
            _check_cache(cache, DynamicCache, self._config)
        output, logits = self._forwards.run(cache, **inputs), None
        if output is not None:
            logits = output["logits"][:, -1:]
            logits = logits.full_tensor() if isinstance(logits, DTensor) else logits
            logits = logits.float()  # in which transformers chooses
        rows = len(next(inputs[name] for name in ("input_ids", "inputs_embeds") if name in inputs))
        logits = self._forwards.from_last(logits, (rows, 1, self._vocabulary) if self._vocabulary else None)
        self._vocabulary = logits.shape[-1]
        return CausalLMOutputWithPast(logits=logits, past_key_values=cache)


def _check_cache(cache: Any, known: type, config: Any) -> None:
    """Refuse a cache that stages cannot fill, each the layers of its blocks."""
    kinds = {type(layer).__name__ for layer in cache.layers} - {"DynamicLayer", "DynamicSlidingWindowLayer"}
    blocks = getattr(config.get_text_config(), "num_hidden_layers", len(cache.layers))
    if type(cache) is not known or kinds or len(cache.layers) != blocks or cache.offloading:
        raise NotImplementedError(
            f"generate: under pp the cache must be a DynamicCache on the device, with keys and values of {blocks}"
            f" blocks, got a {type(cache).__name__} of {len(cache.layers)}"
            + (f", with {', '.join(sorted(kinds))}" if kinds else "")
            + "; leave cache_implementation and past_key_values out, or pass use_cache=False"
        )
