"""A family of models under a product of axes, compared with one process: what the tests, the sweep and the docs run."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from moe_models import Float64, build, experts
from torch import nn
from torch.utils.checkpoint import checkpoint

from hp_dtensor import DeviceMesh, DTensor, Replicate, Shard, implicit_replication, init_device_mesh
from hp_dtensor.torch.extend import distribute_parameter
from hp_moe import ExpertParallel, ExpertTensorParallel, TensorParallel, global_auxiliary_loss
from hp_platform import get_platform
from hp_styles import parallelize_module, sequence_parallel_plan
from hp_testing import device_type

Routing = Literal["own", "uniform", "one", "empty"]

ROWS, LENGTH = 8, 6
TOLERANCE = 1e-10
FAMILIES = (
    "Qwen3MoeConfig",
    "MixtralConfig",
    "DeepseekV3Config",
    "Glm4MoeConfig",
    "GptOssConfig",
    "Qwen3NextConfig",
    "OlmoeConfig",
)
ROUTINGS: tuple[Routing, ...] = ("own", "uniform", "one", "empty")
PRODUCTS: dict[str, int] = {
    "ep2": 2,
    "ep4": 4,
    "tp2": 2,
    "etp1x2": 2,
    "etp2x2": 4,
    "ep2 x tp2": 4,
    "ep4 over dp2 x tp2": 4,
    "ep2 x sp2": 4,
    "ep4 over dp2 x sp2": 4,
    "etp2x2 x sp2": 4,
    "ep2 x fsdp2": 4,
    "ep2 x fsdp2 on dim 1": 4,
    "ep4 x fsdp4": 4,
    "ep2 x pp2": 4,
}
"""Number of ranks of each product; ``sp`` is tensor parallel whose activations are sharded along the sequence."""


@dataclass(frozen=True)
class Run:
    """One comparison.

    Attributes:
        family: a name of ``FAMILIES``.
        product: a name of ``PRODUCTS``.
        routing: the router's own choices; or as many tokens for each expert; or all for one; or none for the experts of
            the last ranks.
        combine: as ``ExpertParallel`` has it.
        num_experts: of each layer; a divisor of 24, of which each rank gets as many where all are chosen alike.
        checkpointed: each block is computed again in backward.
        auxiliary: the model adds its load balancing loss, that of all tokens.
    """

    family: str
    product: str = "ep2"
    routing: Routing = "own"
    combine: Literal["fast", "exact"] = "fast"
    num_experts: int = 6
    checkpointed: bool = False
    auxiliary: bool = False


def judge(run: Run) -> str:
    """Compare, on a rank; return ``right``, ``refused: ...`` or ``wrong: ...``."""
    try:
        error = worst_error(run)
    except (NotImplementedError, ValueError) as refusal:
        return f"refused: {refusal}"
    return "right" if error < TOLERANCE else f"wrong: {error:.1e}"


def judge_all(runs: list[Run]) -> list[str]:
    """Compare some, on a rank."""
    torch.set_num_threads(1)
    return [judge(run) for run in runs]


def worst_error(run: Run) -> float:
    """Return the largest error of loss, gradients and weights over two steps, on this rank.

    Errors of gradients and weights are relative to the largest of all.
    """
    single, other = (build(run.family, run.num_experts).to(device_type()) for _ in range(2))
    if run.auxiliary:
        for model in (single, other):
            model.config.output_router_logits, model.router_aux_loss_coef = True, 0.5
        global_auxiliary_loss(other)
    spread = _spread(run, other)
    _steer(run.routing, single)
    if run.checkpointed:
        for part in spread.parts:
            recompute_blocks(part)
    optimizers = [torch.optim.SGD(parameters, lr=0.5) for parameters in (list(single.parameters()), spread.all())]
    generator = torch.Generator().manual_seed(1)
    worst = 0.0
    for _ in range(2):
        tokens = torch.randint(64, (ROWS, LENGTH), generator=generator).to(device_type())
        with Float64():
            loss = single(tokens, labels=tokens).loss
            loss.backward()
            mean = spread.step(tokens.chunk(spread.lots)[spread.lot])
        if mean is not None:
            worst = max(worst, abs(mean - loss.item()))
        expected = {key: torch.zeros_like(p) if p.grad is None else p.grad for key, p in single.named_parameters()}
        worst = max(worst, _largest_difference(expected, spread.gradients()))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return max(worst, _largest_difference(dict(single.named_parameters()), spread.weights()))


def recompute_blocks(model: nn.Module) -> None:
    """Let backward compute each block of a transformers model again."""
    contexts = lambda: (contextlib.nullcontext(), Float64())  # noqa: E731
    for module in model.modules():
        if hasattr(module, "gradient_checkpointing"):
            module.gradient_checkpointing = True
            module._gradient_checkpointing_func = functools.partial(
                checkpoint, use_reentrant=False, context_fn=contexts
            )


def _largest_difference(expected: dict[str, torch.Tensor], got: dict[str, torch.Tensor]) -> float:
    largest = max(float(value.detach().abs().max()) for value in expected.values())
    differences = [float((value - expected[key]).detach().abs().max()) for key, value in got.items()]
    return float("inf") if any(map(_is_nan, differences)) else max(differences) / largest


def _is_nan(value: float) -> bool:
    return value != value


# ---- the model over ranks ----
class Spread:
    """A model over ranks.

    Args:
        parts: what this rank has of it.
        mesh: of all ranks.
        data: the axis whose ranks have tokens of their own.
        step: runs a rank's tokens forward and backward; returns the loss where this rank knows it.
        averaged: gradients are those of the mean over all ranks already.
    """

    def __init__(
        self,
        parts: list[nn.Module],
        mesh: DeviceMesh,
        data: str | None,
        step: Callable[[torch.Tensor], torch.Tensor | None],
        averaged: bool = False,
    ) -> None:
        self.parts, self.averaged, self._step = parts, averaged, step
        self.data = mesh[data] if data is not None else None
        self.lots = 1 if self.data is None else self.data.size()
        self.lot = 0 if self.data is None else self.data.get_local_rank()

    def step(self, tokens: torch.Tensor) -> float | None:
        """Run forward and backward; return the mean loss."""
        loss = self._step(tokens)
        return None if loss is None else self._mean(loss.detach().clone()).item()

    def _mean(self, value: torch.Tensor) -> torch.Tensor:
        if self.data is not None:
            get_platform().collectives.all_reduce(value, group=self.data.get_group())
            value /= self.lots
        return value

    def named(self) -> dict[str, nn.Parameter]:
        """Return this rank's parameters by their names in the whole model."""
        return {name: parameter for part in self.parts for name, parameter in part.named_parameters()}

    def all(self) -> list[nn.Parameter]:
        """Return this rank's parameters."""
        return list(self.named().values())

    def gradients(self) -> dict[str, torch.Tensor]:
        """Make each gradient that of the mean over all tokens; return them whole."""
        return {name: self._gradient(parameter) for name, parameter in self.named().items()}

    def _gradient(self, parameter: nn.Parameter) -> torch.Tensor:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        if isinstance(parameter, DTensor):
            grad = parameter.grad
            assert isinstance(grad, DTensor)
            if not self.averaged and self.data is not None:
                own = set(self.data.ranks.flatten().tolist())
                if own <= set(parameter.device_mesh.ranks.flatten().tolist()):
                    grad /= self.lots  # a sum over all tokens
                else:
                    assert not any(placement.is_partial() for placement in grad.placements)
                    self._mean(grad.to_local())
            return grad.full_tensor()
        return parameter.grad if self.averaged else self._mean(parameter.grad)

    def weights(self) -> dict[str, torch.Tensor]:
        """Return the parameters whole."""
        return {
            name: parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
            for name, parameter in self.named().items()
        }


def _spread(run: Run, model: Any) -> Spread:
    product, style = run.product, ExpertParallel(combine=run.combine)
    if "pp" in product:
        return _pipelined(run, model, style)
    if "fsdp" in product:
        return _sharded(run, model, style)
    _steer(run.routing, model)
    axes, shape = {
        "ep2": (("ep",), (2,)),
        "ep4": (("ep",), (4,)),
        "tp2": (("tp",), (2,)),
        "etp1x2": (("ep", "tp"), (1, 2)),
    }.get(product, (("ep", "tp"), (2, 2)))
    mesh = init_device_mesh(device_type(), shape, mesh_dim_names=axes)
    spread: Any = style
    over = mesh
    if product.startswith("etp"):
        spread = ExpertTensorParallel(combine=run.combine)
    elif product == "tp2":
        spread = TensorParallel()
    elif "over dp2" in product:
        over = mesh["ep", "tp"]._flatten("all")
    elif len(shape) == 2:
        over = mesh["tp"]  # experts over the ranks that have the same tokens, a copy of each for each part of the data
    for module in experts(model):
        parallelize_module(module, over, spread)
    if len(shape) == 2:
        _dense(model, mesh["tp"], "sp" in product)
    data = "ep" if "ep" in axes else None
    return Spread([model], mesh, data, lambda tokens: _backward(model, tokens))


def _dense(model: Any, mesh: DeviceMesh, sequence: bool) -> None:
    """Shard what is not experts by the model's own tensor parallel table."""
    table = model.config.base_model_tp_plan or {
        f"layers.*.self_attn.{name}_proj": "rowwise" if name == "o" else "colwise" for name in "qkvo"
    }
    names = [name for name, _ in model.named_modules()]
    layers = [name for name in names if name.rpartition(".")[0] == "model.layers"]
    plan: dict[str, Any] = {}
    for pattern, kind in table.items():
        if ".experts" in pattern:
            continue
        for layer in layers:
            name = pattern.replace("layers.*", layer)
            if name in names:
                plan[name] = kind
    if sequence:
        # A mixture takes whole sequences, and its sum is scattered by what adds it to the residual stream.
        norms = [f"{layer}.{norm}_layernorm" for layer in layers for norm in ("input", "post_attention")]
        plan = sequence_parallel_plan(plan, norms=[*norms, "model.norm"], embedding="model.embed_tokens")
    else:
        plan["model.embed_tokens"] = "embedding_rowwise"
    parallelize_module(model, mesh, plan)
    for parameter in model.parameters():
        if not isinstance(parameter, DTensor):
            distribute_parameter(parameter, mesh, [Replicate()])


def _sharded(run: Run, model: Any, style: ExpertParallel) -> Spread:
    from hp_fsdp import fully_shard

    shape = (2, 2) if run.product.startswith("ep2") else (1, 4)
    # Experts spread unevenly are sharded by another dim than theirs.
    options: Any = {"shard_placement_fn": lambda parameter: Shard(1)} if "dim 1" in run.product else {}
    mesh = init_device_mesh(device_type(), shape, mesh_dim_names=("rest", "ep"))
    world = mesh["rest", "ep"]._flatten("world")
    _steer(run.routing, model)
    for module in experts(model):
        parallelize_module(module, mesh["ep"], style)
        fully_shard(module, mesh["rest"], **options)
    for layer in model.model.layers:
        fully_shard(layer, world)
    fully_shard(model, world)
    spread = Spread([model], mesh, None, lambda tokens: _backward(model, tokens), averaged=True)
    spread.data, spread.lots, spread.lot = world, 4, dist.get_rank()
    return spread


def _pipelined(run: Run, model: Any, style: ExpertParallel) -> Spread:
    from hp_pipeline import PipelinedModel, Schedule1F1B, split_model

    mesh = init_device_mesh(device_type(), (2, 2), mesh_dim_names=("pp", "ep"))
    split = split_model(model, 2)
    stage = split.stage(mesh.get_local_rank("pp"))
    _steer(run.routing, stage)
    for module in experts(stage):
        parallelize_module(module, mesh["ep"], style)
    number = mesh.get_local_rank("pp")
    stages = PipelinedModel(Schedule1F1B([split.pipeline_stage(number)], 2, group=mesh.get_group("pp")))

    def step(tokens: torch.Tensor) -> None:
        stages.run(tokens, labels=tokens)

    return Spread([stages], mesh, "ep", step)


def _backward(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    with implicit_replication():
        loss = model(tokens, labels=tokens).loss
        loss.backward()
    return loss.full_tensor() if isinstance(loss, DTensor) else loss


# ---- where tokens go ----
def _steer(routing: Routing, model: nn.Module) -> None:
    for module in experts(model) if routing != "own" else ():
        count = next(module.parameters()).shape[0]
        module.register_forward_pre_hook(lambda _, inputs, count=count: _steered(routing, count, *inputs))


def _steered(routing: Routing, count: int, tokens: Any, chosen: Any, weights: Any) -> tuple[Any, Any, Any]:
    if routing == "one":
        return tokens, torch.full_like(chosen, count // 2), weights
    if routing == "empty":
        return tokens, chosen % max(1, count // 2), weights
    place = torch.arange(chosen.numel(), device=chosen.device).view(chosen.shape) % count
    return tokens, place.to(chosen.dtype), weights
