# /// program
# ranks = 2
# ///
"""A GAN: two sharded models with an optimizer each, trained in turns."""

import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits as cross_entropy

from hp_fsdp import fully_shard
from hp_platform import destroy_process_group, init_process_group
from reporting import ALONE, own, report_step, report_weights

torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
generator = nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 4))
critic = nn.Sequential(nn.Linear(4, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))
if not ALONE:
    init_process_group()
    fully_shard(generator)
    fully_shard(critic)
of_generator = torch.optim.Adam(generator.parameters(), lr=1e-2, betas=(0.5, 0.9))
of_critic = torch.optim.Adam(critic.parameters(), lr=1e-2, betas=(0.5, 0.9))

for _ in range(5):
    real, noise = own(torch.randn(8, 4)), own(torch.randn(8, 3))
    made = generator(noise)

    of_critic.zero_grad()
    right, wrong = critic(real), critic(made.detach())
    loss = cross_entropy(right, torch.ones_like(right)) + cross_entropy(wrong, torch.zeros_like(wrong))
    loss.backward()
    of_critic.step()

    of_generator.zero_grad()
    judged = critic(made)
    gain = cross_entropy(judged, torch.ones_like(judged))
    gain.backward()
    of_generator.step()
    report_step(loss.detach() + gain.detach())

report_weights(generator, critic)
if not ALONE:
    destroy_process_group()
