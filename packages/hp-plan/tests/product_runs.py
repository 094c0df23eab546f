"""Runs a product under its plan and in one process, in float64: losses, gradients and weights of two steps."""

from __future__ import annotations

import math
import traceback
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from habits import HABITS, Habit
from products import Product, Sabotaged, draw, sabotaged

from hp_dtensor import DTensor
from hp_pipeline import PipelinedModel
from hp_plan import ParallelPlan, PlanError, apply, build_model, build_optimizer, lint, verify
from hp_plan.extend import data_parallel_rows
from hp_plan.torch.compared import Float64
from hp_plan.torch.training.parts import clip_gradients

STEPS = 2
TOLERANCE = 1e-9
FLOOR = 1e-6  # of the largest gradient, or weight: some have none but rounding errors
ROUNDING = 1e-13  # of the largest gradient: an optimizer may divide such a one by its own size
REFUSALS = (NotImplementedError, ValueError, RuntimeError, TypeError)

Named = dict[str, torch.Tensor | None]
Masks = dict[str, torch.Tensor]


def judge_number(number: int) -> dict[str, Any]:
    """Judge the product of a number on this rank."""
    return judge(draw(number))


def judge_training(product: Product) -> dict[str, Any]:
    """Judge training alone, without `lint` and `verify`."""
    return _judged(lambda: _compare(product, product.plan()))


def judge_sabotage(kind: str, axis: str) -> dict[str, Any]:
    """Judge a kind of sabotage on two ranks of an axis; one that `verify` doesn't run under the plan isn't trained."""
    product = Sabotaged("llama", sabotaged(axis), kind=kind)
    checked = _judged(lambda: _verified(product.plan()))
    if "ranks that each run the whole model" in checked["detail"]:
        said = {"lint": [], "verdict": "wrong", "detail": "ranks differ in one process"}
        return said | {"verify": checked["verdict"], "verify_detail": checked["detail"]}
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        said = judge(product)
    if any("computes something else each time" in str(each.message) for each in warned):
        said |= {"verdict": "warned", "detail": "cp: it computes something else each time"}
    return said


def judge(product: Product) -> dict[str, Any]:
    """Run a product on this rank.

    Returns:
        `verdict`: "right", "refused", "wrong" or "crash", with `detail` and `worst` difference; `lint`: what it said;
        `verify`: "passed", "failed", "refused" or "crash", with `verify_detail`.
    """
    plan = product.plan()
    said = {"lint": [str(each) for each in lint(plan, product.ranks, run_model_code=True)]}
    said |= _judged(lambda: _compare(product, plan))
    if said["lint"]:
        return said | {"verify": "refused", "verify_detail": ""}
    checked = _judged(lambda: _verified(plan))
    return said | {"verify": checked["verdict"], "verify_detail": checked["detail"]}


def _judged(run: Any) -> dict[str, Any]:
    try:
        return run()
    except PlanError as error:
        return {"verdict": "refused", "detail": f"PlanError: {error.diagnostics[0]}"}
    except Exception as error:
        return {"verdict": "refused" if _named(error) else "crash", "detail": _said(error)}


def _named(error: BaseException) -> bool:
    """Return True for an error that these packages raise on purpose."""
    while error.__cause__ is not None and type(error).__name__ == "PipelineError":
        error = error.__cause__
    frames = traceback.extract_tb(error.__traceback__)
    if not frames:
        return True  # of another rank's stage, which says for itself what it was
    last = frames[-1].filename.rpartition("/src/")[2]
    return last.startswith(("hp_", "hyper_parallel")) and isinstance(error, REFUSALS)


def _said(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    where = " < ".join(f"{Path(frame.filename).name}:{frame.lineno}" for frame in frames[:-6:-1])
    cause = f" [{type(error.__cause__).__name__}: {error.__cause__}]" if error.__cause__ is not None else ""
    return f"{type(error).__name__}: {error}{cause} ({where})"


def _verified(plan: ParallelPlan) -> dict[str, Any]:
    result = verify(plan)
    said = [f"{result.first}: {result.largest:.1e}", *result.notes]
    return {"verdict": "passed" if result.passed else "failed", "detail": "; ".join(said)}


class _Program:
    """One of the two programs: a model, its optimizer, and what the user does besides."""

    def __init__(self, product: Product, plan: ParallelPlan, *, parallel: bool) -> None:
        self._plan, self._habits = plan, [HABITS[name] for name in product.habits]
        model = _model(plan)
        for habit in self._habits:
            if habit.built is not None:
                habit.built(model)
        self.model: Any = apply(model, plan) if parallel else model
        for habit in self._habits:
            if habit.applied is not None:
                habit.applied(self.model)
        self.staged, self._parallel = isinstance(self.model, PipelinedModel), parallel
        own = _first(self._habits, "optimizer")
        named = [(name, each) for name, each in self.model.named_parameters() if each.requires_grad]
        named = list(self.model.named_parameters()) if any(habit.stepped for habit in self._habits) else named
        self._optimizer = build_optimizer(plan, named) if own is None else own([each for _, each in named])

    def step(self, batches: list[dict[str, torch.Tensor]]) -> float | None:
        """Train one step on batches, each of the same part of the loss; return the loss, where this rank has it."""
        self._optimizer.zero_grad()
        if self.staged:
            losses = self.model.run(**_joined(batches))
            total = torch.stack(losses).mean().item() if losses else None
        else:
            loss_of = _first(self._habits, "loss") or (lambda model, inputs: model(**inputs)["loss"])
            losses = []
            for batch in batches:
                losses.append(loss_of(self.model, batch) / len(batches))
                if self._parallel:
                    losses[-1].backward()
            if not self._parallel:
                torch.stack(losses).sum().backward()  # so a hook sees the gradient once
            total = torch.stack(losses).sum().item()
        return total

    def update(self, batches: list[dict[str, torch.Tensor]], number: int) -> None:
        """Clip, take the optimizer's step and do what the user does after it."""
        clip = _first(self._habits, "clip")
        if clip is not None:
            clip([each for each in self.model.parameters() if each.grad is not None])
        elif self._plan.run.grad_clip is not None and self._parallel:
            clip_gradients(self.model, self._plan.run.grad_clip)
        elif self._plan.run.grad_clip is not None:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self._plan.run.grad_clip)
        self._optimizer.step()
        for habit in self._habits:
            if habit.stepped is not None:
                habit.stepped(self.model, self._optimizer, batches[0], number)

    def read(self, gradients: bool) -> Named:
        """The gradients, or the weights, whole, by name: those of this rank's stages."""
        named = dict(self.model.named_parameters(remove_duplicate=False))
        tensors = {name: each.grad if gradients else each.detach() for name, each in named.items()}
        if self._parallel and gradients:
            # A rank that owns no element of a parameter may have no gradient where others have.
            everyone: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(everyone, [name for name, each in tensors.items() if each is not None])
            for name in {name for names in everyone for name in names} & tensors.keys():
                if tensors[name] is None:
                    tensors[name] = torch.zeros_like(named[name])
        return {name: _whole(each) for name, each in tensors.items()}

    def buffers(self) -> Named:
        """The buffers of floating point of the modules that have them here, whole, by name."""
        named = self.model.named_buffers(remove_duplicate=False)
        return {name: _whole(each) for name, each in named if each.is_floating_point()}


def _compare(product: Product, plan: ParallelPlan) -> dict[str, Any]:
    worst, where = 0.0, ""
    with Float64():
        single = _Program(product, plan, parallel=False)
        parallel = _Program(product, plan, parallel=True)
        for number in range(STEPS):
            torch.manual_seed(number)  # a router may draw noise
            everyone = [_batches(product, plan, part, number) for part in range(_parts(plan))]
            mine = everyone[data_parallel_rows(plan).start * _parts(plan) // plan.data.batch_size]
            whole = [batch for batches in everyone for batch in batches]
            whole = [_joined(whole)] if product.one_batch else whole
            expected = single.step(whole)
            got = parallel.step(mine)
            found = [(_loss_difference(got, expected), f"loss of step {number}")]
            found.append(_largest(parallel.read(True), single.read(True), f"gradient of step {number}"))
            rounding = _rounding(single.read(True))
            single.update(whole, number)
            parallel.update(mine, number)
            weights = parallel.read(False), single.read(False)
            found.append(_largest(*weights, f"weight after step {number}", rounding))
            if product.one_batch:  # else what forward writes into buffers is of each batch
                found.append(_largest(parallel.buffers(), single.buffers(), f"buffer after step {number}"))
            worst, where = max([*found, (worst, where)], key=lambda each: each[0])
            if worst > TOLERANCE:
                break  # what follows is wrong, too
    return {"verdict": "right" if worst <= TOLERANCE else "wrong", "worst": worst, "detail": where}


def _model(plan: ParallelPlan) -> Any:
    """The model, no weight of which is zero or one, so that a bias that is added twice shows."""
    model = build_model(plan).train()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return model


def _parts(plan: ParallelPlan) -> int:
    return plan.mesh.dp_shard * plan.mesh.dp_replicate


def _batches(product: Product, plan: ParallelPlan, part: int, step: int) -> list[dict[str, torch.Tensor]]:
    """The micro-batches of a data parallel part in a step."""
    samples = plan.data.batch_size // _parts(plan)
    batch = dict(product.inputs(samples, torch.Generator().manual_seed(100 * step + part)))
    if product.padding:
        mask = torch.ones_like(batch["input_ids"])
        mask[1, slice(0, 2) if product.padding == "left" else slice(-2, None)] = 0
        batch["attention_mask"] = mask
        if batch["labels"].shape == mask.shape:
            batch["labels"] = batch["labels"].masked_fill(mask == 0, -100)
    count = plan.pipeline.micro_batches or samples if plan.mesh.pp > 1 else plan.run.accumulate
    each = samples // count
    return [{name: value[at : at + each] for name, value in batch.items()} for at in range(0, samples, each)]


def _joined(batches: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}


def _first(habits: list[Habit], name: str) -> Any:
    return next((found for habit in habits if (found := getattr(habit, name)) is not None), None)


def _whole(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _loss_difference(got: float | None, expected: float | None) -> float:
    """The relative difference of the mean of the ranks' losses, of those that have one."""
    total = torch.tensor([got or 0.0, got is not None], dtype=torch.float64)
    dist.all_reduce(total)
    mean = (total[0] / total[1]).item()
    assert expected is not None
    worst = abs(mean - expected) / abs(expected)
    return worst if math.isfinite(worst) else math.inf


def _rounding(gradients: Named) -> Masks:
    """Elements of gradients that are rounding errors alone, as of a key's bias under a softmax."""
    largest = max(each.abs().max().item() for each in gradients.values() if each is not None)
    return {name: each.abs() < ROUNDING * largest for name, each in gradients.items() if each is not None}


def _largest(got: Named, expected: Named, what: str, rounding: Masks | None = None) -> tuple[float, str]:
    """The largest difference of a tensor on any rank, and where it is; a tensor that no rank has is one."""
    largest = max((each.abs().max().item() for each in expected.values() if each is not None), default=0.0)
    worst, where = 0.0, what
    for name, mine in got.items():
        one = expected[name]
        if (mine is None) != (one is None):
            difference = 0.0 if not (one if mine is None else mine).abs().max() else math.inf  # type: ignore[union-attr]
        elif mine is None or one is None or not one.numel():
            difference = 0.0
        else:
            apart = (
                mine - one
                if rounding is None or name not in rounding
                else (mine - one).masked_fill(rounding[name], 0.0)
            )
            difference = apart.abs().max().item() / max(one.abs().max().item(), FLOOR * largest, 1e-30)
        difference = difference if math.isfinite(difference) else math.inf
        if difference > worst:
            worst, where = difference, f"{what}: {name}"
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (worst, where, list(got)))
    missing = expected.keys() - {name for _, _, names in everyone for name in names}
    return (math.inf, f"{what}: nobody has {sorted(missing)[0]}") if missing else max(each[:2] for each in everyone)
