# /// program
# ranks = 2
# tolerance = 1e-6  # some of its layers compute in float32
# ///
"""T5: an encoder and a decoder that share an embedding."""

import torch
from transformers import T5Config, T5ForConditionalGeneration

from hp_fsdp import fully_shard
from hp_platform import destroy_process_group, init_process_group
from reporting import ALONE, own, report_step, report_weights

torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
config = T5Config(vocab_size=64, dropout_rate=0.0, decoder_start_token_id=0, **sizes)
model = T5ForConditionalGeneration(config)
if not ALONE:
    init_process_group()
    for block in (*model.encoder.block, *model.decoder.block):
        fully_shard(block)
    fully_shard(model)

optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

for _ in range(4):
    questions, answers = own(torch.randint(64, (8, 10))), own(torch.randint(64, (8, 6)))
    loss = model(input_ids=questions, labels=answers).loss

    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    report_step(loss.detach())

report_weights(model)
if not ALONE:
    destroy_process_group()
