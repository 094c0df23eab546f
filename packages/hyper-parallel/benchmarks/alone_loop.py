"""The loop of `fsdp2_loop.py` on each rank alone: what communication and sharding cost is missing, so no library that
shards is faster. Each rank updates its part of the parameters, as a sharded optimizer does.
"""

import json
import sys
import time

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM


def main():
    text, settings, out = sys.argv[1], json.loads(sys.argv[2]), sys.argv[3]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**settings["model"]))
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters[rank::ranks], lr=1e-3, weight_decay=0.01)
    batch, length = settings["batch_size"] // ranks, settings["sequence_length"]
    with open(text, "rb") as file:
        data = torch.frombuffer(bytearray(file.read()), dtype=torch.uint8)
    rows = data[: len(data) // length * length].view(-1, length)
    lines = []
    for step in range(1, settings["steps"] + 1):
        begun = time.perf_counter()
        tokens = rows[torch.arange(batch) + step * batch * ranks + rank * batch].long()
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(parameters[rank::ranks], 1.0)
        optimizer.step()
        for parameter in parameters:
            parameter.grad = None
        lines.append({"step": step, "loss": loss.item(), "norm": norm.item(), "seconds": time.perf_counter() - begun})
    if rank == 0:
        with open(out, "w") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)
    dist.barrier()
    dist.destroy_process_group()


main()
