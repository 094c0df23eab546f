"""Verifying a plan: the same steps under it and in one process, compared tensor by tensor."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hp_dtensor import DTensor
from hp_plan.application import apply
from hp_plan.memory import BYTES, memory_left, training_bytes
from hp_plan.micro_batches import IGNORED
from hp_plan.plan import ParallelPlan, context_tokens, data_parallel_rows
from hp_plan.port import models
from hp_plan.sections import CompileSection, MemorySection
from hp_plan.torch.build import build_model, build_optimizer, build_schedule
from hp_plan.torch.context_guard import unguarded
from hp_plan.torch.float64 import Float64
from hp_plan.torch.loss import backward_loss, gives_items
from hp_plan.torch.models import loss_inputs
from hp_plan.torch.training import Part, clip_gradients, parts
from hp_plan.verification import ModuleDifference, VerifyResult
from hp_platform import get_platform
from hp_styles.extend import runs_on_parts

_KINDS = ("output", "gradient", "weight")
# Of the largest gradient, or weight: some have none but rounding errors, such as a key's bias under a softmax.
_FLOOR = 1e-6
# A gradient of less, in relation to the largest, is of rounding errors alone. AdamW divides it by its own size, so what
# it makes of the weight is compared with the largest weight.
_ROUNDING = 1e-13


def verify(plan: ParallelPlan, *, steps: int = 2, tolerance: float = 1e-9) -> VerifyResult:
    """Train the plan's model twice in float64, under the plan and in one process, and compare the results.

    Every rank calls it. Each runs the one-process program for itself and compares every module's output on its own
    samples, and after each step the loss, every gradient, every weight and every buffer. Labels are left out at random,
    more of some samples than of others, where the model's loss counts those that are left.

    Args:
        plan: the plan; its dtypes are replaced by float64, its text by random tokens.
        steps: optimizer steps.
        tolerance: the largest relative difference that passes.

    Returns:
        The same on every rank.

    Raises:
        PlanError: the plan doesn't fit its model or the number of ranks.
    """
    uncompiled = ("blocks ran uncompiled, as modules in them are compared",) if plan.compile.blocks else ()
    plan = _in_float64(plan)
    with Float64() as mode:
        device = get_platform().devices.current_device()
        single, parallel = build_model(plan).to(device), apply(build_model(plan).to(device), plan)
        runs = [_Run(plan, single), _Run(plan, parallel)]
        compared = _Compared(plan, single, parallel)
        rows, places = data_parallel_rows(plan), context_tokens(plan)
        for step in range(steps):
            batch = _batch(plan, single, step)
            compared.begin_step()
            mode.trains = True
            with compared.expected_outputs():
                expected = runs[0].whole(batch)
            with compared.outputs(rows, places, batch=len(batch.tokens)), unguarded():
                got = runs[1].share(batch[rows], compared.begins)
            mode.trains = False
            compared.loss(got, expected)
            compared.tensors("gradient", lambda parameter: parameter.grad)
            compared.leave_out_unseen()
            runs[0].update(lambda model, limit: nn.utils.clip_grad_norm_(model.parameters(), limit))
            runs[1].update(clip_gradients)
            compared.tensors("weight", lambda parameter: parameter.detach())
            compared.buffers()
    return dataclasses.replace(compared.result(tolerance), notes=(*mode.notes, *uncompiled))


@dataclass
class _Batch:
    """Samples of a step.

    Attributes:
        tokens: (samples, sequence length).
        labels: as of `backward_loss`.
        positions: as of `backward_loss`.
    """

    tokens: torch.Tensor
    labels: torch.Tensor | None = None
    positions: torch.Tensor | None = None

    def __getitem__(self, rows: slice) -> _Batch:
        parts = (None if each is None else each[rows] for each in (self.tokens, self.labels, self.positions))
        return _Batch(*parts)  # type: ignore[arg-type]

    def inputs(self, plan: ParallelPlan) -> dict[str, Any]:
        """Return the inputs of a model in one process."""
        given = {"labels": self.labels, "position_ids": self.positions}
        return {**loss_inputs(plan, self.tokens), **{name: each for name, each in given.items() if each is not None}}


class _Run:
    """One of the two programs: a model and its optimizer."""

    def __init__(self, plan: ParallelPlan, model: nn.Module) -> None:
        self._plan, self._model = plan, model
        self._optimizer = build_optimizer(plan, model.named_parameters())
        self._schedule = build_schedule(plan, self._optimizer)

    def whole(self, batch: _Batch) -> float:
        """Forward and backward of one process, in one piece."""
        self._optimizer.zero_grad()
        loss = self._model(**batch.inputs(self._plan))["loss"]
        loss.backward()
        return loss.item()

    def share(self, batch: _Batch, begins: Callable[[int], None]) -> float | None:
        """Forward and backward of this rank's samples under the plan; the loss, on ranks that have it."""
        self._optimizer.zero_grad()
        options = {"labels": batch.labels, "positions": batch.positions, "begins": begins}
        loss = backward_loss(self._plan, self._model, batch.tokens, **options)
        return None if loss is None else loss.item()

    def update(self, clip: Callable[[Any, float], Any]) -> None:
        """Clip the gradients if the plan says so, and take the optimizer's step."""
        if self._plan.run.grad_clip is not None:
            clip(self._model, self._plan.run.grad_clip)
        self._optimizer.step()
        self._schedule.step()


class _Compared:
    """The differences of each step, by module in the order in which modules finish."""

    def __init__(self, plan: ParallelPlan, single: nn.Module, parallel: Any) -> None:
        self._single, self._parts = single, list(parts(plan, parallel, single))
        self._compared = _innermost(single, self._parts)
        self._parameters = dict(single.named_parameters(remove_duplicate=False))
        self._own = {name: weight for part in self._parts for name, weight in part.parameters().items()}
        self._somewhere = _on_any_rank(self._parameters, self._own)
        self._rounding: set[str] = set()  # parameters whose last gradient was of rounding errors
        self._expected: dict[str, list[torch.Tensor]] = {}  # of each call
        self._steps: list[dict[str, dict[str, float]]] = []
        self._losses: list[float] = []

    def begin_step(self) -> None:
        """Begin a new step."""
        self._steps.append({})

    def begins(self, micro: int) -> None:
        """Note the number of a whole model's micro-batch that runs next."""
        for part in self._parts:
            part.begins(micro)

    @contextlib.contextmanager
    def expected_outputs(self) -> Iterator[None]:
        """Record the output of each module of the one-process model."""
        self._expected.clear()
        with _after_forward(self._single, self._compared, self._keep):
            yield

    @contextlib.contextmanager
    def outputs(self, rows: slice, places: Sequence[int], *, batch: int) -> Iterator[None]:
        """Compare the output of each module with the recorded one.

        Args:
            rows: this rank's samples.
            places: its tokens of each.
            batch: number of samples of the recorded outputs.
        """
        with contextlib.ExitStack() as hooks:
            for part in self._parts:
                calls: Counter[str] = Counter()

                def compare(name: str, output: torch.Tensor, part: Part = part, calls: Any = calls) -> None:
                    got, expected = _whole(output), self._expected[name]
                    # A module may be called several times in a forward, and a stage runs one for each micro-batch.
                    mine = _samples(expected[calls[name] % len(expected)], got, part.samples(rows), batch)
                    calls[name] += 1
                    mine = _tokens_of(mine, got, places)
                    if mine.shape != got.shape and next(part.module.get_submodule(name).parameters(), None) is None:
                        return  # an activation of tokens that experts have ordered: what follows it is compared
                    self._note(name, "output", _difference(got, mine))

                hooks.enter_context(part.counting())
                hooks.enter_context(_after_forward(part.module, self._compared & part.names, compare))
            yield

    def _keep(self, name: str, output: torch.Tensor) -> None:
        self._expected.setdefault(name, []).append(output.detach().clone())  # what follows may write to it
        self._note(name, "output", 0.0)

    def loss(self, got: float | None, expected: float) -> None:
        """Compare the loss: the global one is the mean of those of the ranks that have one."""
        device = get_platform().devices.current_device()
        total = torch.tensor([got or 0.0, got is not None], dtype=torch.float64, device=device)
        _all_reduce(total, "sum")
        mean = (total[0] / total[1]).item()
        got_and_expected = torch.tensor([mean, expected], dtype=torch.float64)
        self._losses.append(_difference(*got_and_expected))

    def tensors(self, kind: str, read: Callable[[torch.Tensor], torch.Tensor | None]) -> None:
        """Compare a tensor of every parameter, such as its gradient; one that no rank has differs."""
        largest = max((_largest(read(parameter)) for parameter in self._parameters.values()), default=0.0)
        for name, parameter in self._parameters.items():
            module = name.rpartition(".")[0]
            if name not in self._own:
                self._note(module, kind, 0.0 if name in self._somewhere else math.inf)
                continue
            got, expected = read(self._own[name]), read(parameter)
            if (got is None) != (expected is None):
                self._note(module, kind, math.inf)
            elif got is not None and expected is not None:
                floor = 1.0 if kind == "weight" and name in self._rounding else _FLOOR
                self._note(module, kind, _difference(_whole(got), expected, floor=floor * largest))
            if kind == "gradient" and _largest(expected) < _ROUNDING * largest:
                self._rounding.add(name)

    def leave_out_unseen(self) -> None:
        """Forget the outputs of modules that the loss does not see, as of a pooler: a stage computes them of zeros."""
        for name in self._compared:
            around = name  # the module, or the first around it that has parameters
            while around and next(self._single.get_submodule(around).parameters(), None) is None:
                around = around.rpartition(".")[0]
            own = [each for each in self._single.get_submodule(around).parameters() if each.requires_grad]
            if own and all(each.grad is None for each in own):
                self._steps[-1].get(name, {}).pop("output", None)

    def buffers(self) -> None:
        """Compare the buffers of this rank, as weights of their modules: what forward writes may be of its samples."""
        own = {name: buffer for part in self._parts for name, buffer in part.buffers().items()}
        for name, buffer in self._single.named_buffers(remove_duplicate=False):
            if name in own:
                got = _whole(own[name])
                self._note(name.rpartition(".")[0], "weight", _difference(got.double(), buffer.double()))
            else:
                self._note(name.rpartition(".")[0], "weight", 0.0)

    def result(self, tolerance: float) -> VerifyResult:
        """Return the largest differences of all ranks."""
        numbers = [row.get(kind, 0.0) for step in self._steps for row in step.values() for kind in _KINDS]
        device = get_platform().devices.current_device()
        together = torch.tensor([*self._losses, *numbers], dtype=torch.float64, device=device)
        _all_reduce(together, "max")
        largest = iter(together.tolist())
        losses = tuple(next(largest) for _ in self._losses)
        steps = tuple(
            tuple(ModuleDifference(name, next(largest), next(largest), next(largest)) for name in step)
            for step in self._steps
        )
        return VerifyResult(steps, losses, tolerance, get_platform().groups.size())

    def _note(self, module: str, kind: str, difference: float) -> None:
        row = self._steps[-1].setdefault(module, {})
        row[kind] = max(row.get(kind, 0.0), difference)


def _innermost(single: nn.Module, parallel: Sequence[Part]) -> set[str]:
    """List the modules without others inside, and experts as a whole: each holds tokens of other samples together.

    A module of a stage that has no inputs of its own there is left out, as is what runs on parts of the features.
    """
    names = [name for name, _ in single.named_modules()]
    on_parts = {name for part in parallel for name, each in part.module.named_modules() if runs_on_parts(each)}
    experts = {name for name, module in models().outline(single).modules.items() if module.experts is not None}
    regions = _on_any_rank(names, on_parts) | experts
    inside = tuple(f"{name}." for name in regions)
    leaves = {name for name, module in single.named_modules() if next(module.children(), None) is None}
    chosen = {name for name in leaves if not name.startswith(inside)} | regions
    return chosen & _on_any_rank(names, {name for part in parallel for name in part.names})


def _on_any_rank(names: Iterable[str], own: Container[str]) -> set[str]:
    """Return those of the names, the same list on all ranks, that any rank has among its own."""
    listed = list(names)
    flags = torch.tensor([float(name in own) for name in listed], device=get_platform().devices.current_device())
    _all_reduce(flags, "max")
    return {name for name, flag in zip(listed, flags.tolist(), strict=True) if flag}


def _samples(expected: torch.Tensor, got: torch.Tensor, rows: slice, batch: int) -> torch.Tensor:
    """Return the part of an output for some samples of the batch: samples, or samples times tokens, come first."""
    if got.shape == expected.shape or not expected.ndim or len(expected) % batch:
        return expected
    each = len(expected) // batch
    return expected[rows.start * each : rows.stop * each]


def _tokens_of(expected: torch.Tensor, got: torch.Tensor, places: Sequence[int]) -> torch.Tensor:
    """Return the part of an output for some tokens: those of a dim of their own, or of one with the samples."""
    if got.ndim == expected.ndim > 1 and len(got) == 1 < len(expected) and torch.equal(expected[:1], expected[-1:]):
        expected = expected[:1]  # the same for each sample, as of positions
    different = [dim for dim, (own, whole) in enumerate(zip(got.shape, expected.shape, strict=False)) if own != whole]
    if len(different) != 1 or got.ndim != expected.ndim:
        return expected
    if got.shape[different[0]] == len(places):
        return expected.index_select(different[0], torch.tensor(places, device=expected.device))
    samples = len(got) // len(places) if different == [0] else 0
    return expected.unflatten(0, (samples, -1))[:, places].flatten(0, 1) if samples else expected


@contextlib.contextmanager
def _after_forward(model: nn.Module, names: set[str], seen: Callable[[str, torch.Tensor], None]) -> Iterator[None]:
    """Call `seen` with the name and the first output tensor of each named module after it has run."""

    def hook(name: str) -> Any:
        def run(module: nn.Module, inputs: Any, output: Any) -> None:
            tensor = output[0] if isinstance(output, tuple) else output
            if isinstance(tensor, torch.Tensor):
                seen(name, tensor)

        return run

    named = [(name, module) for name, module in model.named_modules() if name in names]
    handles = [module.register_forward_hook(hook(name)) for name, module in named]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _largest(tensor: torch.Tensor | None) -> float:
    return 0.0 if tensor is None or not tensor.numel() else tensor.detach().abs().max().item()


def _difference(got: torch.Tensor, expected: torch.Tensor, *, floor: float = 0.0) -> float:
    """Largest difference over the largest expected element, or `floor` where that is more.

    Infinite where shapes differ or a number isn't one.
    """
    if got.shape != expected.shape:
        return math.inf
    if not expected.numel():
        return 0.0
    scale = max(expected.abs().max().item(), floor) or 1.0
    largest = (got - expected.to(got.device)).abs().max().item() / scale
    return largest if math.isfinite(largest) else math.inf


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor().detach() if isinstance(tensor, DTensor) else tensor.detach()


def _all_reduce(tensor: torch.Tensor, op: str) -> None:
    platform = get_platform()
    group = platform.groups.new_group(range(platform.groups.size()))
    platform.collectives.all_reduce(tensor, op, group=group)


def _batch(plan: ParallelPlan, model: nn.Module, step: int) -> _Batch:
    """Draw the same random samples on every rank."""
    vocabulary = getattr(getattr(model, "config", None), "vocab_size", 256)
    generator = torch.Generator().manual_seed(plan.run.seed * 1_000_003 + step)
    shape = (plan.data.batch_size, plan.data.sequence_length)
    device = get_platform().devices.current_device()
    whole = _Batch(torch.randint(vocabulary, shape, generator=generator, dtype=torch.int64).to(device))
    chance = torch.rand(shape, generator=generator)
    starts = torch.zeros(shape, dtype=torch.bool)
    starts[:, 0] = True
    if plan.data.packing:
        starts |= torch.rand(shape, generator=generator) < 0.2
        places = torch.arange(shape[1]).expand(shape)
        whole.positions = (places - torch.where(starts, places, 0).cummax(1).values).to(device)
    # Of the first sample a fourth is left out, of the last a half.
    left_out = starts | (chance < torch.linspace(0.25, 0.5, shape[0])[:, None])
    left_out[:, 1] &= starts[:, 1]
    labels = whole.tokens.masked_fill(left_out.to(device), IGNORED)
    if gives_items(model, {**loss_inputs(plan, whole.tokens[:1]), "labels": labels[:1]}):
        whole.labels = labels
    return whole


def _in_float64(plan: ParallelPlan) -> ParallelPlan:
    plan = dataclasses.replace(plan, compile=CompileSection())
    fsdp = dataclasses.replace(plan.fsdp, param_dtype=None, reduce_dtype=None)
    run = dataclasses.replace(plan.run, dtype="float64")
    memory = MemorySection()
    double = dataclasses.replace(plan, fsdp=fsdp, run=run, memory=memory)
    if plan.memory.budget is not None:
        # The budget is for the plan's own dtype: activations in float64 get as many times more.
        outline = models().outline(build_model(plan, device="meta"))
        activations = memory_left(plan, outline) * BYTES["float64"] // BYTES[plan.fsdp.param_dtype or plan.run.dtype]
        memory = dataclasses.replace(plan.memory, budget=f"{activations + training_bytes(double, outline)} B")
    return dataclasses.replace(double, memory=memory)
