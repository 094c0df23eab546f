"""Functions that run on whole tensors, gathered on every rank: right for every layout, with nothing saved.

Every rank computes the whole result, which is replicated. What a function writes into its operands is put back into
them. A random one draws from the same generator on all ranks, so that they draw the same.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F

from hp_dtensor.layout.placements import Replicate
from hp_dtensor.layout.spec import TensorSpec
from hp_dtensor.torch.dtensor import DTensor, redistribute, wrap
from hp_dtensor.torch.ops import random
from hp_dtensor.torch.ops.dispatching import calls, dispatch
from hp_dtensor.torch.ops.dispatching.calls import functions_of, name_of, tensors_of
from hp_dtensor.torch.ops.dispatching.dispatch import replicate_plain
from hp_dtensor.torch.views import moved_view
from hp_platform.extend import map_nested

T = torch.Tensor

# What these tables list is what runs gathered, today. Many of them could stay sharded: bind a rule and take the name
# out here, since dispatch asks this table first. docs/writing-a-rule.md tells how.
READING = """equal allclose bincount searchsorted bucketize unique unique_consecutive masked_select nonzero isin
    tensordot diag diagonal diag_embed diagflat trace take scatter scatter_add scatter_reduce index_add index_copy
    index_fill index_reduce masked_scatter put matrix_norm cdist argwhere
    histogram histogramdd kron cov corrcoef quantile nanquantile renorm block_diag combinations
    cartesian_prod cholesky cholesky_inverse cholesky_solve diagonal_scatter stft istft
    geqrf gradient linspace logspace lu lu_unpack lu_solve matrix_exp meshgrid ormqr qr svd triangular_solve pinverse
    logdet inverse det slogdet matrix_power chain_matmul trapz trapezoid cumulative_trapezoid unravel_index
    segment_reduce nonzero_static hash_tensor unfold_copy rot90 _chunk_cat
    _unsafe_masked_index _unsafe_masked_index_put_accumulate native_group_norm native_layer_norm prelu bilinear
    embedding_bag multi_head_attention_forward ctc_loss pdist local_response_norm fold multi_margin_loss
    multilabel_margin_loss multilabel_soft_margin_loss triplet_margin_loss triplet_margin_with_distance_loss
    cosine_embedding_loss gaussian_nll_loss max_unpool1d max_unpool2d max_unpool3d one_hot grid_sampler_2d
    grid_sampler_3d cholesky_ex cond eig eigh eigvals eigvalsh householder_product inv inv_ex ldl_factor ldl_factor_ex
    ldl_solve lstsq lu_factor lu_factor_ex matrix_rank multi_dot pinv solve solve_ex solve_triangular svdvals tensorinv
    tensorsolve vander vecdot"""
WRITING = """scatter_ scatter_add_ scatter_reduce_ index_add_ index_copy_ index_fill_ index_reduce_ masked_scatter_ put_
    cumsum_ cumprod_ tril_ triu_ fill_diagonal_ renorm_"""
DRAWING = """multinomial normal rrelu dropout1d dropout2d dropout3d alpha_dropout feature_dropout feature_alpha_dropout
    fractional_max_pool2d fractional_max_pool3d poisson gumbel_softmax"""
OPERATORS = """native_dropout_backward slice _softmax_backward_data max_pool2d_with_indices_backward
    _upsample_bilinear2d_aa"""
"""Of ``torch.ops.aten``."""
UNTOLD = "native_batch_norm _native_batch_norm_legit _batch_norm_with_update"
"""They write into operands without telling autograd."""
_REFUSED = {
    "as_strided as_strided_ as_strided_copy as_strided_scatter": "strides are of memory, and a rank has only a part;"
    " use views and indexing, or to_local()",
    "resize_ resize_as_": "a part can't be resized by itself; make a new tensor",
    "to_sparse": "a sparse tensor can't be distributed; full_tensor() first",
}


def on_whole(func: Any, args: Any, kwargs: Any, *, untold: bool = False) -> Any:
    """Run ``func`` on the operands' global values, gathered on every rank; results are replicated.

    An operand that is written to gets its part of what was written, and is returned where ``func`` returns it.

    Args:
        func: the torch function.
        args: its positional arguments.
        kwargs: its keyword arguments.
        untold: values are compared to find what was written to, since ``func`` doesn't count versions.
    """
    if any(type(t) is not DTensor for t in tensors_of(args, kwargs)):
        args, kwargs = replicate_plain(func, args, kwargs)
    mesh = dispatch.mesh_of(func, args, kwargs)
    gathered: list[tuple[DTensor, T, Any, bool]] = []

    def whole(value: Any) -> Any:
        if not isinstance(value, DTensor):
            return value
        found = next((full for x, full, *_ in gathered if x is value), None)
        if found is None:
            found = value.full_tensor()
            own = calls.writes(func) and found.requires_grad and torch.is_grad_enabled()
            found = found.clone() if own else found  # in a graph, no view of what a function made is written
            gathered.append(
                (value, found, _state(found, untold or found.is_inference()), own or not value._spec.replicated)
            )
        return found

    def placed(value: Any) -> Any:
        if not isinstance(value, T):
            return value
        source = next((x for x, full, *_ in gathered if full is value), None)
        return _replicated(value, mesh) if source is None else source

    out = func(*map_nested(whole, list(args)), **{name: map_nested(whole, value) for name, value in kwargs.items()})
    for x, full, before, apart in gathered:
        written = not torch.equal(full, before) if isinstance(before, T) else _state(full, False) != before
        if written and apart:
            x.copy_(_replicated(full.view_as(full), mesh))
    result = map_nested(placed, out)
    if func in moved_view.VIEWS and not gathered[0][0]._spec.replicated:
        return moved_view.link(result, func, args, kwargs)
    return result


def _state(whole: T, untold: bool) -> Any:
    """Return what changes when a tensor is written to: its version, or its value."""
    if untold:
        return whole.detach().clone()
    return whole._version


def _replicated(value: T, mesh: Any) -> DTensor:
    return wrap(value, TensorSpec.of(mesh, [Replicate()] * mesh.ndim, value.shape))


def _draw(func: Any, args: Any, kwargs: Any) -> Any:
    """Run a random function, after comparing the ranks' generators once."""
    some = next(t for t in tensors_of(args, kwargs) if isinstance(t, DTensor))
    random.compare_generators(dispatch.mesh_of(func, args, kwargs), some.device)
    return on_whole(func, args, kwargs)


def _bernoulli(func: Any, args: Any, kwargs: Any) -> Any:
    """Draws laid out as their probabilities are."""
    spec = args[0]._spec
    drawn = _draw(func, args, kwargs)
    return redistribute(drawn, spec.with_placements([Replicate() if p.is_partial() else p for p in spec.placements]))


def _refuse(why: str) -> Any:
    def handle(func: Any, args: Any, kwargs: Any) -> Any:
        raise NotImplementedError(f"{name_of(func)} of a DTensor: {why}")

    return handle


def operators_of(names: str) -> list[Any]:
    """Return the operators of ``torch.ops.aten`` of these names, each with its overloads."""
    packets = [getattr(torch.ops.aten, name) for name in names.split() if hasattr(torch.ops.aten, name)]
    return [each for packet in packets for each in (packet, *(getattr(packet, o) for o in packet.overloads()))]


def special() -> dict[Any, Any]:
    """Return the handlers, by function."""
    table: dict[Any, Any] = {}
    for why, names in ((why, names) for names, why in _REFUSED.items()):
        table.update(dict.fromkeys(functions_of(names), _refuse(why)))
    table.update(dict.fromkeys(functions_of(READING + " " + WRITING), on_whole))
    table[T.unfold] = on_whole  # torch.nn.functional's is another one
    table.update(dict.fromkeys(functions_of(DRAWING), _draw))
    table.update(dict.fromkeys(functions_of(UNTOLD) + operators_of(UNTOLD), functools.partial(on_whole, untold=True)))
    table.update(dict.fromkeys(operators_of(OPERATORS), on_whole))
    table.update(dict.fromkeys(functions_of("bernoulli"), _bernoulli))
    table["the places where", torch.where] = on_whole  # of one argument: what is found depends on values
    for dims in (2, 3):
        table[getattr(F, f"fractional_max_pool{dims}d_with_indices")] = _draw
    return table
