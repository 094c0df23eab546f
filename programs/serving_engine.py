# /// program
# ranks = 2
# tolerance = 1e-6  # the model's norms compute in float32
# ///
"""A serving engine in a process of its own, whose weights two training ranks refresh over shared memory each step."""

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from transformers import LlamaConfig, LlamaForCausalLM

from hp_checkpoint import stream_weights
from hp_fsdp import fully_shard
from hp_platform import destroy_process_group, init_process_group
from reporting import ALONE, RANK, own, report_step, report_weights

SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
PROMPT = torch.arange(16).view(2, 8)


def build():
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(num_attention_heads=4, num_key_value_heads=2, **SIZES))


def serve(weights, pipe):
    """Answer with the logits of prompts, until one is None; the weights are this model's own memory."""
    model = build().eval()
    model.load_state_dict(weights, assign=True)
    while (prompt := pipe.recv()) is not None:
        with torch.no_grad():
            pipe.send(model(input_ids=prompt).logits.numpy())


def main():
    model = build()
    engine = None
    if not ALONE:
        init_process_group()
        if RANK == 0:
            weights = {name: value.clone().share_memory_() for name, value in model.state_dict().items()}
            context = mp.get_context("spawn")
            pipe, far = context.Pipe()
            engine = context.Process(target=serve, args=(weights, far), daemon=True)
            engine.start()
        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    torch.manual_seed(1)
    for _ in range(4):
        tokens = own(torch.randint(64, (4, 8)))
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        report_step(loss.detach())
        if ALONE:
            with torch.no_grad():
                logits = model(input_ids=PROMPT).logits
        else:
            logits = torch.empty(2, 8, 64)
            for name, tensor in stream_weights(model, bucket="16KiB", ranks=0):
                weights[name].copy_(tensor)
                del tensor
            if RANK == 0:
                pipe.send(PROMPT)
                logits = torch.from_numpy(pipe.recv())
            dist.broadcast(logits, 0)
        report_step((logits * torch.linspace(-1, 1, logits.numel()).view_as(logits)).sum())
    report_weights(model)
    if engine is not None:
        pipe.send(None)
        engine.join()
    if not ALONE:
        destroy_process_group()


if __name__ == "__main__":
    main()
