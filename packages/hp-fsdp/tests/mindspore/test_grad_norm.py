"""Norms over ranks that hold other parameters, as a pipeline's."""

from __future__ import annotations

import numpy as np
import pytest
from mindspore import Parameter, Tensor

from hp_fsdp import clip_grad_norm_, global_grad_norm
from hp_platform import get_platform
from hp_testing import on_ranks

pytestmark = pytest.mark.device


@on_ranks(2)
def test_the_ranks_of_a_group_add_what_each_has():
    groups = get_platform().groups
    rank, group = groups.rank(), groups.default_group()
    parameters = [Parameter(Tensor(np.zeros(2)), name="own"), Parameter(Tensor(np.zeros(1)), name="shared")]
    gradients = [Tensor(np.array([3.0, 4.0 * rank])), Tensor(np.array([12.0]))]
    options = {"gradients": gradients, "group": group, "copies": parameters[1:] if rank else []}
    norm = float(clip_grad_norm_(parameters, 1.0, **options).asnumpy())
    np.testing.assert_allclose(norm, (9.0 + 9 + 16 + 144) ** 0.5, rtol=1e-12)
    np.testing.assert_allclose(gradients[1].asnumpy(), 12 / norm, rtol=1e-6)
    with pytest.raises(ValueError, match="rank 1: global_grad_norm with norm_type=1.0"):
        global_grad_norm(parameters, 2.0 - rank, gradients=gradients, group=group)
