# /// program
# framework = "mindspore"
# ranks = 2
# ///
"""MindSpore: a feed-forward whose matrices are sharded by columns and by rows."""

import mindspore
import numpy
from mindspore import Tensor, float64, mint, nn
from mindspore.experimental.optim import AdamW

from hp_dtensor import SkipDTensorDispatch, init_device_mesh, parallelize_value_and_grad
from hp_platform import destroy_process_group, init_process_group
from hp_styles import ColwiseParallel, RowwiseParallel, parallelize_module
from reporting import ALONE, RANKS, report_step, report_weights

if not ALONE:
    init_process_group()
mindspore.set_seed(0)
numpy.random.seed(0)


class FeedForward(nn.Cell):
    """Two matrices with a nonlinearity between them."""

    def __init__(self):
        super().__init__()
        self.up, self.down = mint.nn.Linear(8, 32, dtype=float64), mint.nn.Linear(32, 8, dtype=float64)

    def construct(self, x):
        return self.down(mint.tanh(self.up(x)))


model = FeedForward()
if not ALONE:
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("tp",))
    parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
weights = model.trainable_params()
step = parallelize_value_and_grad(lambda x: ((model(x) - x) ** 2).mean(), None, weights)
with SkipDTensorDispatch():  # elementwise, so on local parts
    optimizer = AdamW(weights, lr=1e-2)

for _ in range(4):
    loss, gradients = step(Tensor(numpy.random.randn(6, 8)))
    with SkipDTensorDispatch():
        optimizer(gradients)
    report_step(loss)

report_weights(model)
if not ALONE:
    destroy_process_group()
