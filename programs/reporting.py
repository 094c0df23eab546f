"""What the programs of this folder report, and which rows of a batch are this rank's; `run.py` reads the reports.

A program that is started alone, without torchrun or msrun, is the truth for the same program on ranks. With the
collector off, a tensor in a cycle of references stays alive, so live bytes that grow from step to step are a fault.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from pathlib import Path

ALONE = "TORCHELASTIC_RUN_ID" not in os.environ and "MS_ROLE" not in os.environ
RANK = int(os.environ.get("RANK") or os.environ.get("RANK_ID") or 0)
RANKS = int(os.environ.get("WORLD_SIZE") or os.environ.get("MS_WORKER_NUM") or 1)

_folder = os.environ.get("PROGRAM_REPORTS")  # where run.py wants them; a program that is run by hand prints
_hold = os.environ.get("PROGRAM_HOLD", "").split(",")  # rank,step: who waits there until run.py has sent its signal
_steps = _reported = _least = 0

gc.disable()


def own(batch):
    """Return this rank's rows of a batch; all of them, where the program runs alone."""
    rows = len(batch) // RANKS
    return batch[RANK * rows : (RANK + 1) * rows]


def report_step(loss, step: int | None = None) -> None:
    """Report a step's loss and the bytes that live tensors have; steps count from 1."""
    global _steps
    _steps = _steps + 1 if step is None else step
    value = float(loss.asnumpy() if hasattr(loss, "asnumpy") else loss)
    line = {"step": _steps, "loss": value, "bytes": settled_bytes()}
    if _folder is None:
        print(f"rank {RANK}: {line}", flush=True)
        return
    with open(Path(_folder) / f"rank-{RANK}.jsonl", "a") as file:
        file.write(json.dumps(line) + "\n")
    while _hold == [str(RANK), str(_steps)] and not (Path(_folder) / "sent").exists():
        time.sleep(0.1)


def report_weights(*models) -> None:
    """Report all parameters, whole; every rank calls it."""
    import numpy

    weights = {}
    for place, model in enumerate(models):
        if hasattr(model, "get_parameters"):  # a Cell of MindSpore
            named = ((each.name, each) for each in model.get_parameters())
        else:
            named = model.named_parameters()
        for name, value in named:
            value = value.full_tensor() if hasattr(value, "full_tensor") else value
            array = value.asnumpy() if hasattr(value, "asnumpy") else value.detach().numpy()
            weights[f"{place}.{name}"] = array
    if _folder is not None:
        numpy.savez(Path(_folder) / f"weights-{RANK}.npz", **weights)


def settled_bytes() -> int:
    """Count them; where there are more than before, wait: a backend's threads hold what they sent a little longer."""
    global _reported, _least
    _reported += 1
    count, began = live_bytes(), time.monotonic()
    patience = {1: 0.0, 2: 0.2}.get(_reported, 10.0)
    while count > _least and time.monotonic() < began + patience:
        time.sleep(0.01)
        count = min(count, live_bytes())
    if _reported > 1:
        _least = min(count, _least or count)
    return count


def live_bytes() -> int:
    """Count the bytes of all tensors that are alive, each storage once."""
    if "torch" in sys.modules:
        import torch

        tensors = (each for each in gc.get_objects() if issubclass(type(each), torch.Tensor))
        storages = {each._cdata: each for each in map(torch.Tensor.untyped_storage, tensors)}
        return sum(each.nbytes() for each in storages.values())
    if "mindspore" in sys.modules:
        import mindspore

        tensors = [each for each in gc.get_objects() if issubclass(type(each), mindspore.Tensor)]
        return sum({each.data_ptr(): each.nbytes for each in tensors}.values())
    return 0
