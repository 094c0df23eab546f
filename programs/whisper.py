# /// program
# ranks = 2
# tolerance = 1e-6  # some of its layers compute in float32
# ///
"""Whisper: convolutions, an encoder of sound and a decoder of text."""

import torch
from transformers import WhisperConfig, WhisperForConditionalGeneration

from hp_fsdp import fully_shard
from hp_platform import destroy_process_group, init_process_group
from reporting import ALONE, own, report_step, report_weights

torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
config = WhisperConfig(
    vocab_size=64, num_mel_bins=8, max_source_positions=20, max_target_positions=16, d_model=32,
    encoder_layers=2, encoder_attention_heads=4, encoder_ffn_dim=64,
    decoder_layers=2, decoder_attention_heads=4, decoder_ffn_dim=64,
    pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
)  # fmt: skip
model = WhisperForConditionalGeneration(config)
if not ALONE:
    init_process_group()
    for layer in (*model.model.encoder.layers, *model.model.decoder.layers):
        fully_shard(layer)
    fully_shard(model)

optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

for _ in range(4):
    sound, text = own(torch.randn(4, 8, 40)), own(torch.randint(3, 64, (4, 7)))
    loss = model(input_features=sound, labels=text).loss

    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    report_step(loss.detach())

report_weights(model)
if not ALONE:
    destroy_process_group()
