"""A program whose default group is of the backend "hp_shared"; see `test_backend.py`."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import hp_onesided.torch.backend  # noqa: F401 - registers it


def main(path: str, rank: int) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(path, 2)
    dist.init_process_group("cpu:hp_shared", store=store, rank=rank, world_size=2)
    total = torch.full((2,), rank + 1.0)
    dist.all_reduce(total)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("data",))
    model = DistributedDataParallel(torch.nn.Linear(2, 1), process_group=mesh.get_group("data"))
    model(torch.full((1, 2), float(rank))).sum().backward()
    gradient = model.module.weight.grad
    assert gradient is not None
    dist.barrier()
    print(f"rank {rank}: {total.tolist()} {gradient.std().item()}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
