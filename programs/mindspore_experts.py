# /// program
# framework = "mindspore"
# ranks = 2
# losses = "sum"
# ///
"""MindSpore: a mixture of experts over two ranks, each with tokens of its own."""

import numpy
from mindspore import Parameter, Tensor
from mindspore.experimental.optim import AdamW

from hp_dtensor import SkipDTensorDispatch, init_device_mesh, parallelize_value_and_grad
from hp_moe import ExpertParallel, MoE
from hp_platform import destroy_process_group, get_platform, init_process_group
from hp_styles import parallelize_module
from reporting import ALONE, RANKS, own, report_step, report_weights

if not ALONE:
    init_process_group()
numpy.random.seed(0)
model = MoE(8, 16, 4, top_k=2)
for _, cell in model.cells_and_names():
    for name, parameter in cell._params.items():  # in float64
        cell._params[name] = Parameter(Tensor(numpy.random.randn(*parameter.shape) / 4), parameter.name)
model.set_train()
if not ALONE:
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("ep",))
    parallelize_module(model, mesh, {"experts": ExpertParallel()})
weights = model.trainable_params()
step = parallelize_value_and_grad(lambda x, y: ((model(x) - y) ** 2).mean() / RANKS, None, weights)
with SkipDTensorDispatch():
    optimizer = AdamW(weights, lr=1e-2)

for _ in range(4):
    x = own(numpy.random.randn(16, 8))
    loss, gradients = step(Tensor(x), Tensor(numpy.roll(x, 1, 1)))
    if not ALONE:
        gradients = [gradient.contiguous() for gradient in gradients]
        for weight, gradient in zip(weights, gradients, strict=True):
            if "experts." not in weight.name:
                get_platform().collectives.all_reduce(gradient, group=get_platform().groups.default_group())
    with SkipDTensorDispatch():
        optimizer(gradients)
    report_step(loss)

report_weights(model)
if not ALONE:
    destroy_process_group()
