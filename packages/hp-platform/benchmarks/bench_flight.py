"""Cost of a flight recorder's notes of one collective.

    python packages/hp-platform/benchmarks/bench_flight.py

The best of many short rounds, on one thread: what the notes themselves cost, without what else a machine does.
"""

from __future__ import annotations

import tempfile
import timeit
from pathlib import Path
from typing import Any

import torch.distributed as dist

import hp_platform
from hp_platform import get_platform
from hp_platform.failures.flight import FlightRecorder


class _Done:
    def wait(self) -> None:
        pass


def main() -> None:
    hp_platform.init_process_group(backend="gloo", store=dist.HashStore(), rank=0, world_size=1)
    group: Any = get_platform().groups.default_group()
    with tempfile.TemporaryDirectory() as folder:
        recorder, work = FlightRecorder(Path(folder), 0), _Done()

        def waited_for() -> None:
            recorder.begin("all_reduce", 64, group)
            recorder.end()

        def pending() -> None:
            entry = recorder.begin("all_reduce", 64, group)
            recorder.pending(work, entry).wait()

        for name, run in (("waited for at once", waited_for), ("with async_op", pending)):
            seconds = min(timeit.repeat(run, number=2000, repeat=300)) / 2000
            print(f"{name:20} {1e6 * seconds:.2f} us")
        recorder.close()
    hp_platform.destroy_process_group()


if __name__ == "__main__":
    main()
