"""Learning rates as a pure function of the step, and the schedulers that set them, one for every optimizer."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from hp_optim.chained import ChainedOptimizer
from hp_optim.port import port

_SHAPES: dict[str, Callable[[float], float]] = {
    "linear": lambda r: 1.0 - r,
    "cosine": lambda r: (math.cos(math.pi * r) + 1.0) / 2.0,
    "exponential": lambda r: 2.0 * 0.5**r - 1.0,
    "minus_sqrt": lambda r: 1.0 - math.sqrt(r),
}
DECAY_STYLES = ("constant", "linear", "cosine", "WSD")
WSD_DECAY_STYLES = tuple(_SHAPES)


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """The learning rate at each step: a linear warmup, then a decay from ``lr`` to ``lr_min``.

    The warmup goes from ``lr_start`` to ``lr``, which step ``warmup`` has. The decay ends at step ``decay_end``, and
    ``lr_min`` follows. With r the part of the decay that has passed, "linear" is 1 - r, "cosine" (cos(pi r) + 1) / 2,
    scaled into [``lr_min``, ``lr``]; "constant" stays at ``lr``. "WSD" (warmup, stable, decay) stays at ``lr`` until
    its last ``wsd_decay_steps``, in which it decays as ``lr_wsd_decay_style`` says: also "exponential",
    2 * 0.5**r - 1, and "minus_sqrt", 1 - sqrt(r). These are the schedules of Megatron-LM.

    Example:
        >>> schedule = Schedule(total_steps=100, warmup_steps=10, lr=1.0, lr_min=0.0)
        >>> schedule(5), schedule(10), round(schedule(55), 6), schedule(100)
        (0.5, 1.0, 0.5, 0.0)

    Args:
        total_steps: of the training.
        warmup_steps: length of the warmup.
        warmup_ratio: the same as a part of ``total_steps``; counts only where ``warmup_steps`` is 0 or less.
        decay_style: "constant", "linear", "cosine" or "WSD".
        lr: the largest learning rate.
        lr_min: the last one.
        lr_start: the first one of the warmup.
        lr_decay_ratio: the decay ends at this part of ``total_steps``.
        wsd_decay_steps: of "WSD", how many steps decay. Default: a tenth of ``total_steps``, at least one.
        lr_wsd_decay_style: of "WSD", "linear", "cosine", "exponential" or "minus_sqrt".

    Raises:
        ValueError: a number out of its range, an unknown style, or a warmup that is longer than the training.
        TypeError: steps that are no integers.
    """

    total_steps: int
    warmup_steps: int = 0
    warmup_ratio: float = 0.0
    decay_style: str = "cosine"
    lr: float = 1e-4
    lr_min: float = 1e-7
    lr_start: float = 0.0
    lr_decay_ratio: float = 1.0
    wsd_decay_steps: int | None = None
    lr_wsd_decay_style: str = "exponential"

    def __post_init__(self) -> None:
        _check_style("decay_style", self.decay_style, DECAY_STYLES)
        _check_style("lr_wsd_decay_style", self.lr_wsd_decay_style, WSD_DECAY_STYLES)
        for name in ("warmup_ratio", "lr_decay_ratio"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ValueError(f"Schedule: {name} must be between 0 and 1, got {getattr(self, name)}")
        for name in ("total_steps", "warmup_steps", "wsd_decay_steps"):
            value = getattr(self, name)
            left_out = value is None and name == "wsd_decay_steps"
            if not left_out and (isinstance(value, bool) or not hasattr(value, "__index__")):
                raise TypeError(f"Schedule: {name} must be an integer, got {value!r}")
        if self.total_steps < 1:
            raise ValueError(f"Schedule: total_steps must be at least 1, got {self.total_steps}")
        if not 0.0 < self.lr < math.inf:
            raise ValueError(f"Schedule: lr must be positive and finite, got {self.lr}")
        if not 0.0 <= self.lr_min <= self.lr:
            raise ValueError(f"Schedule: lr_min must be between 0 and lr = {self.lr}, got {self.lr_min}")
        if not 0.0 <= self.lr_start <= self.lr:
            raise ValueError(f"Schedule: lr_start must be between 0 and lr = {self.lr}, got {self.lr_start}")
        if self.warmup > self.total_steps:
            raise ValueError(
                f"Schedule: the warmup ends at step {self.warmup}, after the last of {self.total_steps}. Lower"
                " warmup_steps or raise total_steps"
            )
        if self.decay_style != "constant" and self.warmup >= self.decay_end:
            lower = "warmup_steps" if self.warmup_steps > 0 else "warmup_ratio"
            raise ValueError(
                f"Schedule: the warmup ends at step {self.warmup}, the decay at step {self.decay_end} (of"
                f" {self.total_steps}), and no step is left between them. Lower {lower}"
                + (" or raise lr_decay_ratio" if self.lr_decay_ratio < 1 else "")
            )
        room = self.decay_end - self.warmup
        if self.decay_style == "WSD" and not 1 <= self.anneal_steps <= room:
            raise ValueError(
                f"Schedule: wsd_decay_steps must be between 1 and {room}, the steps between the warmup and the end of"
                f" the decay, got {self.anneal_steps}"
            )

    @property
    def warmup(self) -> int:
        """Number of steps of the warmup."""
        return self.warmup_steps if self.warmup_steps > 0 else int(self.total_steps * self.warmup_ratio)

    @property
    def decay_end(self) -> int:
        """The step at which ``lr_min`` is reached."""
        return int(self.total_steps * self.lr_decay_ratio)

    @property
    def anneal_steps(self) -> int:
        """Number of steps in which "WSD" decays."""
        return self.wsd_decay_steps if self.wsd_decay_steps is not None else max(1, self.total_steps // 10)

    def __call__(self, step: int) -> float:
        """Return the learning rate at a step; the first one is 0."""
        if step < self.warmup:
            return self.lr_start + (self.lr - self.lr_start) * (step / self.warmup)
        if self.decay_style == "constant":
            return self.lr
        if step > self.decay_end:
            return self.lr_min
        start, shape = self.warmup, _SHAPES.get(self.decay_style)
        if shape is None:
            start, shape = self.decay_end - self.anneal_steps, _SHAPES[self.lr_wsd_decay_style]
        ratio = max(step - start, 0) / (self.decay_end - start)
        return self.lr_min + shape(ratio) * (self.lr - self.lr_min)

    def factor(self, step: int) -> float:
        """Return the learning rate at a step as a part of ``lr``."""
        return self(step) / self.lr


def decayed(style: str, ratio: float) -> float:
    """Return what is left of the way from ``lr`` to ``lr_min`` when this part of a decay has passed.

    Args:
        style: "linear", "cosine", "exponential" or "minus_sqrt".
        ratio: from 0 to 1.
    """
    return _SHAPES[style](ratio)


def _check_style(name: str, style: object, styles: tuple[str, ...]) -> None:
    if style in styles:
        return
    near = difflib.get_close_matches(str(style).lower(), [each.lower() for each in styles], n=1)
    hint = f". Did you mean {next(each for each in styles if each.lower() == near[0])!r}?" if near else ""
    raise ValueError(f"Schedule: {name} must be one of {', '.join(map(repr, styles))}, got {style!r}{hint}")


State = dict[str, Any]
_INITIAL = "initial_lr"


class LRScheduler:
    """A schedule of one optimizer: each group's learning rate is its initial one times a factor.

    Args:
        optimizer: whose groups' learning rates are set.
        schedule: gives the factor.

    Attributes:
        optimizer: see above.
        schedule: see above.
        last_epoch: number of calls of `step`.
        base_lrs: the initial learning rates.
    """

    def __init__(self, optimizer: Any, schedule: Schedule) -> None:
        self.optimizer = optimizer
        self.schedule = schedule
        self.last_epoch = 0
        groups = optimizer.param_groups
        for group in groups:
            group.setdefault(_INITIAL, float(group["lr"]))
        self.base_lrs = [float(group[_INITIAL]) for group in groups]
        self._set()

    def step(self) -> None:
        """Go on to the next step's learning rates."""
        self.last_epoch += 1
        self._set()

    def get_last_lr(self) -> list[float]:
        """Return the learning rate of each group."""
        return [base * self.schedule.factor(self.last_epoch) for base in self.base_lrs]

    def _set(self) -> None:
        groups = self.optimizer.param_groups
        if len(groups) > len(self.base_lrs):  # groups that were added since
            for group in groups[len(self.base_lrs) :]:
                group.setdefault(_INITIAL, float(group["lr"]))
                self.base_lrs.append(float(group[_INITIAL]))
        for group, value in zip(groups, self.get_last_lr()):
            port().set_lr(group, value)

    def state_dict(self) -> State:
        """Return the step, the initial learning rates and the schedule's options."""
        return {"last_epoch": self.last_epoch, "base_lrs": list(self.base_lrs), "schedule": asdict(self.schedule)}

    def load_state_dict(self, state_dict: Mapping[str, Any], *, override: bool = False) -> None:
        """Go on at the step that was saved.

        Args:
            state_dict: what `state_dict` gave.
            override: keep this schedule and these initial learning rates where they differ from the saved ones.

        Raises:
            ValueError: the saved schedule is another one and ``override`` is False, or the optimizer has another number
                of groups.
        """
        if not override:
            saved, own = dict(state_dict["schedule"]), asdict(self.schedule)
            different = [f.name for f in fields(Schedule) if saved.get(f.name) != own[f.name]]
            if different:
                told = ", ".join(f"{name} = {saved.get(name)!r} (here {own[name]!r})" for name in different)
                raise ValueError(
                    f"LRScheduler.load_state_dict: the state was saved with another schedule: {told}. Use its options,"
                    " or override_opt_param_scheduler=True to go on with the new ones"
                )
            if len(state_dict["base_lrs"]) != len(self.base_lrs):
                raise ValueError(
                    f"LRScheduler.load_state_dict: the state has {len(state_dict['base_lrs'])} groups, the optimizer"
                    f" {len(self.base_lrs)}. Group the parameters as they were saved"
                )
            self.base_lrs = list(state_dict["base_lrs"])
        self.last_epoch = int(state_dict["last_epoch"])
        self._set()


class LRSchedulersContainer:
    """The schedulers of several optimizers, stepped, saved and restored together.

    Args:
        schedulers: by the optimizers' names.
        override: see `get_hyper_lr_scheduler`.

    Attributes:
        schedulers: by name.
    """

    def __init__(self, schedulers: Mapping[str, LRScheduler], override: bool = False) -> None:
        self.schedulers = dict(schedulers)
        self.override = override

    def step(self) -> None:
        """Go on to the next step's learning rates; call it after the optimizer's step."""
        for scheduler in self.schedulers.values():
            scheduler.step()

    def get_last_lr(self) -> list[float]:
        """Return the learning rate of each group of all optimizers."""
        return [lr for scheduler in self.schedulers.values() for lr in scheduler.get_last_lr()]

    def state_dict(self) -> State:
        """Return the states by the optimizers' names."""
        return {name: scheduler.state_dict() for name, scheduler in self.schedulers.items()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on at the step that was saved.

        Raises:
            ValueError: other optimizers, another schedule (see `LRScheduler.load_state_dict`).
        """
        if set(state_dict) != set(self.schedulers):
            raise ValueError(
                f"LRSchedulersContainer.load_state_dict: the state is of optimizers {sorted(state_dict)}, these are"
                f" {sorted(self.schedulers)}"
            )
        for name, scheduler in self.schedulers.items():
            scheduler.load_state_dict(state_dict[name], override=self.override)


def get_hyper_lr_scheduler(
    optimizer: Any,
    total_steps: int,
    warmup_steps: int = 0,
    warmup_ratio: float = 0.0,
    decay_style: str = "cosine",
    lr: float = 1e-4,
    lr_min: float = 1e-7,
    lr_start: float = 0.0,
    lr_decay_ratio: float = 1.0,
    wsd_decay_steps: int | None = None,
    lr_wsd_decay_style: str = "exponential",
    override_opt_param_scheduler: bool = False,
) -> LRSchedulersContainer:
    """Schedule the learning rates of an optimizer, or of all those of a `ChainedOptimizer`.

    Each group's learning rate is its own initial one times `Schedule.factor`: ``lr``, ``lr_min`` and ``lr_start`` say
    how they relate, so one schedule serves a Muon and an AdamW with different learning rates. A group whose learning
    rate is ``lr`` goes from ``lr_start`` to ``lr`` and down to ``lr_min``.

    Args:
        optimizer: an optimizer or a ChainedOptimizer.
        total_steps: see `Schedule`, as for all up to ``lr_wsd_decay_style``.
        warmup_steps: length of the warmup.
        warmup_ratio: the same as a part of ``total_steps``; counts only where ``warmup_steps`` is 0 or less.
        decay_style: "constant", "linear", "cosine" or "WSD".
        lr: the largest learning rate.
        lr_min: the last one.
        lr_start: the first one of the warmup.
        lr_decay_ratio: the decay ends at this part of ``total_steps``.
        wsd_decay_steps: of "WSD", how many steps decay.
        lr_wsd_decay_style: of "WSD", "linear", "cosine", "exponential" or "minus_sqrt".
        override_opt_param_scheduler: a loaded state gives the step alone; these options stay. Default: a state that was
            saved with other options is refused.

    Returns:
        The container; the optimizers have the learning rates of the first step.

    Raises:
        ValueError, TypeError: see `Schedule`.
    """
    schedule = Schedule(
        total_steps=total_steps,
        warmup_steps=warmup_steps,
        warmup_ratio=warmup_ratio,
        decay_style=decay_style,
        lr=lr,
        lr_min=lr_min,
        lr_start=lr_start,
        lr_decay_ratio=lr_decay_ratio,
        wsd_decay_steps=wsd_decay_steps,
        lr_wsd_decay_style=lr_wsd_decay_style,
    )
    optimizers = optimizer.optimizers if isinstance(optimizer, ChainedOptimizer) else {"optimizer": optimizer}
    return LRSchedulersContainer(
        {name: LRScheduler(each, schedule) for name, each in optimizers.items()}, override_opt_param_scheduler
    )
