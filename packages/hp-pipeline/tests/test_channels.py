"""What goes between stages: windows, communicators, memory, and what messages are made of; against one process."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from hp_pipeline import MetaStepType, links
from hp_platform import get_platform
from hp_platform.torch import collectives
from hp_testing import device_type, on_ranks

sys.path.insert(0, str(Path(__file__).parent))  # pytest imports tests by their path
from pipeline_models import Net, batch, reference
from test_running import build, close, compare

pytestmark = [pytest.mark.device, pytest.mark.framework("torch")]


@on_ranks(3)
@pytest.mark.parametrize("window", [0, 1, 5])
def test_receives_ahead_change_no_bit(window):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(links, "WINDOW", window)
        for name, chunks in (("Schedule1F1B", 1), ("ScheduleZBV", 2)):
            compare(name, 4, 3 * chunks, exact=device_type() == "cpu")


@on_ranks(3)
def test_a_communicator_for_each_channel():
    seen = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(links, "_groups", {})
        patch.setattr(collectives, "has_tags", lambda group, device: False)
        greet = links._greet
        patch.setattr(links, "_greet", lambda *args: (seen.append(args[0]), greet(*args)))
        for name, chunks in (("ScheduleGPipe", 1), ("ScheduleInterleaved1F1B", 2), ("ScheduleZBV", 2)):
            compare(name, 4, 3 * chunks, exact=device_type() == "cpu")
    rank = dist.get_rank()
    # GPipe asks for two with each neighbour; a loop of two chunks for two more, and two between its ends; V for none.
    assert len(seen) == len(set(seen)) == {0: 6, 1: 8, 2: 6}[rank]
    for pair in seen:
        assert get_platform().groups.size(pair) == 2


@on_ranks(2)
@pytest.mark.parametrize("name", ["Schedule1F1B", "ScheduleZB1P"])
def test_what_was_taken_is_let_go_before_the_run_ends(name):
    schedule = build(name, 12, Net(2).double().to(device_type()))
    alive = []

    def count(step, run):
        run()
        alive.append(sum(len(channel._sent) for channel in schedule._runner.channels.values()))

    schedule.register_custom_function(MetaStepType.FORWARD, count)
    x, target = batch(12, device_type())
    schedule.run(x, target=target)
    assert len(alive) == 12 and max(alive) <= 2, f"messages that were kept at each forward: {alive}"


@on_ranks(2)
def test_the_next_batch_may_have_another_size():
    net = Net(2).double().to(device_type())
    schedule = build("Schedule1F1B", 2, net)
    for rows in (4, 8, 2, 8):
        net.zero_grad()
        x, target = batch(rows, device_type())
        losses = schedule.run(x, target=target)
        _, expected = reference(2, rows, 2, steps=1)
        for loss, wanted in zip(losses, expected[0], strict=False):
            close(loss, wanted, False)
