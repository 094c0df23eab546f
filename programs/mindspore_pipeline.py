# /// program
# framework = "mindspore"
# ranks = 2
# losses = "sum"  # the last rank has it
# ///
"""MindSpore: a pipeline of two stages by 1F1B."""

import mindspore
import numpy
from mindspore import Tensor, float64, mint, nn
from mindspore.experimental.optim import AdamW

from hp_dtensor import parallelize_value_and_grad
from hp_pipeline import PipelineStage, Schedule1F1B
from hp_platform import destroy_process_group, init_process_group
from reporting import ALONE, RANK, RANKS, report_step, report_weights

if not ALONE:
    init_process_group()
mindspore.set_seed(0)
numpy.random.seed(0)


class Stage(nn.Cell):
    """Some layers of the model; the last stage has the loss."""

    def __init__(self, layers, names, last):
        super().__init__()
        self.layers, self.last = nn.CellList(layers), last
        for parameter, name in zip(self.trainable_params(), names, strict=True):
            parameter.name = name

    def construct(self, x, target=None):
        for layer in self.layers:
            x = mint.tanh(layer(x))
        return ((x - target) ** 2).mean() if self.last else x


layers = [mint.nn.Linear(8, 8, dtype=float64) for _ in range(4)]
own = range(RANK * 4 // RANKS, (RANK + 1) * 4 // RANKS)
names = [f"layers.{index}.{name}" for index in own for name in ("weight", "bias")]
model = Stage([layers[index] for index in own], names, last=RANK == RANKS - 1)
weights = model.trainable_params()
optimizer = AdamW(weights, lr=1e-2)
if ALONE:
    step = parallelize_value_and_grad(model, None, weights)
else:
    schedule = Schedule1F1B(PipelineStage(model, RANK, RANKS), micro_batch_num=4)

for _ in range(4):
    x = numpy.random.randn(8, 8)
    x, target = Tensor(x), Tensor(numpy.roll(x, 1, 1))
    if ALONE:
        loss, gradients = step(x, target)
    else:
        losses = schedule.run(x, **({"target": target} if RANK == RANKS - 1 else {}))
        gradients = schedule.take_gradients(weights)
        loss = sum(losses) / len(losses) if losses else Tensor(0.0, float64)
    optimizer(gradients)
    report_step(loss)

report_weights(model)
if not ALONE:
    destroy_process_group()
