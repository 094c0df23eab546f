"""The whole state of a model in stages, on rank 0."""

from __future__ import annotations

import pickle
from typing import Any

import torch

from hp_dtensor import DTensor
from hp_fsdp import get_model_state_dict
from hp_pipeline import PipelinedModel
from hp_platform import get_platform, get_process_group_ranks

__all__ = ["gather_stages"]


def gather_stages(model: PipelinedModel) -> dict[str, torch.Tensor]:
    """Gather the states of all stages on rank 0, on the host; other ranks hold one whole tensor at a time.

    Every rank calls it. The ranks of a stage make each of its tensors whole; of these, the one that is in rank 0's
    pipeline sends it.

    Args:
        model: this rank's stages.

    Returns:
        The state by the whole model's names; empty on other ranks.
    """
    groups, collectives = get_platform().groups, get_platform().collectives
    group, own = model.schedule.group, get_model_state_dict(model)
    rank, with_rank0 = groups.rank(group), 0 in get_process_group_ranks(group)
    headers = [(name, tuple(value.shape), value.dtype) for name, value in own.items()]
    device = get_platform().devices.current_device()
    state: dict[str, torch.Tensor] = {}
    seen: set[str] = set()
    for source, listed in enumerate(_gather_bytes(pickle.dumps(headers), group, device)):
        for name, shape, dtype in pickle.loads(listed):
            if name in seen:
                continue  # a buffer that several stages have
            seen.add(name)
            tensor: Any = None
            if source == rank:
                tensor = own[name].full_tensor() if isinstance(own[name], DTensor) else own[name]
                tensor = tensor.detach().to(device).contiguous()
            if not with_rank0:
                continue
            if source == rank != 0:
                collectives.send(tensor, 0, group=group)
            elif rank == 0:
                if source:
                    tensor = torch.empty(shape, dtype=dtype, device=device)
                    collectives.recv(tensor, source, group=group)
                state[name] = tensor.cpu()
    return state


def _gather_bytes(data: bytes, group: Any, device: Any) -> list[bytes]:
    """Return each rank's bytes."""
    groups, collectives = get_platform().groups, get_platform().collectives
    ranks = groups.size(group)
    sizes = torch.empty(ranks, dtype=torch.int64, device=device)
    collectives.all_gather(sizes, torch.tensor([len(data)], device=device), group=group)
    most = int(sizes.max())
    padded = torch.frombuffer(bytearray(data.ljust(most, b"\0")), dtype=torch.uint8).to(device)
    everyone = torch.empty(ranks * most, dtype=torch.uint8, device=device)
    collectives.all_gather(everyone, padded, group=group)
    rows = everyone.view(ranks, most).cpu()
    return [bytes(row[:size].tolist()) for row, size in zip(rows, sizes.tolist(), strict=True)]
