# /// program
# framework = "mindspore"
# ranks = 2
# ///
"""MindSpore: Cells sharded one by one, AdamW, gradients clipped."""

import mindspore
import numpy
from mindspore import Tensor, float64, mint, nn
from mindspore.experimental.optim import AdamW

from hp_dtensor import SkipDTensorDispatch, parallelize_value_and_grad
from hp_fsdp import clip_grad_norm_, fully_shard
from hp_platform import destroy_process_group, init_process_group
from reporting import ALONE, own, report_step, report_weights

if not ALONE:
    init_process_group()
mindspore.set_seed(0)
numpy.random.seed(0)
model = nn.SequentialCell(*(mint.nn.Linear(16, 16, dtype=float64) for _ in range(3)))
if not ALONE:
    for cell in model:
        fully_shard(cell)
    fully_shard(model)
weights = model.trainable_params()
step = parallelize_value_and_grad(lambda x: ((model(x) - x) ** 2).mean(), None, weights)
with SkipDTensorDispatch():  # elementwise, so on local parts
    optimizer = AdamW(weights, lr=1e-2)

for _ in range(4):
    x = Tensor(own(numpy.random.randn(8, 16)))
    loss, gradients = step(x)
    if ALONE:
        norm = sum((each**2).sum() for each in gradients) ** 0.5
        factor = Tensor(min(1.0, 0.5 / (float(norm) + 1e-6)), float64)  # a plain number would be rounded to float32
        gradients = [each * factor for each in gradients]
    else:
        clip_grad_norm_(weights, 0.5, gradients=gradients)
    with SkipDTensorDispatch():
        optimizer(gradients)
    report_step(loss)

report_weights(model)
if not ALONE:
    destroy_process_group()
