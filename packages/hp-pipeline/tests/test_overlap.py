"""A forward and a backward that run together: the order of what they do, their bits, and errors."""

from __future__ import annotations

import contextlib
import gc
import re
import threading
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from hp_pipeline import (
    CommComputeOverlap,
    HookRole,
    Meeting,
    MetaStepType,
    Pipeline,
    PipelineError,
    PipelineSchedule,
    PipelineStage,
    ScheduleDualPipeV,
    ScheduleInterleaved1F1B,
    check,
    placed,
    schedules,
)
from hp_platform.frames import current_frame, frame
from hp_testing import device_type, on_ranks

pytestmark = [
    pytest.mark.framework("torch"),
    pytest.mark.not_on("torch-npu-sim", reason="stages of the host's memory, from which hccl does not send"),
]

WIDTH = 4


class Computing(nn.Module):
    """A linear layer that writes down when it computes, and when its backward does."""

    def __init__(self, name, log):
        super().__init__()
        self.name, self.log, self.weight = name, log, nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return Noted.apply(torch.tanh(self.weight(x)), self.name, self.log)


class Noted(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, name, log):
        ctx.noted = name, log
        log.append("F " + name)
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        name, log = ctx.noted
        log.append("B " + name)
        return gradient, None, None


class Exchange:
    """An all-to-all that begins in one place and is waited for in another, forwards and backwards."""

    def __init__(self, name, group, log):
        self.name, self.group, self.log = name, group, log

    def launch(self, x, note):
        out = torch.empty_like(x)
        self.log.append(f"{note} begin {self.name}")
        work = dist.all_to_all_single(out, x.contiguous(), group=self.group, async_op=True)
        return out, work

    def wait(self, work, note):
        work.wait()
        self.log.append(f"{note} end {self.name}")


class Begin(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, exchange, handles):
        ctx.noted = exchange, handles
        out, handles["F"] = exchange.launch(x, "F")
        return out

    @staticmethod
    def backward(ctx, gradient):
        exchange, handles = ctx.noted
        out, handles["B"] = exchange.launch(gradient, "B")
        return out, None, None


class End(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, exchange, handles, ahead):
        ctx.noted = exchange, handles, ahead
        if ahead:
            exchange.wait(handles.pop("F"), "F")
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        exchange, handles, ahead = ctx.noted
        if not ahead:
            exchange.wait(handles.pop("B"), "B")
        return gradient, None, None, None


class Whole(torch.autograd.Function):
    """An exchange that returns when it is done."""

    @staticmethod
    def forward(ctx, x, exchange, handles):
        ctx.exchange = exchange
        out, work = exchange.launch(x, "F")
        exchange.wait(work, "F")
        return out

    @staticmethod
    def backward(ctx, gradient):
        out, work = ctx.exchange.launch(gradient, "B")
        ctx.exchange.wait(work, "B")
        return out, None, None


class Layer(nn.Module):
    """Attention and experts, which here are linear, with exchanges before and after the experts."""

    def __init__(self, name, group, log, overlap=None, last=False, stage=0, again=False, blocking=False):
        super().__init__()
        self.attention, self.experts = Computing("attention" + name, log), Computing("experts" + name, log)
        self.drop, self.again = nn.Dropout(0.25), again
        self.exchanges = [Exchange(kind + name, group, log) for kind in ("dispatch", "combine")]
        self.blocking, function = blocking, Whole.apply if blocking else Begin.apply
        self.functions = [function, function]
        if overlap is not None:
            self.functions = [
                overlap.wrap_dispatch(function, stage=stage, blocking=blocking),
                overlap.wrap_combine(function, last, stage=stage, blocking=blocking),
            ]

    def forward(self, x):
        return checkpoint(self.compute, x, use_reentrant=False) if self.again else self.compute(x)

    def compute(self, x):
        x = x + self.drop(self.attention(x))
        return x + self.exchange(1, self.experts(self.exchange(0, x)))

    def exchange(self, which, x):
        exchange, handles = self.exchanges[which], {}
        if self.blocking:
            return self.functions[which](x, exchange, handles)
        x = End.apply(x, exchange, handles, False)
        x = self.functions[which](x, exchange, handles)
        return End.apply(x, exchange, handles, True)


def groups_of(ranks):
    """Make groups of a pipeline of two, and of two ranks that exchange tokens, of this rank."""
    groups = [dist.new_group(list(own)) for own in ranks]
    return next(group for own, group in zip(ranks, groups, strict=True) if dist.get_rank() in own)


def train(kind, overlapped, layers, again=False, count=4, blocking=False, **options):
    """Run one batch; return all gradients and what was done, in order."""
    rank = dist.get_rank()
    pipeline_group, expert_group = groups_of([(0, 2), (1, 3)]), groups_of([(0, 1), (2, 3)])
    log: list[str] = []
    overlap = CommComputeOverlap() if overlapped else None
    placement = placed(kind.shape, 2)
    torch.manual_seed(rank)
    stages = []
    for stage in [stage for stage, place in enumerate(placement) if place == rank // 2]:
        own = [
            Layer(f" {stage}.{each}", expert_group, log, overlap, each == layers - 1, stage, again, blocking)
            for each in range(layers)
        ]
        module = nn.Sequential(*own, *([Loss()] if stage == 3 else []))
        stages.append(PipelineStage(module.double().to(device_type()), stage, 4))
    schedule = kind(stages, count, group=pipeline_group, overlap=overlap, **options)
    x = torch.randn(2 * count, WIDTH, dtype=torch.float64, device=device_type(), requires_grad=True)
    log.clear()
    losses = schedule.run(x)
    gradients = [parameter.grad for stage in stages for parameter in stage.submodule.parameters()]
    return [*losses, *gradients], log, schedule


class Loss(nn.Module):
    def forward(self, x):
        return x.square().mean()


@on_ranks(4)
@pytest.mark.parametrize(("kind", "layers", "again", "options"), [
    (ScheduleInterleaved1F1B, 1, False, {"overlap_b_f": True}),
    (ScheduleInterleaved1F1B, 2, True, {"overlap_b_f": True, "enable_dxdw_split": True}),
    (ScheduleDualPipeV, 2, False, {}),
    (ScheduleDualPipeV, 1, True, {"blocking": True}),
])  # fmt: skip
def test_pairs_have_the_bits_of_one_after_the_other(kind, layers, again, options):
    apart, _, schedule = train(kind, False, layers, again, **options)
    together, log, _ = train(kind, True, layers, again, **options)
    pairs = [step for step in schedule.exec_order[dist.get_rank() // 2] if step.sub_steps]
    assert pairs and all(torch.equal(one, other) for one, other in zip(apart, together, strict=True))
    if not options.get("blocking"):  # the same order in each run
        assert train(kind, True, layers, again, **options)[1] == log


@on_ranks(4)
def test_each_computes_while_the_other_exchanges():
    _, log, schedule = train(ScheduleInterleaved1F1B, True, 1, overlap_b_f=True)
    place = next(n for n, step in enumerate(log) if step.startswith("B begin"))  # the first backward is in a pair
    back, ahead = (step.sub_steps for step in schedule.exec_order[dist.get_rank() // 2] if step.sub_steps).__next__()
    b, f = f"{back.stage_index}.0", f"{ahead.stage_index}.0"
    assert log[place : place + 12] == [
        f"B begin combine {b}",
        f"F attention {f}",
        f"F begin dispatch {f}",
        f"B end combine {b}",
        f"B experts {b}",
        f"B begin dispatch {b}",
        f"F end dispatch {f}",
        f"F experts {f}",
        f"F begin combine {f}",
        f"B end dispatch {b}",
        f"B attention {b}",
        f"F end combine {f}",
    ]


def meet(overlap, ahead, back):
    """Return a forward and a backward of so many layers, that only meet."""
    x = torch.ones(1, requires_grad=True)
    made = []
    for stage, layers in ((0, ahead), (1, back)):
        own = []
        for layer in range(layers):
            own.append(overlap.wrap_dispatch(lambda x: x + 1, stage=stage))
            own.append(overlap.wrap_combine(lambda x: x * 2, layer == layers - 1, stage=stage))
        made.append(own)

    def run(functions, x):
        for each in functions:
            x = each(x)
        return x

    out = run(made[1], x)
    return lambda: run(made[0], torch.ones(1, requires_grad=True)), out.backward


@pytest.mark.parametrize(("ahead", "back"), [(1, 3), (3, 1), (2, 2)])
def test_one_with_more_layers_goes_on_alone(ahead, back):
    overlap = CommComputeOverlap()
    forward, backward = meet(overlap, ahead, back)
    result, _ = overlap.run(forward, backward)
    assert result.item() == {1: 4, 2: 10, 3: 22}[ahead]


def test_one_that_raises_frees_the_other():
    overlap = CommComputeOverlap()
    forward, backward = meet(overlap, 2, 2)

    def failing():
        raise ArithmeticError("too hot")

    for pair in ((failing, backward), (forward, failing)):
        with pytest.raises(ArithmeticError, match="too hot"):
            overlap.run(*pair)
        assert not overlap.coordinator.enabled
    overlap.coordinator.enable()
    with pytest.raises(RuntimeError, match="a pair runs already"):
        overlap.coordinator.enable()
    overlap.coordinator.disable()
    result, _ = overlap.run(*meet(overlap, 2, 2))
    assert result.item() == 10


def test_both_in_one_role_is_an_error_in_both():
    coordinator = CommComputeOverlap().coordinator
    coordinator.enable()
    errors = []

    def backward():
        try:
            coordinator.rendezvous("there", HookRole.COMM)
        except RuntimeError as error:
            errors.append(str(error))

    thread = threading.Thread(target=backward)
    thread.start()
    with pytest.raises(
        RuntimeError, match="at meeting 0 the forward at here and the backward at there both are to comm"
    ):
        coordinator.rendezvous("here", HookRole.COMM)
    thread.join()
    assert errors == ["HookCoordinator: at meeting 0 the backward at there and the forward at here both are to comm."]


def test_what_surrounds_a_thread_is_passed_on():
    overlap = CommComputeOverlap()
    _, backward = meet(overlap, 1, 1)
    seen = []

    def look():
        seen.append((torch.is_autocast_enabled("cpu"), torch.is_grad_enabled(), current_frame(), threading.get_ident()))

    with torch.autocast("cpu", torch.bfloat16), torch.no_grad(), frame(outputs=overlap) as own:  # type: ignore[arg-type]
        overlap.run(lambda: None, look)
    assert seen[0][:3] == (True, False, own) and seen[0][3] != threading.get_ident()
    with torch.utils._python_dispatch.TorchDispatchMode():
        overlap.run(lambda: None, look)
    assert seen[1][3] == threading.get_ident()
    backward()


class Activation:
    """Stands for what a frame holds."""


@pytest.mark.parametrize("side", [0, 1])
def test_what_raised_is_let_go_without_the_garbage_collector(side):
    overlap = CommComputeOverlap()
    overlap.wrap_combine(abs, True)
    alive = []

    def fail():
        activation = Activation()
        alive.append(weakref.ref(activation))
        raise ArithmeticError("too hot")

    pair = [lambda: None, lambda: None]
    pair[side] = fail
    gc.disable()
    try:
        with contextlib.suppress(ArithmeticError):
            overlap.run(*pair)
        assert [each() for each in alive] == [None]
    finally:
        gc.enable()


def test_check_proves_the_meetings():
    pipeline = Pipeline(placed("loop", 2), 4)
    order = schedules.interleaved(pipeline, overlap=True)
    overlap = CommComputeOverlap()
    for stage in range(4):
        overlap.wrap_dispatch(abs, stage=stage)
        overlap.wrap_combine(abs, True, stage=stage)
    check(order, pipeline, meetings=overlap.meetings)
    assert overlap.meetings[1] == [
        Meeting("before dispatch 0 of stage 1", HookRole.COMM),
        Meeting("after dispatch 0 of stage 1", HookRole.COMPUTE),
        Meeting("before combine 0 of stage 1", HookRole.COMM),
    ]
    wrong = CommComputeOverlap()
    for stage in range(4):
        wrong.wrap_dispatch(abs, stage=stage)
        wrong.wrap_combine(abs, stage=stage)
    text = "rank 0: at meeting 0 of 2B0+0F3 both begin an exchange: 0F3 at before dispatch 0 of stage 0 and 2B0 at"
    with pytest.raises(ValueError, match=re.escape(text) + r" after.*is_last_layer=True\)\."):
        check(order, pipeline, meetings=wrong.meetings)


@on_ranks(1)
def test_errors_and_custom_functions_of_pairs_in_a_schedule():
    overlap = CommComputeOverlap()
    parts = [nn.Linear(WIDTH, WIDTH).to(device_type()) for _ in range(2)]
    exchanges = [
        (overlap.wrap_dispatch(lambda x: x + 0, stage=n), overlap.wrap_combine(lambda x: x + 0, True, stage=n))
        for n in range(2)
    ]
    failing, pairs = [True], []

    def stage(number):
        def run(x):
            x = exchanges[number][0](x)
            if failing and number == 0 and threading.current_thread() is threading.main_thread() and pairs:
                raise ArithmeticError("too hot")
            x = exchanges[number][1](parts[number](x))
            return x.sum() if number else x

        return run

    order = {0: "0F0 1F0 1B0+0F1 0B0 1F1 1B1 0B1"}
    stages = [PipelineStage(stage(number), number, 2, device=device_type()) for number in range(2)]
    schedule = PipelineSchedule.from_steps(order, stages, overlap=overlap)

    def custom(step, run):
        pairs.append(str(step))
        run()

    schedule.register_custom_function(MetaStepType.OVERLAP_B_F, custom)
    x = torch.randn(2, WIDTH, device=device_type())
    with pytest.raises(PipelineError, match="rank 0 at 0F1: ArithmeticError: too hot"):
        schedule.run(x)
    failing.clear()
    assert len(schedule.run(x)) == 2 and pairs == ["1B0+0F1"] * 2
