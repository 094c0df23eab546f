# /// program
# ranks = 2
# tolerance = 1e-6  # some of its layers compute in float32
# ///
"""A vision transformer of transformers that classifies images."""

import torch
from transformers import ViTConfig, ViTForImageClassification

from hp_fsdp import fully_shard
from hp_platform import destroy_process_group, init_process_group
from reporting import ALONE, own, report_step, report_weights

torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
model = ViTForImageClassification(ViTConfig(image_size=16, patch_size=4, num_labels=5, **sizes))
if not ALONE:
    init_process_group()
    for module in [each for each in model.modules() if type(each).__name__ == "ViTLayer"]:
        fully_shard(module)
    fully_shard(model)

optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

for _ in range(4):
    images, classes = own(torch.randn(8, 3, 16, 16)), own(torch.randint(5, (8,)))
    loss = model(pixel_values=images, labels=classes).loss

    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    report_step(loss.detach())

report_weights(model)
if not ALONE:
    destroy_process_group()
