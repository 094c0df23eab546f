"""Modules and parameters that join a model after it was sharded, and optimizers that were made before."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from fsdp_models import Net, batch, close, data_mesh, loss_of, pair, same_gradients, seeded, train
from torch import nn
from torch.autograd.graph import register_multi_grad_hook

from hp_dtensor import DTensor, init_empty_weights, init_parameters
from hp_fsdp import StateDictOptions, fully_shard, load_full_state_dict, set_model_state_dict
from hp_testing import device_type, on_ranks

pytestmark = pytest.mark.device


class Adapter(nn.Module):
    """Wraps a module that is there, as adapters do."""

    def __init__(self, inner: nn.Module, features: int, out: int) -> None:
        super().__init__()
        self.inner = inner
        self.down = nn.Linear(features, 2, bias=False)
        self.up = nn.Linear(2, out, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) + self.up(self.down(x))


def head_replaced(net: Any) -> None:
    torch.manual_seed(5)
    net.last = nn.Linear(7, 4).to(device_type(), torch.float64)


def adapted(net: Any) -> None:
    torch.manual_seed(6)
    for parameter in net.parameters():
        parameter.requires_grad_(False)
    for block in net.blocks:
        block.up = Adapter(block.up, 7, 11).to(device_type(), torch.float64)


def block_added(net: Any) -> None:
    torch.manual_seed(7)
    net.blocks.append(type(net.first)(7, 7).to(device_type(), torch.float64))


def scale_added(net: Any) -> None:
    net.first.register_parameter("extra", nn.Parameter(torch.ones(7, 5, device=device_type(), dtype=torch.float64)))
    net.first.register_forward_hook(lambda module, args, output: output + args[0] @ module.extra.T)


def copied(net: Any) -> None:
    net.second = copy.deepcopy(net.last)
    net.register_forward_hook(lambda module, args, output: output + module.second(torch.ones(7).to(args[0])))


JOINING = {each.__name__: each for each in (head_replaced, adapted, block_added, scale_added, copied)}


@on_ranks(2)
@pytest.mark.parametrize("name", sorted(JOINING))
@pytest.mark.parametrize("steps", [0, 1])
def test_what_joins_is_trained_as_in_a_single_process(name: str, steps: int):
    reference, model = pair()
    train(reference, model, steps=steps)
    for net in (reference, model):
        JOINING[name](net)
    # `train` makes the optimizers before the forward that takes the new parameters in.
    train(reference, model, steps=2)
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())


@on_ranks(2)
@pytest.mark.parametrize("deterministic", [False, True])
def test_what_joins_is_sharded_as_the_group(deterministic: bool):
    reference, model = pair(deterministic=deterministic)
    for net in (reference, model):
        head_replaced(net)
        block_added(net)
        fully_shard(net.blocks[-1], data_mesh(), deterministic=deterministic) if net is model else None
    train(reference, model, steps=2)


@on_ranks(2)
def test_ignored_parameters_stay_ignored():
    model = seeded(Net)
    fully_shard(model, data_mesh(), ignored_params=[model.last.bias])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        loss_of(model(batch()[1])).backward()
        assert type(model.last.bias) is nn.Parameter
        optimizer.step()
        model.extra = nn.Identity()


@on_ranks(2)
def test_what_joins_and_cannot_be_taken_in():
    _, model = pair()
    model.last = nn.Linear(7, 3, device="meta")
    with pytest.raises(RuntimeError, match=r"'last.weight' joined Net after it was sharded, and is on the meta device"):
        model(batch()[1])
    model.last.to_empty(device=device_type()).to(torch.float64)
    nn.init.ones_(model.last.weight)
    nn.init.ones_(model.last.bias)
    model(batch()[1])
    _, model = pair()
    model.last.weight = nn.Parameter(torch.ones(3, 7, device=device_type(), dtype=torch.float64))
    with pytest.raises(RuntimeError, match=r"'last.weight' of Net was replaced by Parameter that is not laid out as"):
        model(batch()[1])
    _, model = pair()
    model.last.bias = None
    with pytest.raises(RuntimeError, match=r"'last.bias' of Net is no longer in Linear: modules that move parameters"):
        model(batch()[1])
    train(*pair(lambda: weight_normed(Net())), steps=1)
    _, model = pair()
    model.last.weight = model.blocks[0].up.weight
    with pytest.raises(RuntimeError, match=r"'last.weight' of Net was replaced|that of a group already"):
        model(batch()[1])


def weight_normed(net: Any) -> Any:
    nn.utils.parametrizations.weight_norm(net.last)
    return net


def optimized(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(net.parameters(), lr=0.01)


@on_ranks(1, 2)
def test_an_optimizer_made_before_fully_shard():
    reference = seeded(Net)
    model = copy.deepcopy(reference)
    before = list(model.parameters())
    optimizers = [optimized(net) for net in (reference, model)]
    for block in model.blocks:
        fully_shard(block, data_mesh())
    fully_shard(model, data_mesh())
    assert all(a is b for a, b in zip(before, model.parameters(), strict=True))
    train(reference, model, make=lambda parameters: optimizers.pop(0))


@on_ranks(2)
@pytest.mark.parametrize("fill", ["init_parameters", "to_empty"])
def test_parameters_on_meta_stay_the_same_objects(fill: str):
    reference = seeded(Net)
    with init_empty_weights():
        model = Net().double()
    for block in model.blocks:
        fully_shard(block, data_mesh())
    fully_shard(model, data_mesh())
    optimizers = [optimized(net) for net in (reference, model)]
    if fill == "to_empty":
        model.to_empty(device=device_type())
    else:
        init_parameters(model)
    load_full_state_dict(model, reference.state_dict())
    train(reference, model, make=lambda parameters: optimizers.pop(0), steps=2)


@on_ranks(2)
def test_a_model_of_which_the_root_is_not_sharded():
    model = seeded(Net)
    for block in model.blocks:
        fully_shard(block, data_mesh())
    optimizer = optimized(model)
    with pytest.warns(UserWarning, match="sharded parameters has a gradient"):
        optimizer.step()
    loss_of(model(batch()[1])).backward()
    with pytest.raises(RuntimeError, match=r"4 of the 19 parameters of AdamW are in no sharded module.*\(7, 5\)"):
        optimizer.step()
    whole = pair(mesh=data_mesh())[1]  # the model itself was sharded as well, after its blocks
    loss_of(whole(batch()[1])).backward()
    optimized(whole).step()
    for parameter in (*model.first.parameters(), *model.last.parameters()):
        parameter.requires_grad_(False)
        parameter.grad = None
    optimizer.step()


@on_ranks(2)
def test_an_optimizer_of_gathered_parameters():
    _, model = pair()
    model.blocks[0].unshard()
    optimizer = optimized(model.blocks[0])
    loss_of(model(batch()[1])).backward()
    with pytest.raises(RuntimeError, match=r"AdamW was made while 5 of its 5 parameters were gathered"):
        optimizer.step()
    model.zero_grad()
    model.reshard()
    optimizer = optimized(model.blocks[0])
    loss_of(model(batch()[1])).backward()
    optimizer.step()


@on_ranks(2)
@pytest.mark.parametrize("when", ["before", "after", "gathered"])
def test_hooks_of_sharded_parameters_see_their_gradients(when: str):
    reference = seeded(Net)
    model = copy.deepcopy(reference)
    seen: dict[str, list[torch.Tensor]] = {"first.weight": [], "blocks.1.up.weight": []}
    handles = []

    def hook(net: nn.Module) -> None:
        for name in seen:
            parameter = net.get_parameter(name)
            handles.append(parameter.register_hook(lambda grad, name=name: seen[name].append(grad) or grad * 3))

    if when == "before":
        hook(model)
    for block in model.blocks:
        fully_shard(block, data_mesh())
    fully_shard(model, data_mesh())
    if when == "after":
        hook(model)
    whole, own = batch()
    loss_of(reference(whole)).backward()
    loss = loss_of(model(own))
    if when == "gathered":  # the root's parameters are, between forward and backward
        hook(model)
        watched, grads = model.first.weight, seen["first.weight"]
        handles.append(watched.register_post_accumulate_grad_hook(lambda p: grads.append(p.grad / 3)))
    loss.backward()
    if when == "gathered" and grads:
        close(grads.pop().full_tensor(), reference.first.weight.grad, "first.weight")
    for name in seen:
        expected = reference.get_parameter(name).grad
        if seen[name]:  # a rank that owns no element of a parameter gets no gradient
            close(seen[name][0].full_tensor(), expected, name)
        expected.mul_(3)
    same_gradients(model, reference)
    for handle in handles:
        handle.remove()
    loss_of(reference(whole)).backward()
    loss_of(model(own)).backward()
    same_gradients(model, reference)


@on_ranks(2)
def test_hooks_that_count_graph_nodes_are_refused():
    model = seeded(Net)
    weights = [model.first.weight, model.blocks[0].up.weight]
    handle = register_multi_grad_hook(weights, print)
    with pytest.raises(ValueError, match=r"'first.weight' has a hook of register_multi_grad_hook, which waits for"):
        fully_shard(model, data_mesh())
    handle.remove()
    fully_shard(model, data_mesh())
    with pytest.raises(RuntimeError, match=r"the graph node of a parameter of shape \(.*\) takes no gradient: it is"):
        register_multi_grad_hook(weights, print)
    seen = []
    register_multi_grad_hook(weights, seen.append, mode="any")
    loss_of(model(batch()[1])).backward()
    assert [type(each) for each in seen] == [DTensor]


@on_ranks(2)
def test_a_factor_is_that_of_one_group():
    reference, model = pair()
    model.set_gradient_divide_factor(4.0)
    whole, own = batch()
    loss_of(reference(whole)).backward()
    loss_of(model(own)).backward()
    for module in (reference.first, reference.last):  # the root's group
        for parameter in module.parameters():
            parameter.grad.mul_(2 / 4)
    same_gradients(model, reference)


@on_ranks(1, 2)
@pytest.mark.parametrize("prepared", [False, True])
def test_a_sharded_model_is_cast(prepared: bool):
    reference, model = pair()
    if prepared:
        train(reference, model, steps=1)
    before = list(model.parameters())
    for net in (reference, model):
        net.zero_grad()
        net.float()
    assert all(a is b for a, b in zip(before, model.parameters(), strict=True))
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    train(reference, model, steps=2, run=lambda net, x: loss_of(net(x.float())), limit=1e-5)
    model.first.double()
    with pytest.raises(RuntimeError, match=r"'first.weight' of Net is torch.float64 on .*, 'last.weight' is.*or none"):
        model(batch()[1])
    train(reference.double(), model.double(), steps=1, limit=1e-5)


class Marked(nn.Parameter):
    """A class of parameters that only tells them apart."""


class Wrapped(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_function__(func, types, args, kwargs or {})


@on_ranks(2)
def test_classes_of_parameters():
    model = nn.Linear(3, 3)
    model.weight = Marked(model.weight.detach())
    kinds = []
    model.register_forward_hook(lambda module, args, output: kinds.append(type(module.weight)))
    fully_shard(model, data_mesh())(torch.ones(3))
    assert kinds == [Marked]
    model = nn.Linear(3, 3)
    model.weight = nn.Parameter(model.weight.detach().as_subclass(Wrapped))
    with pytest.raises(
        TypeError, match=r"'weight' is a .*Wrapped, a tensor subclass.*its kernels would be lost.*fsdp_post_all_gather"
    ):
        fully_shard(model, data_mesh())
    fully_shard(nn.Sequential(model), data_mesh(), ignored_params=[model.weight])(torch.ones(3))
    model.weight = nn.Parameter(model.weight.detach().as_subclass(torch.Tensor))
    fully_shard(model, data_mesh())(torch.ones(3))
    lazy: Any = nn.LazyLinear(3)
    with pytest.raises(TypeError, match=r"'weight' is lazy and has no shape yet. Run a forward before"):
        fully_shard(lazy, data_mesh())
    torch.manual_seed(3)
    expected = lazy(torch.ones(2, 3)).detach()
    if torch.distributed.get_rank() == 0:
        load = {name: tensor.clone() for name, tensor in lazy.state_dict().items()}
    else:
        load = {}
    fully_shard(lazy, data_mesh())
    set_model_state_dict(lazy, load, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))
    torch.testing.assert_close(lazy(torch.ones(2, 3)).cpu(), expected)
    model = seeded(Net)
    loss_of(model(batch()[1])).backward()
    with pytest.raises(ValueError, match=r"'first.weight' has a gradient, of this rank's own"):
        fully_shard(model, data_mesh())
    assert type(model) is Net
    model.zero_grad()
    fully_shard(model, data_mesh())
