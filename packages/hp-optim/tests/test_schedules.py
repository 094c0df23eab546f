"""Schedules against closed forms, written out here for a thousand steps."""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
import pytest

from hp_optim import get_hyper_lr_scheduler
from hp_optim.lr_schedulers import Schedule

STEPS = np.arange(1001, dtype=np.float64)
DECAYS = {
    "linear": lambda r: 1 - r,
    "cosine": lambda r: 0.5 * (np.cos(np.pi * r) + 1),
    "exponential": lambda r: 2 * np.power(0.5, r) - 1,
    "minus_sqrt": lambda r: 1 - np.sqrt(r),
}


def table(schedule: Schedule) -> np.ndarray:
    return np.array([schedule(step) for step in range(1001)])


def expected(start: int, end: int, style: str, warmup: int, lr: float, low: float, first: float) -> np.ndarray:
    """A decay from step ``start`` to step ``end``, after a warmup."""
    ratio = np.clip((STEPS - start) / (end - start), 0, 1)
    decayed = low + DECAYS[style](ratio) * (lr - low)
    return np.where(STEPS < warmup, first + (lr - first) * STEPS / max(warmup, 1), decayed)


@pytest.mark.parametrize("style", ["linear", "cosine"])
@pytest.mark.parametrize(("warmup", "ratio"), [(0, 1.0), (100, 1.0), (37, 0.8)])
def test_decays(style: str, warmup: int, ratio: float):
    options: dict[str, Any] = {"lr": 3e-3, "lr_min": 1e-5, "lr_start": 1e-6}
    schedule = Schedule(total_steps=1000, warmup_steps=warmup, decay_style=style, lr_decay_ratio=ratio, **options)
    truth = expected(warmup, int(1000 * ratio), style, warmup, 3e-3, 1e-5, 1e-6)
    np.testing.assert_allclose(table(schedule), truth, rtol=0, atol=1e-17)
    np.testing.assert_allclose([schedule.factor(s) for s in range(1001)], truth / 3e-3, rtol=0, atol=1e-14)


@pytest.mark.parametrize("style", DECAYS)
@pytest.mark.parametrize(("warmup", "last"), [(0, 1000), (50, 200), (50, 1)])
def test_wsd(style: str, warmup: int, last: int):
    schedule = Schedule(
        total_steps=1000,
        warmup_steps=warmup,
        decay_style="WSD",
        lr=1.0,
        lr_min=0.1,
        wsd_decay_steps=last,
        lr_wsd_decay_style=style,
    )
    np.testing.assert_allclose(table(schedule), expected(1000 - last, 1000, style, warmup, 1.0, 0.1, 0.0), atol=1e-15)
    assert schedule(1000) == pytest.approx(0.1, abs=1e-15)


def test_constant_and_what_follows_the_end():
    constant = Schedule(total_steps=10, warmup_ratio=0.5, decay_style="constant", lr=2.0, lr_min=0.0)
    assert [constant(step) for step in (0, 1, 4, 5, 9, 99)] == [0.0, 0.4, 1.6, 2.0, 2.0, 2.0]
    assert Schedule(total_steps=10, lr=2.0, lr_min=0.5)(11) == 0.5


def test_warmup_ratio_counts_where_there_are_no_warmup_steps():
    assert Schedule(total_steps=200, warmup_ratio=0.1).warmup == 20
    assert Schedule(total_steps=200, warmup_steps=-1, warmup_ratio=0.1).warmup == 20
    assert Schedule(total_steps=200, warmup_steps=5, warmup_ratio=0.1).warmup == 5


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"decay_style": "cosin"}, r"decay_style must be one of 'constant', .*got 'cosin'. Did you mean 'cosine'\?"),
        ({"decay_style": "wsd"}, r"Did you mean 'WSD'\?"),
        ({"decay_style": "polynomial"}, r"got 'polynomial'$"),
        ({"lr_wsd_decay_style": "sqrt"}, r"lr_wsd_decay_style must be one of .*got 'sqrt'"),
        ({"total_steps": 0}, r"total_steps must be at least 1, got 0"),
        ({"lr": -1.0}, r"lr must be positive and finite, got -1.0"),
        ({"lr": math.nan}, r"lr must be positive and finite, got nan"),
        ({"lr_min": 1.0}, r"lr_min must be between 0 and lr = 0.0001, got 1.0"),
        ({"lr_start": 1.0}, r"lr_start must be between 0 and lr = 0.0001, got 1.0"),
        ({"warmup_ratio": 1.5}, r"warmup_ratio must be between 0 and 1, got 1.5"),
        (
            {"warmup_steps": 101, "decay_style": "constant"},
            r"warmup ends at step 101, after the last of 100. Lower warm",
        ),
        ({"warmup_steps": 100}, r"the warmup ends at step 100, the decay at step 100 \(of 100\).* Lower warmup_steps$"),
        ({"warmup_ratio": 1.0}, r"Lower warmup_ratio$"),
        ({"warmup_steps": 60, "lr_decay_ratio": 0.5}, r"Lower warmup_steps or raise lr_decay_ratio$"),
        ({"decay_style": "WSD", "wsd_decay_steps": 101}, r"wsd_decay_steps must be between 1 and 100, .*got 101"),
        ({"decay_style": "WSD", "wsd_decay_steps": 0}, r"wsd_decay_steps must be between 1 and 100, .*got 0"),
    ],
)
def test_options_that_make_no_schedule(options: dict[str, Any], text: str):
    with pytest.raises(ValueError, match=text) as caught:
        Schedule(**{"total_steps": 100, **options})
    mended = {"warmup_steps": 40, "warmup_ratio": 0.4, "total_steps": 200, "lr_decay_ratio": 0.7}
    for verb, name in re.findall(r"(Lower|raise) (\w+)", str(caught.value)):
        assert Schedule(**{"total_steps": 100, **options, name: mended[name]}).warmup > 0, verb
    if named := re.search(r"Did you mean '(\w+)'", str(caught.value)):
        assert Schedule(total_steps=100, decay_style=named[1])(100) == pytest.approx(1e-7)


@pytest.mark.parametrize("name", ["total_steps", "warmup_steps", "wsd_decay_steps"])
@pytest.mark.parametrize("value", [2.5, True, "3", 4.0])
def test_steps_are_integers(name: str, value: Any):
    with pytest.raises(TypeError, match=rf"Schedule: {name} must be an integer, got {value!r}"):
        Schedule(**{"total_steps": 100, "decay_style": "WSD", name: value})


def megatron(step: int, style: str, warmup: int, end: int, anneal: int, shape: str) -> float:
    """OptimizerParamScheduler.get_lr of Megatron-LM by its description; from 1e-6 up to 3e-3, down to 1e-5."""
    top, low, first = 3e-3, 1e-5, 1e-6
    if warmup > 0 and step <= warmup:
        return first + (top - first) * step / warmup
    if style == "constant":
        return top
    if step > end:
        return low
    if style == "WSD":
        start = end - anneal
        return top if step <= start else low + float(DECAYS[shape](np.float64((step - start) / anneal))) * (top - low)
    return low + float(DECAYS[style](np.float64((step - warmup) / (end - warmup)))) * (top - low)


@pytest.mark.parametrize("warmup", [0, 40])
@pytest.mark.parametrize("ratio", [1.0, 0.7])
@pytest.mark.parametrize(
    ("style", "shape"),
    [("constant", "linear"), ("linear", "linear"), ("cosine", "linear"), *(("WSD", s) for s in DECAYS)],
)
def test_megatrons_formulas(style: str, shape: str, warmup: int, ratio: float):
    end = int(1000 * ratio)
    options: dict[str, Any] = {"total_steps": 1000, "lr": 3e-3, "lr_min": 1e-5, "lr_start": 1e-6}
    options |= {"warmup_steps": warmup, "decay_style": style, "lr_decay_ratio": ratio}
    schedule = Schedule(**options, wsd_decay_steps=120, lr_wsd_decay_style=shape)
    expected = [megatron(step, style, warmup, end, 120, shape) for step in range(1001)]
    np.testing.assert_allclose(table(schedule), expected, rtol=1e-13, atol=0)


class Optimizer:
    """Groups, and no more."""

    def __init__(self) -> None:
        self.param_groups = [{"params": [], "lr": 2.0}, {"params": [], "lr": 0.5}]


@pytest.mark.framework("torch")
@pytest.mark.parametrize("style", ["cosine", "WSD"])
@pytest.mark.parametrize("total", [1000, 1500])
def test_a_schedule_goes_on_in_the_middle(style: str, total: int):
    """Saved at step 437 of 1,000, loaded into one of as many steps, and of more."""

    def scheduled(steps: int, **options: Any) -> tuple[Optimizer, Any]:
        optimizer = Optimizer()
        return optimizer, get_hyper_lr_scheduler(optimizer, steps, 50, decay_style=style, lr=1.0, lr_min=0.1, **options)

    _, container = scheduled(1000)
    for _ in range(437):
        container.step()
    optimizer, restored = scheduled(total, override_opt_param_scheduler=total != 1000)
    restored.load_state_dict(container.state_dict())
    truth = Schedule(total_steps=total, warmup_steps=50, decay_style=style, lr=1.0, lr_min=0.1)
    for step in range(437, total + 1):
        assert [group["lr"] for group in optimizer.param_groups] == [2.0 * truth(step), 0.5 * truth(step)]
        restored.step()
