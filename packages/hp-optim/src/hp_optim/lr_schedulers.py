"""get_hyper_lr_scheduler: a schedule for every optimizer, in a container that saves and restores it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any

from hp_optim.chained import ChainedOptimizer
from hp_optim.port import port
from hp_optim.schedules import Schedule

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
        groups = port().groups(optimizer)
        for group in groups:
            group.setdefault(_INITIAL, port().get_lr(group))
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
        groups = port().groups(self.optimizer)
        if len(groups) > len(self.base_lrs):  # groups that were added since
            for group in groups[len(self.base_lrs) :]:
                group.setdefault(_INITIAL, port().get_lr(group))
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
