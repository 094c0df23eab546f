"""Threads of all packages: docs/threads.md lists them, and none keeps tensors, groups or models alive."""

from __future__ import annotations

import gc
import re
import sys
import threading
import types
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hp_checkpoint.saving import background as saves
from hp_pipeline import CommComputeOverlap
from hp_platform import get_platform, watch_hangs
from hp_platform.extend import beating
from hp_testing import on_ranks
from hyper_parallel.reports.sinks import Background

pytestmark = [
    pytest.mark.framework("torch"),
    pytest.mark.not_on("torch-npu-sim", "torch-cuda", "torch-npu", reason="nothing of the device in it"),
]
ROOT = Path(__file__).resolve().parents[3]
STARTS = re.compile(r"\b(?:Thread|ThreadPoolExecutor)\(")
HEAVY = (torch.Tensor, torch.nn.Module, dist.ProcessGroup)


def test_the_table_of_threads_is_complete():
    listed = re.findall(r"^\| `[^`]+` \| `([^`]+)` \|", (ROOT / "docs/threads.md").read_text(), re.MULTILINE)
    starting = []
    for path in sorted(ROOT.glob("packages/*/src/**/*.py")):
        if "hp_testing" not in path.parts:
            starting += [path.as_posix().rpartition("/src/")[2]] * len(STARTS.findall(path.read_text()))
    assert sorted(listed) == sorted(starting)


def reached(thread: threading.Thread) -> Iterator[Any]:
    """List what a thread keeps alive by its frames, its target and what these hold; of functions only closures."""
    frame: types.FrameType | None = sys._current_frames().get(thread.ident or 0)
    to_do: list[Any] = [thread]
    while frame is not None:
        to_do += frame.f_locals.values()
        frame = frame.f_back
    seen: dict[int, Any] = {}
    while to_do:
        each = to_do.pop()
        if id(each) in seen or isinstance(each, types.ModuleType | type | types.FrameType | types.CodeType):
            continue
        seen[id(each)] = each
        yield each
        if isinstance(each, types.FunctionType):
            to_do += [each.__closure__, each.__defaults__, each.__kwdefaults__]
        else:
            to_do += gc.get_referents(each)


def heavy() -> dict[str, list[type]]:
    """Return the tensors, models and groups that each thread but the main one keeps alive, by the thread's name."""
    threads = [each for each in threading.enumerate() if each is not threading.main_thread()]
    return {each.name: [type(item) for item in reached(each) if isinstance(item, HEAVY)] for each in threads}


@on_ranks(2)
def test_no_thread_keeps_a_tensor_a_model_or_a_group_alive(tmp_path, monkeypatch):
    may_end, entered = threading.Event(), threading.Event()
    committed = saves._committed

    def late(*args: Any) -> Any:
        entered.set()
        may_end.wait()
        return committed(*args)

    monkeypatch.setattr(saves, "_committed", late)
    model, overlap = torch.nn.Linear(3, 3), CommComputeOverlap()
    overlap.wrap_dispatch(lambda x: x)

    with watch_hangs(1000), beating():
        overlap.run(lambda: model(torch.ones(3)), model(torch.ones(3)).sum().backward)
        sink = Background("of numbers", lambda: types.SimpleNamespace(write=lambda *_: None, close=lambda: None))  # type: ignore[arg-type]
        sink.write(1, {"loss": 1.0})
        get_platform().collectives.all_reduce(torch.ones(2), group=get_platform().groups.default_group())
        state = {"model": model.state_dict()}
        saved: Future[Any] = saves.async_save(state, checkpoint_id=tmp_path / "saved").persist_completion
        entered.wait()
        try:
            kept = heavy()
        finally:
            may_end.set()
            saved.result()
            sink.close()
    names = {"hp_platform peers", "hp_platform hangs", "hp_platform beats", "hp-pipeline-backward_0"}
    assert {*names, "sink of numbers", "hp-checkpoint async_save"} <= kept.keys()
    assert not any(kept.values()), kept
