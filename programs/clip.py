# /// program
# ranks = 2
# tolerance = 1e-6  # some of its layers compute in float32
# ///
"""CLIP: two encoders and a loss over the pairs that a rank has."""

import torch
from transformers import CLIPConfig, CLIPModel

from hp_fsdp import fully_shard
from hp_platform import destroy_process_group, init_process_group
from reporting import ALONE, own, report_step, report_weights

torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
text = {"vocab_size": 50, "max_position_embeddings": 12, "eos_token_id": 49, **sizes}
config = CLIPConfig(text_config=text, vision_config={"image_size": 16, "patch_size": 8, **sizes}, projection_dim=16)
model = CLIPModel(config)
if not ALONE:
    init_process_group()
    fully_shard(model.text_model)
    fully_shard(model.vision_model)
    fully_shard(model)

optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

for _ in range(4):
    tokens, images = torch.randint(49, (8, 10)), torch.randn(8, 3, 16, 16)
    parts = list(zip(tokens.chunk(2), images.chunk(2), strict=True)) if ALONE else [(own(tokens), own(images))]
    losses = [model(input_ids=ids, pixel_values=pixels, return_loss=True).loss for ids, pixels in parts]
    loss = sum(losses) / len(losses)

    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    report_step(loss.detach())

report_weights(model)
if not ALONE:
    destroy_process_group()
