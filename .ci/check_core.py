"""Checks the core that an environment's hp-onesided has, by an all-reduce of two ranks, for `nox -s isolation`.

python -I .ci/check_core.py native
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
from pathlib import Path

RANKS = 2


def reduce(rank: int, path: str, core: str) -> None:
    """Reduce on one rank; SystemExit says what is wrong."""
    import torch  # noqa: TID251 - a program of its own
    import torch.distributed as dist  # noqa: TID251

    import hp_onesided
    from hp_platform import get_platform, init_process_group
    from hp_platform.communication.carriers import carrier_of

    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    init_process_group("gloo", store=dist.FileStore(path, RANKS), rank=rank, world_size=RANKS)
    platform, tensor = get_platform(), torch.full((1000,), float(rank))
    group = platform.groups.default_group()
    platform.collectives.all_reduce(tensor, "avg", group=group)
    got = hp_onesided.core_name(), type(carrier_of(group)).__name__, tensor.unique().tolist()
    if got != (core, "SharedMemory", [0.5]):
        raise SystemExit(f"expected the core {core!r} and a mean of 0.5, got {got}")
    dist.destroy_process_group()


def main(core: str) -> None:
    """Start the ranks."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        arguments = str(Path(folder, "store")), core
        ranks = [context.Process(target=reduce, args=(rank, *arguments)) for rank in range(RANKS)]
        for each in ranks:
            each.start()
        for each in ranks:
            each.join()
    if any(each.exitcode for each in ranks):
        raise SystemExit(f"ranks ended with {[each.exitcode for each in ranks]}")
    print(f"hp-onesided: two ranks reduce by the {core} core")


if __name__ == "__main__":
    main(sys.argv[1])
