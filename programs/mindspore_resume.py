# /// program
# framework = "mindspore"
#
# [[launch]]
# ranks = 2
# send = "SIGKILL"
# to = 1
# step = 3
# exit = 1
#
# [[launch]]
# ranks = 2
# ///
"""MindSpore: checkpoints of two ranks, of which one is killed; both go on from the newest."""

import mindspore
import numpy
from mindspore import Tensor, float64, mint, nn
from mindspore.experimental.optim import AdamW

from hp_checkpoint import Checkpointer, Keep
from hp_dtensor import SkipDTensorDispatch, parallelize_value_and_grad
from hp_fsdp import fully_shard
from hp_platform import destroy_process_group, init_process_group
from reporting import ALONE, own, report_step, report_weights

if not ALONE:
    init_process_group()
mindspore.set_seed(0)
model = nn.SequentialCell(mint.nn.Linear(8, 16, dtype=float64), mint.nn.Linear(16, 8, dtype=float64))
if not ALONE:
    fully_shard(model)
weights = model.trainable_params()
step = parallelize_value_and_grad(lambda x: ((model(x) - x) ** 2).mean(), None, weights)
with SkipDTensorDispatch():  # elementwise, so on local parts
    optimizer = AdamW(weights, lr=1e-2)


def train(done, save):
    for number in range(done + 1, 7):
        x = numpy.random.default_rng(number).standard_normal((8, 8))
        loss, gradients = step(Tensor(own(x)))
        with SkipDTensorDispatch():
            optimizer(gradients)
        save(number)
        report_step(loss, number)


if ALONE:
    train(0, lambda number: None)
else:
    with Checkpointer("checkpoints", keep=Keep(last=2)) as checkpoints:
        done = checkpoints.load(model, optimizer).step if checkpoints.steps() else 0
        train(done, lambda number: checkpoints.save(number, model, optimizer).wait())

report_weights(model)
if not ALONE:
    destroy_process_group()
