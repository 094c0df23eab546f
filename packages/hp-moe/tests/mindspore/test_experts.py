"""Experts over ranks on MindSpore, against one process in float64."""

from __future__ import annotations

import mindspore
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn

from hp_dtensor import init_device_mesh, parallelize_value_and_grad
from hp_moe import (
    Drops,
    ExpertParallel,
    ExpertPlacement,
    ExpertTensorParallel,
    FeedForward,
    GroupedExperts,
    MoE,
    TensorParallel,
    TokenChoiceTopKRouter,
    global_auxiliary_loss,
    place_experts,
    rebalance,
    register_experts,
    report_drops,
    update_expert_bias,
)
from hp_moe.mindspore.exchange import index
from hp_platform import get_platform
from hp_styles import parallelize_module
from hp_testing import device_type, on_ranks

pytestmark = pytest.mark.framework("mindspore")


def build(**options) -> MoE:
    np.random.seed(0)
    moe = MoE(6, 8, 6, top_k=2, shared_expert=FeedForward(6, 8), **options)
    for _, cell in moe.cells_and_names():
        for name, parameter in cell._params.items():
            if parameter.requires_grad:
                cell._params[name] = Parameter(Tensor(np.random.randn(*parameter.shape)), parameter.name)
    return moe.set_train()


def differentiated(moe: MoE, x: Tensor):
    weights = moe.trainable_params()
    run = parallelize_value_and_grad(lambda x: (moe(x) ** 2).sum(), 0, weights)
    loss, (to_x, gradients) = run(x)
    return loss.asnumpy(), to_x.asnumpy(), dict(zip([weight.name for weight in weights], gradients, strict=True))


def whole(tensor) -> np.ndarray:
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).asnumpy()


def summed(array: np.ndarray) -> np.ndarray:
    total, groups = Tensor(array), get_platform().groups
    get_platform().collectives.all_reduce(total, group=groups.default_group())
    return total.asnumpy()


def compare(style, shape, axes, losses, ranks, placement=None, **options):
    rank = get_platform().groups.rank()
    mesh = init_device_mesh(device_type(), shape, mesh_dim_names=axes)
    single, moe = build(**options), build(**options)
    parallelize_module(moe.experts, mesh, style)
    if placement is not None:
        place_experts(moe.experts, placement)
    x = Tensor(np.random.default_rng(5).standard_normal((8, 6)))
    own = np.split(x.asnumpy(), losses)[rank * losses // ranks]
    loss, to_x, gradients = differentiated(single, x)
    part, to_own, got = differentiated(moe, Tensor(own))
    np.testing.assert_allclose(summed(part) * losses / ranks, loss, rtol=1e-12)
    np.testing.assert_allclose(to_own, np.split(to_x, losses)[rank * losses // ranks], rtol=1e-11, atol=1e-12)
    for name, expected in gradients.items():
        value = whole(got[name])
        if "experts.w" not in name:
            value = summed(value) * losses / ranks
        np.testing.assert_allclose(value, whole(expected), rtol=1e-11, atol=1e-12, err_msg=f"{style} {name}")


@on_ranks(2)
def test_whole_experts_on_each_rank_equal_one_process():
    for combine in ("fast", "exact"):
        compare(ExpertParallel(combine=combine), (2,), ("ep",), 2, 2, score_before_experts=combine == "fast")
    compare(ExpertParallel("all_gather"), (2,), ("ep",), 2, 2)
    compare(ExpertParallel("deredundency"), (2, 1), ("oep", "iep"), 2, 2)
    compare(TensorParallel(), (2,), ("tp",), 1, 2)


@on_ranks(2)
def test_replicas_equal_one_process():
    placement = ExpertPlacement((0, 0, 0, 1, 1, 1), ((1,), (), (1,), (0,), (), ()), 2)
    for combine in ("fast", "exact"):
        compare(ExpertParallel(combine=combine, slots=2), (2,), ("ep",), 2, 2, placement)


@on_ranks(4)
def test_experts_and_features_over_two_axes_equal_one_process():
    compare(ExpertTensorParallel(), (2, 2), ("ep", "tp"), 2, 4)
    compare(ExpertParallel("deredundency"), (2, 2), ("oep", "iep"), 4, 4)


class Packed(nn.Cell):
    """Experts as transformers has them: gate and up projection in one weight, weights of tokens at the end."""

    is_transposed = True
    has_bias = True

    def __init__(self) -> None:
        super().__init__()
        draw = np.random.default_rng(3).standard_normal
        shapes = {
            "gate_up_proj": (5, 6, 8),
            "down_proj": (5, 4, 6),
            "gate_up_proj_bias": (5, 8),
            "down_proj_bias": (5, 6),
        }
        for name, shape in shapes.items():
            setattr(self, name, Parameter(Tensor(draw(shape)), name=name))

    def _apply_gate(self, value):
        half = value.shape[1] // 2
        gate, up = value[:, :half], value[:, half:]
        return mindspore.mint.tanh(gate) * up

    def construct(self, tokens, chosen, weights):
        total = 0
        for choice in range(chosen.shape[1]):
            rows = []
            for token, expert in enumerate(chosen.asnumpy()[:, choice].tolist()):
                inner = tokens[token : token + 1] @ self.gate_up_proj[int(expert)] + self.gate_up_proj_bias[int(expert)]
                rows.append(self._apply_gate(inner) @ self.down_proj[expert] + self.down_proj_bias[expert])
            total = total + mindspore.mint.cat(rows) * weights[:, choice : choice + 1]
        return total


@on_ranks(2)
def test_packed_experts_equal_one_process_for_any_balance():
    rank, mesh = get_platform().groups.rank(), init_device_mesh(device_type(), (2,), mesh_dim_names=("ep",))
    draw = np.random.default_rng(1)
    for style in (ExpertParallel(), ExpertParallel(combine="exact"), TensorParallel()):
        for chosen in (draw.integers(0, 5, (6, 2)), np.tile([[4, 0]], (6, 1)), np.tile([[1, 2]], (6, 1))):
            single, experts = Packed(), Packed()
            parallelize_module(experts, mesh, style)
            tokens, weights = Tensor(draw.standard_normal((6, 6))), Tensor(draw.standard_normal((6, 2)))
            rows = slice(None) if isinstance(style, TensorParallel) else slice(3 * rank, 3 * rank + 3)

            def run(cell, rows, tokens=tokens, weights=weights, chosen=chosen):
                function = lambda x, w: (cell(x, Tensor(chosen[rows]), w) ** 2).sum()  # noqa: E731
                return parallelize_value_and_grad(function, (0, 1), cell.trainable_params())(
                    tokens[rows], weights[rows]
                )

            loss, ((to_x, to_w), gradients) = run(single, slice(None))
            part, ((own_x, own_w), got) = run(experts, rows)
            np.testing.assert_allclose(own_x.asnumpy(), to_x.asnumpy()[rows], rtol=1e-11, atol=1e-12)
            np.testing.assert_allclose(own_w.asnumpy(), to_w.asnumpy()[rows], rtol=1e-11, atol=1e-12)
            for one, other in zip(got, gradients, strict=True):
                np.testing.assert_allclose(whole(one), other.asnumpy(), rtol=1e-11, atol=1e-12)


def seated(chosen: np.ndarray, capacity: int) -> np.ndarray:
    """Return 1 for each choice that finds a seat, else 0."""
    taken, factors = [0] * 5, np.zeros(chosen.shape)
    for place, expert in np.ndenumerate(chosen):
        factors[place] = taken[expert] < capacity
        taken[expert] += 1
    return factors


@on_ranks(2)
@pytest.mark.parametrize("capacity", [1, 2, 9])
def test_the_last_beyond_a_capacity_are_dropped_as_in_one_process(capacity):
    rank, mesh = get_platform().groups.rank(), init_device_mesh(device_type(), (2,), mesh_dim_names=("ep",))
    single, experts = Packed(), Packed().set_train()
    parallelize_module(experts, mesh, ExpertParallel(capacity=capacity))
    draw, own = np.random.default_rng(1), slice(3 * rank, 3 * rank + 3)
    chosen = draw.integers(0, 4, (6, 2))  # none wants the last expert
    tokens, weights = Tensor(draw.standard_normal((6, 6))), Tensor(draw.standard_normal((6, 2)))
    factors = np.concatenate([seated(chosen[:3], capacity), seated(chosen[3:], capacity)])

    def run(cell, rows, factors):
        function = lambda x, w: (cell(x, Tensor(chosen[rows]), w * Tensor(factors[rows])) ** 2).sum()  # noqa: E731
        return parallelize_value_and_grad(function, (0, 1), cell.trainable_params())(tokens[rows], weights[rows])

    _, ((to_x, to_w), gradients) = run(single, slice(None), factors)
    for _ in range(2):  # the first call tells ranks' settings, the second asks nobody
        _, ((own_x, own_w), got) = run(experts, own, np.ones((6, 2)))
        np.testing.assert_allclose(own_x.asnumpy(), to_x.asnumpy()[own], rtol=1e-11, atol=1e-12)
        np.testing.assert_allclose(own_w.asnumpy(), to_w.asnumpy()[own], rtol=1e-11, atol=1e-12)
        for one, other in zip(got, gradients, strict=True):
            np.testing.assert_allclose(whole(one), other.asnumpy(), rtol=1e-11, atol=1e-12)
        dropped = np.bincount(chosen[own][factors[own] == 0], minlength=5)
        assert report_drops(experts) == {"": Drops(tuple(dropped.tolist()), 6)}
    wrong = chosen[own].copy()
    wrong[0, 0] = 5
    assert not np.isfinite(experts(tokens[own], Tensor(wrong), weights[own]).asnumpy()).any()


@on_ranks(2)
def test_a_bad_input_of_one_rank_is_an_error_of_all():
    mesh = init_device_mesh(device_type(), (2,), mesh_dim_names=("ep",))
    experts = parallelize_module(Packed(), mesh, ExpertParallel())
    rank = get_platform().groups.rank()
    tokens, weights = Tensor(np.ones((3, 6))), Tensor(np.ones((3, 2)))
    with pytest.raises(ValueError, match=r"Packed: rank 1 chose expert 5 for token 0, but there"):
        experts(tokens, Tensor(np.array([[0, 4 + rank]] * 3)), weights)


@on_ranks(2)
def test_hot_experts_get_replicas():
    mesh = init_device_mesh(device_type(), (2,), mesh_dim_names=("ep",))
    experts = parallelize_module(Packed(), mesh, ExpertParallel(slots=1))
    experts(Tensor(np.ones((9, 6))), Tensor(np.array([[1, 0]] * 9)), Tensor(np.ones((9, 2))))
    (placement,) = rebalance(experts).values()
    assert placement.home == (0, 0, 0, 1, 1) and placement.replicas in (((1,), (), (), (), ()), ((), (1,), (), (), ()))


@on_ranks(2)
def test_experts_that_would_move_are_refused_and_replicas_are_not():
    mesh, replicas = init_device_mesh(device_type(), (2,), mesh_dim_names=("ep",)), ((1,), (), (), (0,), ())
    experts, single = parallelize_module(Packed(), mesh, ExpertParallel(slots=1)), Packed()
    with pytest.raises(NotImplementedError, match="experts do not move to other .*Leave homes as they are; replicas w"):
        place_experts(experts, ExpertPlacement((1, 0, 0, 0, 1), ((),) * 5, 2), optimizer=())
    place_experts(experts, ExpertPlacement((0, 0, 0, 1, 1), replicas, 2))
    inputs = Tensor(np.ones((3, 6))), Tensor(np.array([[0, 3]] * 3)), Tensor(np.ones((3, 2)))
    np.testing.assert_allclose(experts(*inputs).asnumpy(), single(*inputs).asnumpy(), rtol=1e-12)


@on_ranks(2)
def test_the_deterministic_mode_is_refused_and_leaving_it_out_helps():
    mesh, single = init_device_mesh(device_type(), (2,), mesh_dim_names=("ep",)), Packed()
    with pytest.raises(NotImplementedError, match="deterministic=True. is not built for MindSpore; leave determ"):
        parallelize_module(Packed(), mesh, ExpertParallel(combine="exact", deterministic=True))
    experts = parallelize_module(Packed(), mesh, ExpertParallel(combine="exact"))
    inputs = Tensor(np.ones((3, 6))), Tensor(np.array([[0, 3]] * 3)), Tensor(np.ones((3, 2)))
    np.testing.assert_allclose(experts(*inputs).asnumpy(), single(*inputs).asnumpy(), rtol=1e-12)


@on_ranks(2)
def test_what_is_for_transformers_names_what_cells_have():
    with pytest.raises(NotImplementedError, match="'mine': transformers' models are PyTorch's; GroupedExperts has gro"):
        register_experts("mine")
    experts, rows = GroupedExperts(4, 6, 3, use_grouped_mm=True), np.random.default_rng(2).standard_normal((5, 4))
    w1, w2, w3 = (getattr(experts, name).asnumpy() for name in ("w1", "w2", "w3"))
    gates = [rows[at] @ w1[expert].T for at, expert in enumerate((0, 0, 2, 2, 2))]
    expected = [
        (gate / (1 + np.exp(-gate)) * (rows[at] @ w3[expert].T)) @ w2[expert].T
        for (at, expert), gate in zip(enumerate((0, 0, 2, 2, 2)), gates)
    ]
    result = experts(Tensor(rows.astype(np.float32)), [2, 0, 3])
    np.testing.assert_allclose(result.asnumpy(), expected, rtol=1e-4, atol=1e-6)

    with pytest.raises(NotImplementedError, match=r"use MoE\(load_balance_coeff=..., sequence_partition_group=...\)"):
        global_auxiliary_loss(build())
    group = get_platform().groups.default_group()
    whole_x, rank = np.random.default_rng(5).standard_normal((8, 6)), get_platform().groups.rank()

    def gradient_of_loss(x, **options):
        """What the auxiliary loss adds to the router's gradient."""
        both = [differentiated(build(**more), Tensor(x))[2]["router.gate.weight"] for more in ({}, options)]
        return whole(both[1]) - whole(both[0])

    expected = gradient_of_loss(whole_x, load_balance_coeff=0.5)
    got = gradient_of_loss(np.split(whole_x, 2)[rank], load_balance_coeff=0.5, sequence_partition_group=group)
    assert abs(expected).max() > 1e-3
    np.testing.assert_allclose(summed(got) / 2, expected, rtol=0, atol=1e-12)


@on_ranks(2)
def test_biases_follow_the_tokens_of_all_ranks():
    moe = build()
    moe.tokens_per_expert[:] = [[0, 1, 1, 5, 0, 0], [3, 0, 0, 1, 0, 1]][get_platform().groups.rank()]
    update_expert_bias(moe, lr=0.25)
    assert moe.expert_bias.asnumpy().tolist() == [-0.25, 0.25, 0.25, -0.25, 0.25, 0.25]


@pytest.mark.parametrize("reentrant", [True, False])
def test_tokens_are_counted_once_where_cells_are_recomputed(reentrant):
    moe, x = build(), Tensor(np.random.default_rng(0).standard_normal((5, 6)))
    again = lambda x: mindspore.recompute(moe, x, use_reentrant=reentrant).sum()  # noqa: E731
    parallelize_value_and_grad(again, 0, moe.trainable_params())(x)
    assert moe.tokens_per_expert.sum() == 10


@on_ranks(2)
def test_counts_of_different_layers_are_not_added_up():
    rank = get_platform().groups.rank()
    stage = nn.CellDict({f"layer{rank}": build()})
    with pytest.raises(ValueError, match=f"ranks have different layers.*this rank has layer{rank}.*Pass group="):
        update_expert_bias(stage)
    stage[f"layer{rank}"].tokens_per_expert[:] = [0, 1, 1, 5, 0, 0] if rank else [3, 0, 0, 1, 0, 1]
    same = init_device_mesh(device_type(), (2, 1), mesh_dim_names=("pp", "dp"))["dp"].get_group()
    update_expert_bias(stage, lr=0.25, group=same)
    signs = [1, 1, 1, -1, 1, 1] if rank else [-1, 1, 1, -1, 1, -1]
    assert (4 * stage[f"layer{rank}"].expert_bias.asnumpy()).tolist() == signs


def test_routers_choose_the_lower_of_equal_experts_in_the_best_groups():
    router = TokenChoiceTopKRouter(8, 8, 2, "sigmoid", num_expert_groups=4, num_limited_groups=1, route_scale=2.0)
    router.gate.weight.set_data(Tensor(np.eye(8, dtype=np.float32)))
    logits = Tensor(np.array([[9, -9, 3, 3, 2, 2, 1, 1]], np.float32))
    weights, chosen, _ = router(logits)
    assert chosen.asnumpy().tolist() == [[2, 3]]
    np.testing.assert_allclose(weights.asnumpy(), 2 / (1 + np.exp(-3.0)), rtol=1e-6)
    assert router(logits, Tensor([0, 0, 0, 0, 5.0, 6.0, 0, 0]))[1].asnumpy().tolist() == [[5, 4]]


def test_more_rows_than_32_bits_count_are_refused():
    assert index(np.array([3, 1]), 2**31 - 1).asnumpy().tolist() == [3, 1]
    with pytest.raises(ValueError, match="2147483648 rows on one rank are more than 2147483647, which kernels count"):
        index(np.array([3, 1]), 2**31)
