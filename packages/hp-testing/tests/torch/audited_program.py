"""Programs with and without faults of streams, and what the audit says of each; see `test_stream_audit.py`."""

from __future__ import annotations

import json
import tempfile
from typing import Any

import torch
import torch.distributed as dist

from hp_platform import destroy_process_group, get_platform, init_process_group
from hp_testing.torch.stream_audit import start


def streams() -> tuple[Any, Any]:
    """Get the current stream and another one."""
    return get_platform().devices.device_module().current_stream(), get_platform().devices.stream()


def product(*, waits: bool, records: bool = True, of_part: bool = False) -> torch.Tensor:
    """Multiply on another stream what the current one has written."""
    here, there = streams()
    whole = torch.ones(200, device=get_platform().devices.current_device())
    whole[100:].add_(1)
    if waits:
        there.wait_stream(here)
    with get_platform().devices.device_module().stream(there):
        result = (whole[150:] if of_part else whole) * 2
        result.record_stream(here)
    if records:
        whole.record_stream(there)
    return result


def halves() -> None:
    """Use two halves of one buffer on two streams."""
    here, there = streams()
    whole = torch.ones(200, device=get_platform().devices.current_device())
    there.wait_stream(here)
    whole[:100].add_(1)
    with get_platform().devices.device_module().stream(there):
        whole[100:].add_(1)
    here.wait_stream(there)


def reduced(*, waits: bool) -> torch.Tensor:
    """Use what a collective reduces, which another stream issues."""
    here, there = streams()
    tensor = torch.ones(8, device=get_platform().devices.current_device())
    there.wait_stream(here)
    with get_platform().devices.device_module().stream(there):
        work = dist.all_reduce(tensor, async_op=True)
    if waits:
        work.wait()
    result = tensor + 1
    work.wait()
    return result


def main() -> None:
    audit = start(get_platform().devices.kind)
    with tempfile.TemporaryDirectory() as folder:
        init_process_group(init_method=f"file://{folder}/store", rank=0, world_size=1)
        said = {}
        for name, program in {
            "ordered": lambda: product(waits=True),
            "not ordered": lambda: product(waits=False),
            "a part, not ordered": lambda: product(waits=False, of_part=True),
            "freed at once": lambda: product(waits=True, records=False),
            "halves": halves,
            "a collective, waited for": lambda: reduced(waits=True),
            "a collective, used before": lambda: reduced(waits=False),
        }.items():
            program()
            said[name] = audit.take_faults()
        destroy_process_group()
    print(json.dumps(said))


if __name__ == "__main__":
    main()
