"""How jobs of two ranks end on a busy machine: each process's exit code, by what it does and how it ends.

    python packages/hyper-parallel/benchmarks/soak_ends.py [jobs] [busy processes]

The ranks are forked from this process, which has imported the packages, and end as a script does: with Python's whole
finalization, and with the groups, threads and tensors that they have at that time. Their other threads run at the
lowest priority by then: a thread that meets the finalization once in a hundred ends meets it in most.
"""

from __future__ import annotations

import itertools
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist

import hp_platform
from hp_platform import get_platform

_LIMIT = 300.0  # seconds that a rank may take


def _matmul() -> None:
    product = torch.ones(64, 64) @ torch.ones(64, 64)
    get_platform().collectives.all_reduce(product, group=get_platform().groups.default_group())
    assert product[0, 0].item() == 128


def _unused_groups() -> None:
    groups = get_platform().groups
    groups.new_group([groups.rank()])
    groups.second_group([0, 1])
    _matmul()


def _again() -> None:
    _matmul()
    hp_platform.destroy_process_group()
    _join(1)
    _matmul()


def _step() -> None:
    from hp_fsdp import fully_shard

    model = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4))
    fully_shard(model)
    model(torch.ones(8, 32)).sum().backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 0.1 * parameter.grad


def _returns(rank: int) -> None:
    pass


def _destroys(rank: int) -> None:
    hp_platform.destroy_process_group()


def _exits(rank: int) -> NoReturn:
    sys.exit(3)


def _destroys_and_exits(rank: int) -> NoReturn:
    hp_platform.destroy_process_group()
    sys.exit(3)


def _one_raises(rank: int) -> None:
    if rank == 1:
        raise ValueError("of rank 1")


def _one_raises_while_the_other_waits(rank: int) -> None:
    if rank == 1:
        raise ValueError("of rank 1")
    get_platform().collectives.barrier()


def _ends_at_once(rank: int) -> NoReturn:
    os._exit(4)


WORK: dict[str, Callable[[], None]] = {
    "matmul and all_reduce": _matmul,
    "unused groups": _unused_groups,
    "destroyed and joined again": _again,
    "a step of fully_shard": _step,
}
ENDS: dict[str, tuple[Callable[[int], None], tuple[int, int]]] = {
    "returns": (_returns, (0, 0)),
    "destroys": (_destroys, (0, 0)),
    "sys.exit(3)": (_exits, (3, 3)),
    "destroys, sys.exit(3)": (_destroys_and_exits, (3, 3)),
    "rank 1 raises": (_one_raises, (0, 1)),
    "rank 1 raises, rank 0 waits": (_one_raises_while_the_other_waits, (1, 1)),
    "os._exit(4)": (_ends_at_once, (4, 4)),
}


def _join(number: int) -> None:
    """Meet the other rank at a store that rank 0 serves."""
    rank, path = int(os.environ["RANK"]), Path(os.environ["MEET"]) / f"port-{number}"
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, 2, is_master=True, wait_for_workers=False)
        path.with_suffix(".new").write_text(str(store.port), encoding="ascii")
        path.with_suffix(".new").rename(path)
    else:
        while not path.exists():
            time.sleep(0.002)
        port = int(path.read_text(encoding="ascii"))
        store = dist.TCPStore("127.0.0.1", port, 2, is_master=False, wait_for_workers=False)
    hp_platform.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(minutes=4))


def _delay_threads() -> None:
    """Let the other threads of this process run last, so that they are late for its end (on Linux)."""
    for number in map(int, os.listdir("/proc/self/task")):
        if number != os.getpid():
            os.setpriority(os.PRIO_PROCESS, number, 19)


def _script(rank: int, folder: str, work: str, end: str) -> None:
    """Do what a user's script does; the process ends after it."""
    os.environ.update(RANK=str(rank), MEET=folder, GLOO_SOCKET_IFNAME="lo")
    torch.set_num_threads(1)
    _join(0)
    WORK[work]()
    _delay_threads()
    ENDS[end][0](rank)


def _fork(output: int, *arguments: object) -> int | None:
    """Start a rank; return its process id, None in the rank itself, whose script has ended without an exception."""
    sys.stdout.flush()
    process = os.fork()
    if process:
        return process
    os.dup2(output, 1)
    os.dup2(output, 2)
    _script(*arguments)  # type: ignore[arg-type]
    return None


def _exit_code(process: int, until: float) -> int | str:
    while time.monotonic() < until:
        ended, status = os.waitpid(process, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)
    return "hangs"


def _spinning(number: int) -> list[subprocess.Popen[bytes]]:
    """Keep the machine's processors busy, until this process ends."""
    spin = f"import os\nwhile os.getppid() == {os.getpid()}: sum(range(100_000))"
    return [subprocess.Popen([sys.executable, "-c", spin]) for _ in range(number)]


def run(jobs: int, output: int) -> Counter[tuple[str, str, str]] | None:
    """Run jobs, all variations in turn; count how they ended. None in a rank, which is to end now.

    Args:
        jobs: how many.
        output: a file descriptor for what the ranks write.
    """
    counts: Counter[tuple[str, str, str]] = Counter()
    assert math.gcd(len(WORK), len(ENDS)) == 1, "taken in turn, they meet in all pairs"
    for work, end in itertools.islice(zip(itertools.cycle(WORK), itertools.cycle(ENDS)), jobs):
        folder, processes = tempfile.mkdtemp(), []
        for rank in range(2):
            process = _fork(output, rank, folder, work, end)
            if process is None:
                return None
            processes.append(process)
        until = time.monotonic() + _LIMIT
        codes = tuple(_exit_code(process, until) for process in processes)
        shutil.rmtree(folder)
        counts[work, end, "as expected" if codes == ENDS[end][1] else f"exit codes {codes}"] += 1
    return counts


def main(jobs: int = 200, busy: int = 8) -> None:
    """Run the jobs and print how they ended; without contexts, which the ranks would leave, too."""
    import hp_fsdp  # noqa: F401 - here once, not in each rank

    get_platform()
    output, beside = tempfile.TemporaryFile(), _spinning(busy)
    counts = run(jobs, output.fileno())
    if counts is None:
        return
    for process in beside:
        process.kill()
        process.wait()
    output.seek(0)
    text = output.read().decode(errors="replace")
    for work, end in itertools.product(WORK, ENDS):
        seen = {result: count for (*case, result), count in sorted(counts.items()) if case == [work, end]}
        print(f"{work:28}{end:30}{', '.join(f'{count} {result}' for result, count in seen.items())}")
    right = sum(count for (*_, result), count in counts.items() if result == "as expected")
    aborts = text.count("terminate called")
    print(f"{right} of {jobs} jobs ended as expected, beside {busy} busy processes; {aborts} aborts")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
