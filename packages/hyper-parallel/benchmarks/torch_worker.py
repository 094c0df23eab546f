"""Run the tests of one file of torch, each in a process of its own with a time limit; a line of JSON a test.

Ranks are forked where torch spawns them, and processes where torch starts threads, so that a test takes a second.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
import unittest
import warnings
from pathlib import Path
from typing import Any, TextIO

sys.path.insert(0, str(Path(__file__).parent))
import torch_swap


def prepare() -> None:
    """Change torch's test classes: forked ranks of gloo on CPUs, none skipped for a lack of GPUs."""
    import torch
    import torch.distributed as dist
    from torch.testing._internal import common_distributed as common

    torch.set_num_threads(1)
    fork = multiprocessing.get_context("fork")
    common.MultiProcessTestCase._spawn_processes = lambda self: self._start_processes(fork.Process)
    run_test = common.MultiProcessTestCase.run_test

    def armed_run(self: Any, name: str, pipe: Any) -> None:
        torch_swap.AbsentType.armed = True
        run_test(self, name, pipe)

    common.MultiProcessTestCase.run_test = armed_run
    common.skip_if_lt_x_gpu = lambda count, *args, **kwargs: unittest.skipIf(
        count > torch_swap.GPUS, f"{count} devices"
    )
    common.requires_nccl = common.requires_gloo = lambda *args, **kwargs: lambda function: function
    common.skip_if_no_gpu = lambda function: function
    common.at_least_x_gpu = lambda count: True
    importlib.import_module("torch.testing._internal.common_utils").get_cycles_per_ms = lambda: 1.0
    barrier = dist.barrier
    dist.barrier = lambda *args, device_ids=None, **kwargs: barrier(*args, **kwargs)
    common.MultiThreadedTestCase._spawn_threads = fork_ranks
    common.MultiThreadedTestCase._join_threads = classmethod(join_ranks)
    functional = importlib.import_module("torch.distributed._functional_collectives")
    resolve = functional._resolve_group
    functional._resolve_group = lambda group, tag="": resolve(group_of(group), tag)
    fsdp = __import__("torch.testing._internal.common_fsdp", fromlist=["_"])
    fsdp.DEVICE_COUNT = torch_swap.GPUS


def group_of(group: Any) -> Any:
    """Return the process group of a mesh, or of a mesh and an axis, which functional collectives take as well."""
    mesh, *axis = group if isinstance(group, tuple) else (group,)
    return mesh.get_group(*axis) if type(mesh).__name__ == "DeviceMesh" else group


def fork_ranks(self: Any) -> None:
    """Start each rank of a threaded test as a process."""
    import torch.distributed as dist

    fork = multiprocessing.get_context("fork")
    file = tempfile.mktemp()
    name = self._current_test_name
    cls, size, self.__class__.failures = self.__class__, self.world_size, fork.Queue()

    def run(rank: int) -> None:
        test = cls(name)
        test.rank = rank
        try:
            dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=size)
            test.perThreadSetUp()
            torch_swap.AbsentType.armed = True
            getattr(test, name)()
            torch_swap.AbsentType.armed = False
            test.perThreadTearDown()
            dist.barrier()
            dist.destroy_process_group()
            cls.failures.put(None)
        except unittest.SkipTest as skip:
            cls.failures.put(f"skip:{skip}")
        except BaseException:
            cls.failures.put(f"Process {rank} exited with exception:\n{traceback.format_exc()}")

    for rank in range(size):
        process = fork.Process(target=run, args=(rank,))
        process.start()
        self.threads.append(process)


def join_ranks(cls: Any, processes: list[Any], fn: Any) -> None:
    """Wait until every rank has passed, or the first has failed."""
    failure = None
    for _ in processes:
        failure = cls.failures.get()
        if failure is not None:
            break
    if failure is not None:
        time.sleep(0.5)
        for process in processes:
            process.kill()
    for process in processes:
        process.join()
    if failure is not None and failure.startswith("skip:"):
        raise unittest.SkipTest(failure[5:])
    if failure is not None:
        raise RuntimeError(failure)


def run_one(test: unittest.TestCase, file: str) -> None:
    """Run a test in this process, and write its outcome."""
    from torch.testing._internal.common_distributed import MultiProcessTestCase, MultiThreadedTestCase

    if not isinstance(test, MultiProcessTestCase | MultiThreadedTestCase):
        torch_swap.AbsentType.armed = True
    result = unittest.TestResult()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        test.run(result)
    wrong = result.failures + result.errors
    if wrong:
        outcome = ("failed", wrong[0][1])
    elif result.skipped:
        outcome = ("skipped", result.skipped[0][1])
    elif result.expectedFailures:
        outcome = ("passed", f"expected failure: {result.expectedFailures[0][1]}")
    else:
        outcome = ("passed", "unexpected success" if result.unexpectedSuccesses else "")
    Path(file).write_text(json.dumps(outcome))


def in_process(test: unittest.TestCase, limit: float, folder: str) -> tuple[str, str, float]:
    """Run a test in a forked process group; return its outcome, its text and the seconds."""
    out, log = f"{folder}/outcome", f"{folder}/log"
    Path(out).unlink(missing_ok=True)
    begun = time.monotonic()
    child = os.fork()
    if child == 0:
        os.setpgid(0, 0)
        with open(log, "wb") as opened:
            os.dup2(opened.fileno(), 1)
            os.dup2(opened.fileno(), 2)
        faulthandler.register(signal.SIGUSR1, all_threads=False, chain=False)
        try:
            run_one(test, out)
        except BaseException:
            Path(out).write_text(json.dumps(("failed", traceback.format_exc())))
        os._exit(0)
    with contextlib.suppress(OSError):
        os.setpgid(child, child)
    ended = False
    while not ended and time.monotonic() - begun < limit:
        ended = os.waitpid(child, os.WNOHANG)[0] == child
        time.sleep(0.02)
    if not ended:
        os.killpg(child, signal.SIGUSR1)
        time.sleep(0.5)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    if not ended:
        os.waitpid(child, 0)
    seconds = time.monotonic() - begun
    told = Path(log).read_text(errors="replace")[-6000:]
    if not ended:
        return "timeout", told, seconds
    if not Path(out).exists():
        return "crashed", told, seconds
    outcome, text = json.loads(Path(out).read_text())
    if outcome == "failed" and "exited with" not in text and "Traceback" not in text[20:]:
        text += f"\n{told}"
    return outcome, text, seconds


def tests_of(suite: Any) -> list[unittest.TestCase]:
    """Return the tests of a suite of suites."""
    if isinstance(suite, unittest.TestCase):
        return [suite]
    return [test for each in suite for test in tests_of(each)]


def preload() -> None:
    """Import what every test needs and no file rewrites, once, before the runs are forked."""
    os.environ.update(OMP_NUM_THREADS="1", PYTORCH_PRINT_REPRO_ON_FAILURE="0")
    for name in ("torch.testing._internal.common_distributed", "torch.distributed.tensor", "torch.distributed.fsdp"):
        importlib.import_module(name)
    for names in torch_swap.AREAS.values():
        for name in names:
            importlib.import_module(name)


def run_file(path: Path, library: str, limit: float, every: int, only: list[str] | None, lines: TextIO) -> None:
    """Run a file's tests, and write a line of JSON a test.

    Args:
        path: the file.
        library: ``"hp"``, ``"uncounted"`` (any number of collectives is right) or ``"torch"``.
        limit: seconds a test.
        every: every how many tests one is run.
        only: the names of the tests, None for all.
        lines: where the outcomes go.
    """
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os.dup2(1, 2)
    sys.path.insert(0, str(path.parent))
    sys.argv = sys.argv[:1]

    def tell(test: str, outcome: str, text: str, seconds: float) -> None:
        row = {"test": test, "outcome": outcome, "text": text[-6000:], "seconds": round(seconds, 1)}
        lines.write(json.dumps(row) + "\n")

    try:
        torch_swap.install({path.stem: str(path)}, swap=library != "torch", counted=library != "uncounted")
        prepare()
        module = __import__(path.stem)
    except BaseException:
        tell("", "not imported", traceback.format_exc(), 0.0)
        return
    tests = tests_of(unittest.defaultTestLoader.loadTestsFromModule(module))
    names = [test.id().partition(".")[2] for test in tests]
    chosen = [each for each in zip(names, tests, strict=True) if only is None or each[0] in only]
    with tempfile.TemporaryDirectory(prefix="torch-tests-") as folder:
        for name, test in chosen[::every]:
            if "WithLocalTensor" in name:  # ranks that torch simulates within one process
                tell(name, "skipped", "LocalTensor", 0.0)
            else:
                tell(name, *in_process(test, limit, folder))
