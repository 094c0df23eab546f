"""The loss of a step and its gradients: Note [A loss over tokens] in `hp_plan.features.loss`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from hp_fsdp import HSDPModule
from hp_pipeline import PipelinedModel
from hp_plan.checks.alike import draws
from hp_plan.features.loss import IGNORED, Shares, cut_rows, share_out
from hp_plan.plan import ParallelPlan
from hp_plan.torch.models import base, batch_of, loss_inputs
from hp_plan.torch.sequences.context import counts_tokens
from hp_plan.torch.training.objectives import Objective, of_samples
from hp_platform import get_platform
from hp_platform.extend import share_numbers

T = torch.Tensor


def backward_loss(
    plan: ParallelPlan,
    model: Any,
    tokens: T,
    *,
    labels: T | None = None,
    positions: T | None = None,
    begins: Callable[[int], None] | None = None,
    objective: Objective | None = None,
    measured: Callable[[T], None] | None = None,
    part: int | None = None,
) -> T | None:
    """Compute the loss of this rank's samples, one micro-batch after the other, and add its gradients.

    Args:
        plan: of the model.
        model: under the plan.
        tokens: (samples, sequence length).
        labels: what is to be predicted, `IGNORED` where nothing is; they are compared with the prediction of the place
            before. None is all tokens. Given on all ranks or on none.
        positions: of each token in its document, of samples of several.
        begins: called with the number of each micro-batch before it.
        objective: of the plan, if its loss is not the model's own.
        measured: called with what the objective measures of this rank's samples, a mean for each of its names.
        part: of the batch, whose samples these are: random draws follow it. None is this rank's own.

    Returns:
        The loss, whose mean over ranks with other samples is the step's; of a model in stages None on ranks without the
        last one.

    Raises:
        ValueError: on all ranks: labels are left out, and the model's loss is not known to count them.
    """
    rows = cut_rows(plan, len(tokens))
    if objective is not None:
        batch, begin = batch_of(tokens, labels, positions), _drawing(plan, len(rows), part, begins)
        return _backward_objective(plan, model, rows, batch, objective, begin, measured)
    shares, items = _shares(plan, model, labels, rows)
    inputs = loss_inputs(plan, tokens)
    if labels is not None and (items or not _all_count(labels)):
        inputs["labels"] = labels
    if positions is not None:
        inputs["position_ids"] = positions
    if items:
        divisor = torch.tensor(shares.divisor, dtype=torch.float64, device=tokens.device)
        inputs["num_items_in_batch"] = divisor
    if isinstance(model, PipelinedModel):
        draws(plan, len(rows), part=part)(0)
        losses = model.run(**inputs)
        return torch.stack(losses).mean().detach() if losses else None

    def loss_of(micro: slice, number: int) -> T:
        own = {name: value[micro] if of_samples(value) else value for name, value in inputs.items()}
        with _sees_items(model) if items and plan.mesh.cp == 1 else contextlib.nullcontext():
            loss = model(**own)["loss"]
        weight = 1.0 if items else shares.weights[number]
        return loss if weight == 1.0 else loss * weight

    return _backward(plan, model, rows, loss_of, _drawing(plan, len(rows), part, begins)) * shares.scale


def _drawing(
    plan: ParallelPlan, count: int, part: int | None, begins: Callable[[int], None] | None
) -> Callable[[int], None]:
    """Return what is called with the number of each micro-batch before it: it begins the micro-batch's draws."""
    draw = draws(plan, count, part=part)

    def begin(number: int) -> None:
        draw(number)
        if begins is not None:
            begins(number)

    return begin


def _backward_objective(
    plan: ParallelPlan,
    model: Any,
    rows: list[slice],
    batch: dict[str, T],
    objective: Objective,
    begins: Callable[[int], None],
    measured: Callable[[T], None] | None,
) -> T:
    """See Note [Sums over pairs and labels] in `hp_plan.torch.training.objectives`."""
    labels, sums, groups = batch["labels"], list[T](), get_platform().groups
    own = [objective.items(labels[part]) for part in rows]
    everyone = [own] * groups.size() if objective.pairs else share_numbers(own, groups.default_group())
    shares = share_out(plan, everyone, groups.rank())

    def loss_of(part: slice, number: int) -> T:
        total, sum_of = objective(model, {name: value[part] for name, value in batch.items()})
        sums.append(sum_of)
        return total / shares.divisor

    result = _backward(plan, model, rows, loss_of, begins) * shares.scale
    if measured is not None and objective.names:
        measured(torch.stack(sums).sum(0) / objective.items(labels))
    return result


def _backward(
    plan: ParallelPlan,
    model: Any,
    rows: list[slice],
    loss_of: Callable[[slice, int], T],
    begins: Callable[[int], None],
) -> T:
    """Go backward from the loss of each micro-batch, and return their sum."""
    total = None
    with _reduced_at_end(plan, model, len(rows)) as begin:
        for number, part in enumerate(rows):
            begin(number)
            begins(number)
            loss = loss_of(part, number)
            loss.backward()
            addend = _addend(loss) if plan.run.deterministic else loss.detach().double()
            total = addend if total is None else total + addend
    assert total is not None
    return total


def _addend(loss: T) -> T:
    """Round a micro-batch's loss to a multiple of 2**-40: such sums are exact, so any number of ranks has the same."""
    return (loss.detach().double() * 2**40).round() / 2**40


def gives_items(model: Any, inputs: dict[str, Any]) -> bool:
    """Return True for a model in one process that hands the number of labels to its loss function.

    Args:
        model: the model.
        inputs: of its forward, with `labels`.
    """
    if not counts_tokens(base(model)):
        return False
    try:
        with torch.no_grad(), _sees_items(model):
            model(**inputs, num_items_in_batch=torch.ones((), device=inputs["labels"].device))
    except (NotImplementedError, TypeError):
        return False
    return True


def _shares(plan: ParallelPlan, model: Any, labels: T | None, rows: list[slice]) -> tuple[Shares, bool]:
    """Weight the micro-batches; return whether the model divides sums over labels itself as well.

    Raises:
        ValueError: it can't be given uneven numbers of labels; on all ranks.
    """
    size, rank = get_platform().groups.size(), get_platform().groups.rank()
    if labels is None:
        return share_out(plan, [[1] * len(rows)] * size, rank), False
    counts = [int((labels[part, 1:] != IGNORED).sum()) for part in rows]
    full = _all_count(labels)
    everyone = share_numbers([*counts, int(full), int(_divides(plan, model))], get_platform().groups.default_group())
    shares = share_out(plan, [each[: len(rows)] for each in everyone], rank)
    if all(each[-1] for each in everyone):
        return shares, True
    if not all(each[-2] for each in everyone):
        _check_means(plan, model, [each[: len(rows)] for each in everyone])
    return shares, False


def _check_means(plan: ParallelPlan, model: Any, counts: list[list[int]]) -> None:
    name = "a model in stages" if isinstance(model, PipelinedModel) else type(base(model)).__name__
    if plan.model.function is None or isinstance(model, PipelinedModel):
        raise ValueError(
            f"labels of {IGNORED} with {name}, whose loss is not known to be the sum over the others, divided by a"
            " number that it is given (num_items_in_batch): a mean of its losses would not be the step's. Leave no"
            " label out, or take a causal language model of transformers"
        )
    empty = [rank for rank, each in enumerate(counts) if not all(each)]
    if empty:
        raise ValueError(
            f"a micro-batch of rank {empty[0]} has no label but {IGNORED}, over which {name} takes a mean: make"
            " data.batch_size larger, or run.accumulate smaller"
        )


def _divides(plan: ParallelPlan, model: Any) -> bool:
    """Return True if the model, or this rank's last stage, divides by a number of labels that it is given."""
    if plan.mesh.cp > 1:
        return True  # `hp_plan.features.sequences` refuses others
    if isinstance(model, PipelinedModel):
        kinds = (getattr(stage.forward, "loss", "inline") for stage in model.stages.values() if _is_last(stage))
        return all(kind != "inline" for kind in kinds)
    return counts_tokens(base(model))


def _is_last(stage: Any) -> bool:
    return bool(getattr(stage.forward, "last", False))


def _all_count(labels: T) -> bool:
    return bool((labels[:, 1:] != IGNORED).all())


@contextlib.contextmanager
def _reduced_at_end(plan: ParallelPlan, model: Any, count: int) -> Iterator[Callable[[int], None]]:
    """Reduce gradients over ranks in the last of so many micro-batches; yield what is called before each.

    In deterministic mode they are added up, as losses have parts of the whole step's weight. Those that go home are
    reduced in each micro-batch: the device has no room for them.

    Args:
        plan: the plan.
        model: the model.
        count: of the micro-batches.
    """
    sharded = isinstance(model, HSDPModule)
    if sharded and plan.run.deterministic:
        model.set_reduce_op_type("sum")
    waits = sharded and count > 1 and (plan.run.deterministic or not plan.memory.homes)

    def begin(number: int) -> None:
        if waits:
            model.set_requires_gradient_sync(number == count - 1)

    try:
        yield begin
    finally:
        if waits:
            model.set_requires_gradient_sync(True)


@contextlib.contextmanager
def _sees_items(model: Any) -> Iterator[None]:
    """Check that a forward hands the number of labels to the model's loss function.

    Raises:
        NotImplementedError: it does not.
    """
    owner: Any = base(model)
    original, seen = owner.loss_function, []

    def loss(*args: Any, **options: Any) -> Any:
        seen.append(options.get("num_items_in_batch") is not None)
        return original(*args, **options)

    owner.loss_function = loss
    try:
        yield
    finally:
        owner.loss_function = original
    if not seen or not all(seen):  # several times where the first step is traced
        raise NotImplementedError(
            f"{type(owner).__name__} does not hand num_items_in_batch to its loss_function, so its loss is the mean"
            " over its own labels; leave none out, or take another model"
        )
