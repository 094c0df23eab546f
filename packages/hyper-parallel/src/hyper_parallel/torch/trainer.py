"""Training a torch model, with numbers of all ranks and profiles, and saving the full model for transformers."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

from hp_checkpoint.extend import Adapter, has_safetensors
from hp_moe import get_placement_state, rebalance, register_experts, report_drops, set_placement_state
from hp_pipeline.torch.extend import count_operations
from hp_plan import Origin, ParallelPlan, apply, build_optimizer, build_schedule
from hp_plan.extend import multiple_of_first, saved_name
from hp_plan.torch.extend import (
    Capture,
    Hunt,
    Replay,
    Replicas,
    adapter_texts,
    backward_loss,
    begin,
    build_objective,
    clip_gradients,
    evaluate,
    evaluating,
    finish,
    no_progress_bars,
)
from hp_platform import get_platform
from hyper_parallel.data import IGNORED, Rows
from hyper_parallel.data.tokenization.tokenized import tokenizer_of
from hyper_parallel.data.tokenization.tokens import Bytes
from hyper_parallel.training.evaluating import first_prompt, most_tokens


class Trainer:
    """A plan's model under the plan, its optimizer and schedule.

    Args:
        plan: the plan to train.
        weights: False where a copy is going to set them.

    Attributes:
        model: under the plan.
        optimizer: of its parameters.
        schedule: of the optimizer's learning rate.
        name: of its class.
        size: number of elements of its parameters.
        trained: how many of them are trained.
        adapter: what a checkpoint has of the model, if not all.
        operations: of the model; None of those that aren't causal language models of transformers, or are trained with
            an objective that calls them otherwise.
        measures: names of what is measured of a step beside its loss.
        measured: a mean of this rank's samples of the last step for each of them; None without names.
        capture: what is read of the model; None of a run that is not monitored.
        replay: reads the bits of what is computed; None where nothing is computed again.
        replicas: compares copies of weights and states; None where they aren't compared.
    """

    def __init__(self, plan: ParallelPlan, *, weights: bool = True) -> None:
        self._plan = plan
        self._device = get_platform().devices.current_device()
        if plan.run.deterministic:
            _choose_deterministic_kernels(self._device)
        model = begin(plan, weights=weights)
        self.name = type(model).__name__
        self.size = sum(parameter.numel() for parameter in model.parameters())
        self.trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
        self.adapter = Adapter(saved_name, adapter_texts(model)) if plan.adapter.kind is not None else None
        causal = (
            plan.model.of_transformers
            and not plan.objective.is_own
            and self.name.endswith(("ForCausalLM", "LMHeadModel"))
        )
        self.operations = count_operations(model, model.config) if causal else None
        self.model = finish(apply(model, plan), plan, weights=weights)
        del model  # with pp it has other ranks' stages
        self._objective = build_objective(plan)
        self.measures = () if self._objective is None else self._objective.names
        self.measured: torch.Tensor | None = None
        self.optimizer = build_optimizer(plan, self.model.named_parameters())
        self.schedule = build_schedule(plan, self.optimizer)
        self._multiple = multiple_of_first(self.optimizer, self.model.named_parameters(), plan)
        self._steps = 0
        self.capture = Capture(plan, self.model) if plan.monitor.every else None
        self.replay = Replay(plan, self.model) if plan.sdc.replay_every else None
        self.replicas = Replicas(self.model, self.optimizer) if plan.sdc.replicas else None

    @property
    def lr(self) -> float:
        """Learning rate of the next step, of parameters that have no multiple of it."""
        return self.optimizer.param_groups[0]["lr"] / self._multiple

    def gradients(self, rows: Rows) -> tuple[torch.Tensor | None, torch.Tensor]:
        """Compute the gradients of a step, without waiting for them.

        Args:
            rows: this rank's samples, or those of the part of the batch that `replay` says: gradients of another part
                are not read by `[monitor]`, and not clipped.

        Returns:
            The loss of these samples, None on ranks without the model's last stage, and the norm of all gradients
            before clipping.
        """
        part = None if self.replay is None else self.replay.part
        capture = self.capture if part is None else None
        with contextlib.ExitStack() as stack:
            begins = [stack.enter_context(each.watching()) for each in (capture, self.replay) if each is not None]
            loss = self._backward(rows, _each([each for each in begins if each is not None]))
        if capture is not None:
            capture.gradients()
        return loss, clip_gradients(self.model, self._plan.run.grad_clip if part is None else None)

    def _backward(self, rows: Rows, begins: Callable[[int], None] | None) -> torch.Tensor | None:
        self.optimizer.zero_grad()
        part = None if self.replay is None else self.replay.part
        options: dict[str, Any] = {"objective": self._objective, "measured": self._measure, "begins": begins}
        return backward_loss(self._plan, self.model, **self._inputs(rows), **options, part=part)

    def origin(self, rows: Rows) -> Origin | None:
        """Compute gradients once more, and return where this rank's first NaN or infinity was born.

        Args:
            rows: this rank's samples.
        """
        hunt = Hunt(self._plan, self.model)
        with hunt.hooked() as begins:
            self._backward(rows, begins)
        return hunt.origin

    def _measure(self, means: torch.Tensor) -> None:
        self.measured = means

    def update(self) -> None:
        """Take the optimizer's step, the schedule's, and look at the experts."""
        self.optimizer.step()
        if self.capture is not None:
            self.capture.updated(self.optimizer)
        self.schedule.step()
        self._steps += 1
        if self._steps % self._plan.experts.every == 0:
            self._look_at_experts()

    def experts(self, *, loads: bool = True) -> dict[str, Any] | None:
        """Return which replicas experts have, and the tokens that they got since these were chosen.

        Args:
            loads: with these tokens, which takes all ranks.
        """
        return get_placement_state(self.model, loads=loads) if self._plan.experts.slots else None

    def go_on(self, step: int, experts: Mapping[str, Any] | None) -> None:
        """Go on after a step whose weights and states have been loaded.

        Args:
            step: that was the last.
            experts: what `experts` returned then; None of a run without replicas.
        """
        self._steps = step
        if experts is not None and self._plan.experts.slots:
            set_placement_state(self.model, experts)

    def _look_at_experts(self) -> None:
        """Choose the replicas of hot experts anew, and warn of the tokens that full ones have dropped."""
        if self._plan.experts.slots:
            rebalance(self.model)
        if self._plan.experts.capacity is not None:
            report_drops(self.model)

    def evaluate(self, rows: Rows) -> tuple[list[float], float]:
        """Compute a loss without training on it, and what is measured beside it.

        Args:
            rows: this rank's samples.

        Returns:
            The loss and a number for each of `measures`, whose means over ranks are the batch's, and the mean number of
            labels, or pairs, of a rank.
        """
        inputs = self._inputs(rows, some=bool((rows.labels[:, 1:] == IGNORED).any()))
        values, items = evaluate(self._plan, self.model, **inputs, objective=self._objective)
        return values.tolist(), items.item()

    def write(self, prompt: Sequence[int], count: int) -> list[int]:
        """Let the model go on with tokens; every rank calls it, and gets the same.

        Args:
            prompt: the tokens to go on with.
            count: how many to write.
        """
        with evaluating(self.model), torch.no_grad(), self._own_numbers():
            tokens = torch.tensor([list(prompt)], device=self._device)
            # As many on each rank, whatever they are: one that ended before the others would leave them waiting.
            length = {"min_new_tokens": count, "max_new_tokens": count}
            written = self.model.generate(tokens, attention_mask=torch.ones_like(tokens), **length, **_SAMPLED)
        return written[0, len(prompt) :].tolist()

    @contextlib.contextmanager
    def _own_numbers(self) -> Iterator[None]:
        """Draw random numbers that are the same on each rank, and go on with the others afterwards."""
        accelerator = {} if self._device.type == "cpu" else {"device_type": self._device.type}
        with torch.random.fork_rng([self._device.index] if accelerator else [], **accelerator):
            torch.manual_seed(self._plan.run.seed)
            yield

    def _inputs(self, rows: Rows, *, some: bool = False) -> dict[str, Any]:
        """Return what the loss takes, with labels where some of them are left out."""
        data = self._plan.data
        inputs = {"tokens": rows.tokens}
        if some or data.packing or data.format != "text":
            inputs["labels"] = rows.labels
        if data.packing:
            inputs["positions"] = rows.positions
        return {name: self._moved(array) for name, array in inputs.items()}

    def _moved(self, array: NDArray[np.int64]) -> torch.Tensor:
        """Copy to the device, without waiting for the work that is queued there."""
        tensor = torch.from_numpy(array)
        return tensor if self._device.type == "cpu" else tensor.pin_memory().to(self._device, non_blocking=True)


def _choose_deterministic_kernels(device: Any) -> None:
    """Compute the same bits in each run, on any number of ranks of this machine; for the rest of the process."""
    if device.type == "cpu":
        torch.set_num_threads(1)  # how a sum is split depends on their number, and that on the number of ranks
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read before the first product
    torch.use_deterministic_algorithms(True)


def _each(functions: Sequence[Callable[[int], None]]) -> Callable[[int], None] | None:
    """Return a function that calls all of these; None of none."""

    def call(number: int) -> None:
        for function in functions:
            function(number)

    return call if functions else None


_SAMPLED = {"do_sample": True, "temperature": 0.7, "pad_token_id": 0}  # how tokens are drawn


def write_sample(plan: ParallelPlan, folder: Path, *, tokens: int = 96) -> str | None:
    """Load a checkpoint with `from_pretrained` and let it continue a prompt; None if it is not such model.

    Args:
        plan: the plan; its seed decides the sampled tokens.
        folder: of the checkpoint.
        tokens: number of tokens to write.
    """
    if plan.adapter.kind is not None:  # whose model is in a folder of its own
        readable = plan.model.folder_has_weights and (folder / "adapter_model.safetensors").is_file()
    else:
        readable = plan.model.of_transformers and has_safetensors(folder)  # not files of each rank
    if not readable or plan.objective.kind == "reward":
        return None
    from transformers import AutoModelForCausalLM

    experts = plan.model.overrides.get("experts_implementation")
    if plan.mesh.ep > 1 or experts is not None:
        # A checkpoint does not say; what the library takes by itself has no float64.
        options = {"experts_implementation": experts or register_experts()}
    else:
        options = {}
    with no_progress_bars():
        model: Any = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, **options)
    tokenizer = tokenizer_of(plan) or Bytes()
    encoded = first_prompt(plan, tokenizer)
    prompt = torch.tensor([encoded])
    count = most_tokens(model.config, encoded, tokens)
    if count < 1:
        return None
    with torch.random.fork_rng([]):
        torch.default_generator.manual_seed(plan.run.seed)
        written = model.eval().generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=count,
            **_SAMPLED,
        )
    whole = [token for token in written[0].tolist() if token < tokenizer.vocabulary]
    if plan.data.format == "text":
        return tokenizer.decode(whole)
    return tokenizer.decode(encoded, special=True) + tokenizer.decode(whole[len(encoded) :])


class Numbers:
    """Numbers of every rank, on their way: no work that comes after them is waited for.

    Args:
        own: this rank's, tensors of one element or plain numbers; every rank has as many.
    """

    def __init__(self, own: Sequence[Any]) -> None:
        platform = get_platform()
        self._done: Any = None
        self._size = platform.groups.size()
        if platform.devices.kind == "cpu":
            self._host = torch.from_numpy(np.fromiter(map(float, own), np.float64, len(own)))
            if self._size > 1:
                self._host = self._everyone(self._host)
            return
        plain = [0.0 if isinstance(number, torch.Tensor) else number for number in own]
        row = torch.tensor(plain, dtype=torch.float64, pin_memory=True)
        row = row.to(platform.devices.current_device(), non_blocking=True)
        for place, number in enumerate(own):
            if isinstance(number, torch.Tensor):
                row[place] = number.detach()
        everyone = self._everyone(row) if self._size > 1 else row
        self._host = torch.empty(everyone.shape, dtype=everyone.dtype, pin_memory=True)
        self._host.copy_(everyone, non_blocking=True)
        self._done = platform.devices.device_module().Event()
        self._done.record()

    def _everyone(self, row: torch.Tensor) -> torch.Tensor:
        everyone, platform = row.new_empty(self._size * len(row)), get_platform()
        platform.collectives.all_gather(everyone, row, group=platform.groups.default_group())
        return everyone

    def read(self) -> NDArray[np.float64]:
        """Wait for the numbers; return them as [ranks, numbers]."""
        if self._done is not None:
            self._done.synchronize()
        return self._host.numpy().reshape(self._size, -1)

    def ready(self) -> bool:
        """Tell whether the numbers are there."""
        return self._done is None or self._done.query()


class Profiler:
    """A profile that is under way: operators, kernels, and forwards by the names of their modules.

    Args:
        model: under training.
        path: of the trace that `close` writes.
    """

    def __init__(self, model: Any, path: Path) -> None:
        self._path = path
        self._ranges: list[record_function] = []
        stages = [model] if isinstance(model, nn.Module) else list(model.stages.values())
        named = [(name, module) for stage in stages for name, module in stage.named_modules() if name]
        self._hooks = [hook for name, module in named for hook in self._hooked(name, module)]
        activities = [ProfilerActivity.CPU]
        if get_platform().devices.kind == "cuda":
            activities.append(ProfilerActivity.CUDA)
        self._profile = profile(activities=activities)
        self._profile.start()

    def _hooked(self, name: str, module: nn.Module) -> list[Any]:
        def enter(*_: Any) -> None:
            self._ranges.append(record_function(f"hp.forward({name})"))
            self._ranges[-1].__enter__()

        def leave(*_: Any) -> None:
            self._ranges.pop().__exit__(None, None, None)

        first = module.register_forward_pre_hook(enter, prepend=True)
        return [first, module.register_forward_hook(leave, always_call=True)]

    def named(self, name: str) -> AbstractContextManager[Any]:
        """Name what runs inside."""
        return record_function(name)

    def close(self) -> None:
        """Stop, and write the trace."""
        for hook in self._hooks:
            hook.remove()
        get_platform().devices.synchronize()
        self._profile.stop()
        part = self._path.with_name(f".{self._path.name}")
        self._profile.export_chrome_trace(str(part))
        os.replace(part, self._path)
