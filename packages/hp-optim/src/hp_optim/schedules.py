"""Learning rates as a pure function of the step."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable
from dataclasses import dataclass

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
