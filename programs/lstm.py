# /// program
# ranks = 2
# ///
"""A language model of an LSTM whose embedding is tied to its head."""

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from hp_fsdp import fully_shard
from hp_platform import destroy_process_group, init_process_group
from reporting import ALONE, own, report_step, report_weights

torch.set_default_dtype(torch.float64)
torch.manual_seed(0)


class Lstm(nn.Module):
    """Predicts the next token."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(32, 16), nn.Linear(16, 32, bias=False)
        self.lstm = nn.LSTM(16, 16, num_layers=2, batch_first=True)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        return self.head(self.lstm(self.embed(tokens))[0])


model = Lstm()
if not ALONE:
    init_process_group()
    fully_shard(model.lstm)
    fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

for _ in range(4):
    tokens = own(torch.randint(32, (4, 9)))
    loss = cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    optimizer.zero_grad()
    report_step(loss.detach())

report_weights(model)
if not ALONE:
    destroy_process_group()
