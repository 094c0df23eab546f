"""Run the tests of one file of torch, each in a process of its own with a time limit; a line of JSON a test.

Ranks are forked where torch spawns them, and processes where torch starts threads, so that a test takes a second.
"""

from __future__ import annotations

import contextlib
import faulthandler
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
from typing import Any

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
    common.skip_if_lt_x_gpu = lambda *args, **kwargs: lambda function: function
    common.requires_nccl = common.requires_gloo = lambda *args, **kwargs: lambda function: function
    common.skip_if_no_gpu = lambda function: function
    common.at_least_x_gpu = lambda count: True
    barrier = dist.barrier
    dist.barrier = lambda *args, device_ids=None, **kwargs: barrier(*args, **kwargs)
    common.MultiThreadedTestCase._spawn_threads = fork_ranks
    common.MultiThreadedTestCase._join_threads = classmethod(join_ranks)
    fsdp = __import__("torch.testing._internal.common_fsdp", fromlist=["_"])
    fsdp.DEVICE_COUNT = torch_swap.GPUS


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


def main() -> None:
    """Run a file. The arguments: its path, the library, the limit, every how many tests one is run, a file of names."""
    path, library, limit, every = Path(sys.argv[1]), sys.argv[2], float(sys.argv[3]), int(sys.argv[4])
    only = json.loads(Path(sys.argv[5]).read_text())  # None: all tests
    lines = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os.environ.update(OMP_NUM_THREADS="1", PYTORCH_PRINT_REPRO_ON_FAILURE="0")
    sys.path.insert(0, str(path.parent))

    def tell(test: str, outcome: str, text: str, seconds: float) -> None:
        lines.write(json.dumps({"test": test, "outcome": outcome, "text": text[-6000:], "seconds": seconds}) + "\n")

    try:
        torch_swap.install({path.stem: str(path)}, swap=library != "torch", counted=library != "uncounted")
        prepare()
        module = __import__(path.stem)
    except BaseException:
        tell("", "not imported", traceback.format_exc(), 0.0)
        return
    tests = tests_of(unittest.defaultTestLoader.loadTestsFromModule(module))
    lines.write(json.dumps({"count": len(tests)}) + "\n")
    tests = tests[::every] if only is None else [test for test in tests if test.id().partition(".")[2] in only]
    with tempfile.TemporaryDirectory(prefix="torch-tests-") as folder:
        for test in tests:
            name = test.id().partition(".")[2]
            if "WithLocalTensor" in name:
                tell(name, "skipped", "LocalTensor", 0.0)
            else:
                tell(name, *in_process(test, limit, folder))


if __name__ == "__main__":
    main()
