"""A training loop on accelerate with FSDP2, as its guide writes it; on CPUs accelerate replicates the model instead."""

import json
import sys
import time

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from torch.utils.data import DataLoader, Dataset
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
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["LlamaDecoderLayer"]
    )
    accelerator = Accelerator(fsdp_plugin=plugin, cpu=True)
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**settings["model"]))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
    data = Bytes(text, settings["sequence_length"])
    batch = settings["batch_size"] // accelerator.num_processes
    loader = DataLoader(data, batch_size=batch, shuffle=True, drop_last=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    batches, lines = iter(loader), []
    for step in range(1, settings["steps"] + 1):
        begun = time.perf_counter()
        tokens = next(batches)
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        accelerator.backward(loss)
        norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        mean = accelerator.reduce(loss.detach(), "mean").item()
        norm = float(norm)
        lines.append({"step": step, "loss": mean, "norm": norm, "seconds": time.perf_counter() - begun})
    if accelerator.is_main_process:
        with open(out, "w") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)
    accelerator.end_training()


main()
