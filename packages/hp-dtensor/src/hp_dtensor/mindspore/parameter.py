"""What a Parameter holds, exchanged in place.

Note [The shape that a Parameter remembers]
MindSpore keeps, with a Parameter that a kernel has read, the shape that it had then, and several kernels (``Gather``,
``Stack``, ``CumSum``) make their gradient of the shape that is kept. Data of another shape leave it as it was: values
and gradients are then wrong, and memory is written beyond its end. Only another dtype makes MindSpore forget it, so
the Parameter is given one in between, on no elements.
"""

from __future__ import annotations

import mindspore
from mindspore import Parameter, Tensor, mint
from mindspore._c_expression import TensorPy  # type: ignore[attr-defined]

__all__ = ["set_local"]


def set_local(parameter: Parameter, local: Tensor) -> None:
    """Makes ``local`` what a Parameter holds; see Note [The shape that a Parameter remembers].

    Args:
        parameter: plain, or a DTensor, whose layout is left as it is.
        local: a plain tensor of any shape, of the Parameter's dtype.
    """
    if TensorPy.shape.__get__(parameter) != TensorPy.shape.__get__(local):
        parameter._update_data(mint.empty((0,), dtype=local.dtype))
        TensorPy.set_dtype(parameter, mindspore.bool_ if local.dtype != mindspore.bool_ else mindspore.int8)
    parameter._update_data(local)
