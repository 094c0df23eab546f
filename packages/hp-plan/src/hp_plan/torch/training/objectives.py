"""Losses of `[objective]`: of two answers, of a teacher's predictions, of a function of the user's.

Note [Sums over pairs and labels]
    An objective returns the sum of its losses over the items of a micro-batch: pairs of answers, or labels that count.
    `hp_plan.torch.training.loss` divides the sums of all ranks and micro-batches by the step's number of items, so the
    loss is that of one process on the whole batch, however it is cut.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from hp_fsdp import FSDPModule
from hp_plan.features.loss import IGNORED, cut_rows, reference_plan
from hp_plan.plan import ParallelPlan
from hp_plan.reading.diagnostics import Diagnostic
from hp_plan.structure.model_source import check_function, model_function
from hp_plan.torch.library import folders
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
            own = {name: value[part] if of_samples(value) else value for name, value in inputs.items()}
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


def of_samples(value: Any) -> bool:
    """Tell whether an input of a model has a row for each sample."""
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


T = torch.Tensor


def check_objective_sources(plan: ParallelPlan, *, run_code: bool) -> list[Diagnostic]:
    """Check that the function and the folder that `[objective]` names can be had.

    Args:
        plan: the plan.
        run_code: import the function's module to look for it there.
    """
    section, diagnostics = plan.objective, []
    if section.function is not None:
        diagnostics += check_function(section.function, run_code=run_code, key="objective.function")
    other = reference_plan(plan)
    if section.reference is not None and other is not None:
        found = folders.check_folder(other.model)
        diagnostics += [dataclasses.replace(each, key="objective.reference") for each in found]
    return diagnostics


class Objective:
    """The loss of a plan whose loss is not the model's own; see Note [Sums over pairs and labels].

    Args:
        plan: with such an objective.
        reference: the second model, under its plan; None where the objective has none.

    Attributes:
        pairs: an item is a pair of rows.
        names: of what is measured beside the loss.
    """

    def __init__(self, plan: ParallelPlan, reference: nn.Module | None = None) -> None:
        self._section, self._reference = plan.objective, reference
        self._options = {"use_cache": False} if plan.model.of_transformers else {}
        self.pairs = plan.data.format == "preference"
        kind = plan.objective.kind
        self.names: tuple[str, ...] = ("accuracy", "margin") if kind in ("dpo", "reward") else ()
        self._function: Callable[..., Any] | None = None
        if plan.objective.function is not None:
            self._function = model_function(plan.objective.function, key="objective.function")
        if reference is not None:
            reference.requires_grad_(False)

    def items(self, labels: T) -> int:
        """Count the items of some rows, each of which has a label."""
        return len(labels) // 2 if self.pairs else int(self.counted(labels))

    def counted(self, labels: T) -> T:
        """Count the items of some rows on the device; pairs without a label, which fill up a batch, are none."""
        return _answered(labels).sum() if self.pairs else (labels[:, 1:] != IGNORED).sum()

    def __call__(self, model: nn.Module, batch: Mapping[str, T]) -> tuple[T, T]:
        """Compute the sum of the losses of some rows, and the sums of what is measured.

        Args:
            model: to train.
            batch: `input_ids` and `labels` of shape (rows, sequence length), and `position_ids` of packed ones.
        """
        if self._function is not None:
            total = self._function(model, dict(batch))
            if not isinstance(total, torch.Tensor) or total.dim():
                got = f"a tensor of shape {tuple(total.shape)}" if isinstance(total, torch.Tensor) else repr(total)
                raise TypeError(f"{self._section.function} returned {got}, expected the sum of its losses, a scalar")
            return total, total.new_zeros(0)
        kind = {"dpo": self._preferred, "reward": self._scored, "distill": self._taught}[self._section.kind]
        return kind(model, batch)

    def _preferred(self, model: nn.Module, batch: Mapping[str, T]) -> tuple[T, T]:
        """Rafailov et al., 2023, equation 7; hinge: Zhao et al., 2023; IPO: Azar et al., 2023, equation 17."""
        section, labels = self._section, batch["labels"]
        with self._other(model) as reference:
            before = _log_probabilities(self._logits(reference, batch), labels)
        gain = _log_probabilities(self._logits(model, batch), labels) - before
        if section.loss == "ipo":
            gain = gain / (labels[:, 1:] != IGNORED).sum(1).clamp_min(1)
        margin = gain[0::2] - gain[1::2]
        scaled = section.beta * margin
        if section.loss == "hinge":
            losses = F.relu(1 - scaled)
        elif section.loss == "ipo":
            losses = (margin - 1 / (2 * section.beta)).square()
        else:
            wrong = section.label_smoothing
            losses = -(1 - wrong) * F.logsigmoid(scaled) - wrong * F.logsigmoid(-scaled)
        answered = _answered(labels)
        return (losses * answered).sum(), _compared(scaled, answered)

    def _scored(self, model: nn.Module, batch: Mapping[str, T]) -> tuple[T, T]:
        """Ouyang et al., 2022, equation 1: the score of a text is that of its last token."""
        seen: list[T] = []
        handle = model.get_submodule("score").register_forward_hook(lambda *call: seen.append(call[-1]))
        try:
            model(input_ids=batch["input_ids"], **self._options)
        finally:
            handle.remove()
        (scores,) = seen
        scores = _plain(scores).squeeze(-1)
        places = torch.arange(scores.shape[1], device=scores.device)
        last = torch.where(batch["labels"] != IGNORED, places, 0).amax(1)
        scores = upcast(scores.gather(1, last[:, None]).squeeze(1))
        margin = scores[0::2] - scores[1::2]
        answered = _answered(batch["labels"])
        return -(F.logsigmoid(margin) * answered).sum(), _compared(margin, answered)

    def _taught(self, model: nn.Module, batch: Mapping[str, T]) -> tuple[T, T]:
        """Hinton et al., 2015, section 2.1: the divergence of the teacher's predictions from the student's."""
        section = self._section
        targets = batch["labels"][:, 1:]
        counted = targets != IGNORED
        with self._other(model) as teacher:
            theirs = upcast(self._logits(teacher, batch)[:, :-1][counted])
        own = upcast(self._logits(model, batch)[:, :-1][counted])
        if own.shape != theirs.shape:
            raise ValueError(
                f"[objective] the teacher predicts {theirs.shape[-1]} tokens and the student {own.shape[-1]}: distill"
                " takes two models of one tokenizer"
            )
        heat = section.temperature
        theirs, softened = F.log_softmax(theirs / heat, -1), F.log_softmax(own / heat, -1)
        total = F.kl_div(softened, theirs, reduction="sum", log_target=True) * heat**2
        if section.mix:
            total = (1 - section.mix) * total + section.mix * F.cross_entropy(own, targets[counted], reduction="sum")
        return total, total.new_zeros(0)

    def _logits(self, model: nn.Module, batch: Mapping[str, T]) -> T:
        inputs = {name: value for name, value in batch.items() if name != "labels"}
        output = model(**inputs, **self._options)
        if not isinstance(output, Mapping) or "logits" not in output:
            raise TypeError(
                f"[objective] {self._section.kind} takes a model that returns a mapping with logits where it gets no"
                f" labels; {type(model).__name__} returned {type(output).__name__}"
            )
        return output["logits"]

    @contextlib.contextmanager
    def _other(self, model: nn.Module) -> Iterator[nn.Module]:
        """Yield the model to compare with, without dropout and gradients: the second one, or without its adapter."""
        with torch.no_grad(), evaluating(model if self._reference is None else self._reference):
            if self._reference is not None:
                yield self._reference
                return
            layers: list[Any] = [each for each in model.modules() if hasattr(each, "_disable_adapters")]
            for each in layers:  # peft's own switch also changes which parameters are trained
                each._disable_adapters = True
            try:
                yield model
            finally:
                for each in layers:
                    each._disable_adapters = False


def _log_probabilities(logits: T, labels: T) -> T:
    """Return for each row the sum of the log-probabilities of its labels."""
    targets = labels[:, 1:]
    own = upcast(logits[:, :-1])
    losses = F.cross_entropy(own.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="none")
    return -losses.view(targets.shape).sum(1)


def _answered(labels: T) -> T:
    """Tell for each pair whether its rows have a label."""
    return (labels[0::2, 1:] != IGNORED).any(1)


def _compared(margin: T, answered: T) -> T:
    """Return how many pairs are in the right order, and the sum of their margins."""
    margin = margin.detach() * answered
    return torch.stack([(margin > 0).to(margin.dtype).sum(), margin.sum()])


def upcast(values: T) -> T:
    """Return values in float32 where they have less precision."""
    return values.float() if values.dtype in (torch.bfloat16, torch.float16) else values


def _plain(values: Any) -> T:
    return values.full_tensor() if hasattr(values, "full_tensor") else values
