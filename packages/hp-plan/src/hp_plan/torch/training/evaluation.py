"""The loss of a model on samples that it is not trained on."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from hp_fsdp import FSDPModule
from hp_plan.features.loss import IGNORED, cut_rows
from hp_plan.plan import ParallelPlan
from hp_plan.torch.models import batch_of, loss_inputs
from hp_platform import get_platform


def evaluate(
    plan: ParallelPlan,
    model: nn.Module,
    tokens: torch.Tensor,
    *,
    labels: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
    objective: Any = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the loss of this rank's samples, without gradients and without dropout.

    A model of experts leaves the losses of its routers out.

    Args:
        plan: of the model.
        model: under the plan, whole.
        tokens: (samples, sequence length).
        labels: of samples of several documents, `IGNORED` where nothing is to be predicted.
        positions: of each token in its document, of such samples.
        objective: of the plan, if its loss is not the model's own.

    Returns:
        The loss and what the objective measures, of shape (1 + its names,), whose means over all ranks are those of the
        batch, and the mean number of labels, or pairs, of a rank; all 0 without any.
    """
    if objective is not None:
        return _of_objective(plan, model, batch_of(tokens, labels, positions), objective)
    inputs = loss_inputs(plan, tokens)
    if getattr(getattr(model, "config", None), "output_router_logits", False):
        inputs["output_router_logits"] = False
    if positions is not None:
        inputs["position_ids"] = positions
    if labels is None:
        count = tokens.new_tensor(tokens[:, 1:].numel(), dtype=torch.float64)
    else:
        count = _mean_labels(labels)
        # Without a label the sum over them is 0, whatever divides it.
        inputs |= {"labels": labels, "num_items_in_batch": torch.where(count > 0, count, 1.0)}
    total, parts = torch.zeros((), dtype=torch.float64, device=tokens.device), cut_rows(plan, len(tokens))
    with evaluating(model), torch.no_grad():
        for part in parts:
            own = {name: value[part] if _of_samples(value) else value for name, value in inputs.items()}
            total += model(**own)["loss"]
    return (total if labels is not None else total / len(parts))[None], count


def _of_objective(
    plan: ParallelPlan, model: nn.Module, batch: dict[str, torch.Tensor], objective: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    labels = batch["labels"]
    sums = torch.zeros(1 + len(objective.names), dtype=torch.float64, device=labels.device)
    with evaluating(model), torch.no_grad():
        for part in cut_rows(plan, len(labels)):
            total, measured = objective(model, {name: value[part] for name, value in batch.items()})
            sums += torch.cat([total[None], measured])
    count = _mean_of_ranks(objective.counted(labels))
    return sums / torch.where(count > 0, count, 1.0), count


def _of_samples(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 0


def _mean_labels(labels: torch.Tensor) -> torch.Tensor:
    """Return the number of labels that count, averaged over all ranks; those of `tp` have the same."""
    return _mean_of_ranks((labels[:, 1:] != IGNORED).sum())  # nothing comes before the first


def _mean_of_ranks(own: torch.Tensor) -> torch.Tensor:
    groups, collectives, count = get_platform().groups, get_platform().collectives, own.double()
    collectives.all_reduce(count, group=groups.default_group())
    return count / groups.size()


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put a model into evaluation mode, and back as each of its modules was; then its parameters are shards again."""
    modules = list(model.modules())
    trained = [module for module in modules if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in modules:
            if isinstance(module, FSDPModule):
                module.reshard()  # the root keeps what it gathers for a backward, which does not come
        for module in trained:
            module.training = True
