"""A training loop on PyTorch's FSDP2, as its tutorials write it: what `bench_loops.py` compares a plan with."""

import json
import sys
import time

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from transformers import LlamaConfig, LlamaForCausalLM


class Bytes(Dataset):
    def __init__(self, path, length):
        with open(path, "rb") as file:
            self.data = torch.frombuffer(bytearray(file.read()), dtype=torch.uint8)
        self.length = length

    def __len__(self):
        return len(self.data) // self.length

    def __getitem__(self, index):
        return self.data[index * self.length : (index + 1) * self.length].long()


def main():
    text, settings, out = sys.argv[1], json.loads(sys.argv[2]), sys.argv[3]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**settings["model"]))
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
    data = Bytes(text, settings["sequence_length"])
    sampler = DistributedSampler(data, seed=0)
    batch = settings["batch_size"] // dist.get_world_size()
    loader = DataLoader(data, batch_size=batch, sampler=sampler, drop_last=True)
    batches, lines = iter(loader), []
    for step in range(1, settings["steps"] + 1):
        begun = time.perf_counter()
        tokens = next(batches)
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach() / dist.get_world_size()
        dist.all_reduce(mean)
        mean, norm = mean.item(), norm.item()
        lines.append({"step": step, "loss": mean, "norm": norm, "seconds": time.perf_counter() - begun})
    if dist.get_rank() == 0:
        with open(out, "w") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)
    dist.barrier()
    dist.destroy_process_group()


main()
