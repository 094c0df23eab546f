"""Heavy operations in frames: the same bits, whatever the frame does with outputs, inputs and gradients."""

from __future__ import annotations

import copy
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from hp_platform.frames import at_site, current_frame, frame
from hp_platform.torch import heavy
from hp_platform.torch.heavy import DeferredGradients, KeptOutputs, linear, mark


class Net(nn.Module):
    """Three linear maps, the last with the weight of the first, and a block that may be computed again."""

    def __init__(self, again=None):
        super().__init__()
        self.first, self.second, self.head = nn.Linear(6, 8), nn.Linear(8, 6, bias=False), nn.Linear(6, 8)
        self.head.weight = self.first.weight
        self.again = again

    def block(self, x):
        return self.second(self.first(x).sin()).tanh()

    def forward(self, x):
        x = self.block(x) if self.again is None else self.again(self.block, x)
        return self.head(x)


@pytest.fixture
def calls(monkeypatch):
    """Each call of torch's own function from here on."""
    calls, native = [], F.linear

    def counting(*args):
        calls.append(tuple(args[0].shape))
        return native(*args)

    monkeypatch.setattr(heavy.F, "linear", counting)
    return calls


def built(again=None) -> Net:
    torch.manual_seed(0)
    return Net(again).double()


def batch() -> torch.Tensor:
    return torch.linspace(-1, 1, 5 * 2 * 6, dtype=torch.float64).view(5, 2, 6).requires_grad_()


def gradients(model: nn.Module, x: torch.Tensor) -> dict[str, torch.Tensor | None]:
    return {"x": x.grad, **{name: parameter.grad for name, parameter in model.named_parameters()}}


def plain() -> dict[str, torch.Tensor | None]:
    model, x = built(), batch()
    model(x).square().sum().backward()
    return gradients(model, x)


def compare(model: nn.Module, x: torch.Tensor, bits: bool = True) -> None:
    for name, gradient in gradients(model, x).items():
        expected = plain()[name]
        assert torch.equal(gradient, expected) if bits else torch.allclose(gradient, expected, rtol=0, atol=1e-13), name


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.complex64])
@pytest.mark.parametrize("shape", [(5, 7), (2, 3, 7), (7,), (0, 7), (4, 0, 7)])
@pytest.mark.parametrize("biased", [True, False])
def test_bits_are_those_of_torch(dtype, shape, biased) -> None:
    torch.manual_seed(0)
    weight, bias = torch.randn(4, 7, dtype=dtype), torch.randn(4, dtype=dtype) if biased else None
    input = torch.randn(shape, dtype=dtype)
    strided = input.mT.contiguous().mT if input.dim() > 1 else input
    for value in (input, strided):
        outcomes = []
        for function in (F.linear, linear):
            leaves = [leaf.clone().requires_grad_() for leaf in (value, weight, bias) if leaf is not None]
            with frame():
                out = function(*leaves)
            outcomes.append([out, *torch.autograd.grad(out.sin().abs().sum(), leaves)])
        for own, expected in zip(*reversed(outcomes), strict=True):
            assert torch.equal(own, expected)


def test_the_gradient_of_a_gradient() -> None:
    torch.manual_seed(0)
    leaves = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in ((3, 4), (2, 4), (2,))]

    def framed(*leaves):
        with frame():
            return linear(*leaves)

    assert torch.autograd.gradcheck(framed, leaves)
    assert torch.autograd.gradgradcheck(framed, leaves)


def test_without_a_frame_it_is_torchs_function(calls) -> None:
    model = built()
    assert mark(model) == ["first", "second", "head"] == mark(model)
    out = model(batch())
    assert len(calls) == 3 and type(out.grad_fn).__name__ != "_LinearBackward"


def test_modules_with_a_forward_of_their_own_keep_it() -> None:
    class Adapter(nn.Linear):
        def forward(self, x):
            return super().forward(x) + 1

    model = nn.Sequential(Adapter(2, 2), nn.Linear(2, 2))
    assert mark(model) == ["1"]
    again = copy.deepcopy(model)
    again[1].weight.data.zero_()
    assert not torch.equal(again(torch.ones(2)), model(torch.ones(2)))
    assert mark(again) == ["1"]


# ---- weights ----
def test_weight_gradients_are_put_off_until_they_are_asked_for() -> None:
    model, x, deferred, seen = built(), batch(), DeferredGradients(), []
    mark(model)
    for name, parameter in model.named_parameters():
        parameter.register_hook(lambda gradient, name=name: seen.append(name))
        parameter.register_post_accumulate_grad_hook(lambda parameter, name=name: seen.append(f"{name} added"))
    with frame(weights=deferred):
        loss = model(x).square().sum()
    loss.backward()
    assert torch.equal(x.grad, plain()["x"])
    assert len(deferred) == 3 and all(parameter.grad is None for parameter in model.parameters()) and not seen
    deferred.run()
    compare(model, x)
    names = [name for name, _ in model.named_parameters()]
    assert sorted(seen) == sorted([*names, *(f"{name} added" for name in names)]), "each once, the shared one too"
    assert not len(deferred)
    deferred.run()
    compare(model, x)


def test_what_makes_a_weight_gets_the_gradient() -> None:
    half, deferred = torch.randn(4, 6, dtype=torch.float64, requires_grad=True), DeferredGradients()
    x = torch.randn(2, 6, dtype=torch.float64)  # it needs no gradient: nothing but the weight does
    with frame(weights=deferred):
        linear(x, half * 2).sum().backward()
    assert half.grad is None
    deferred.run()
    assert torch.equal(half.grad, 2 * x.sum(0).expand(4, 6))


@pytest.mark.parametrize("biased", [True, False])
def test_an_output_of_several_dims_may_be_written_to(biased) -> None:
    def run(weight, x, bias, function) -> torch.Tensor:
        out = function(x, weight, bias if biased else None)
        out.mul_(0.5)
        out[..., 0] += 1.0
        return out.square().sum()

    tensors = [torch.randn(*shape, dtype=torch.float64) for shape in ((4, 6), (2, 3, 6), (4,))]
    expected, got = ([each.clone().requires_grad_() for each in tensors] for _ in range(2))
    run(*expected, torch.nn.functional.linear).backward()
    deferred = DeferredGradients()
    with frame(weights=deferred):
        run(*got, linear).backward()
    deferred.run()
    for one, other in list(zip(expected, got, strict=True))[: 2 + biased]:
        assert torch.equal(one.grad, other.grad)


def test_a_frozen_weight_owes_nothing() -> None:
    model, x, deferred = built(), batch(), DeferredGradients()
    mark(model)
    model.requires_grad_(False)
    model.head.bias.requires_grad_()
    with frame(weights=deferred):
        model(x).square().sum().backward()
    assert len(deferred) == 1
    deferred.run()
    assert torch.equal(model.head.bias.grad, plain()["head.bias"]) and model.first.weight.grad is None


def test_the_gradient_of_a_gradient_is_refused_where_it_is_put_off() -> None:
    model, x = built(), batch()
    mark(model)
    with frame(weights=DeferredGradients()):
        out = model(x).square().sum()
    with pytest.raises(RuntimeError, match="whose weight gradient is deferred .*run this forward outside"):
        torch.autograd.grad(out, x, create_graph=True)
    reference, y = built(), batch()
    for one, other in ((model, x), (reference, y)):
        (first,) = torch.autograd.grad(one(other).square().sum(), other, create_graph=True)
        first.square().sum().backward()
    assert torch.equal(x.grad, y.grad)


# ---- outputs ----
def kept_checkpoint(sites):
    kept = KeptOutputs(sites)
    return lambda block, x: checkpoint(block, x, use_reentrant=False, context_fn=kept.contexts)


@pytest.mark.parametrize(("sites", "count"), [(None, 3), (["first"], 4), (["second"], 4), ([], 5)])
def test_what_is_kept_is_not_computed_again(calls, sites, count) -> None:
    model, x = built(kept_checkpoint(sites)), batch()
    mark(model)
    with frame():
        loss = model(x).square().sum()
    assert len(calls) == 3
    loss.backward()
    assert len(calls) == count
    compare(model, x)


def test_kept_and_put_off() -> None:
    deferred = DeferredGradients()
    model, x = built(kept_checkpoint(["first"])), batch()
    mark(model)
    with frame(weights=deferred):
        loss = model(x).square().sum()
    loss.backward()  # outside of the frame, which the recomputation enters again
    assert len(deferred) == 3 and model.second.weight.grad is None
    deferred.run()
    compare(model, x)


def test_two_runs_of_a_block_keep_their_own() -> None:
    kept, model = KeptOutputs(), built()
    mark(model)
    model.again = lambda block, x: checkpoint(block, x, use_reentrant=False, context_fn=kept.contexts)
    x, y = batch(), batch().detach().flip(0).requires_grad_()
    one, two = model(x), model(y)
    (one.square().sum() + (3 * two).square().sum()).backward()
    reference, u, v = built(), batch(), batch().detach().flip(0).requires_grad_()
    (reference(u).square().sum() + (3 * reference(v)).square().sum()).backward()
    assert torch.equal(x.grad, u.grad) and torch.equal(y.grad, v.grad)


@pytest.mark.parametrize("shape", [(1, 2), (3, 1, 2)])
def test_an_output_that_is_written_in_place_is_refused(shape) -> None:
    model, x = nn.Sequential(nn.Linear(2, 2), nn.ReLU(inplace=True), nn.Linear(2, 2)), torch.ones(shape)
    mark(model)
    gradient = lambda out: torch.autograd.grad(out.sum(), model[0].weight)[0]  # noqa: E731
    recomputed = lambda *sites: checkpoint(  # noqa: E731
        model, x, use_reentrant=False, context_fn=KeptOutputs(sites).contexts
    )
    with pytest.raises(
        RuntimeError, match=r"of '0' was modified in place .* \(1 times\): do not keep this site, or write"
    ):
        gradient(recomputed("0"))
    assert torch.equal(gradient(recomputed()), gradient(model(x)))
    model[1].inplace = False
    assert torch.equal(gradient(recomputed("0")), gradient(model(x)))


def test_another_way_is_refused() -> None:
    model, ways = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)]), [0, 1]
    mark(model)

    def block(x):
        return model[ways.pop(0)](x).sin()

    out = checkpoint(block, torch.ones(1, 2), use_reentrant=False, context_fn=KeptOutputs().contexts)
    with pytest.raises(RuntimeError, match="reached '1' where the first forward computed '0'"):
        out.sum().backward()


def test_a_second_recomputation_is_refused() -> None:
    model, x = built(kept_checkpoint(None)), batch()
    mark(model)
    loss = model(x).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="No output is kept for 'first'.*retain_graph=True"):
        loss.backward()
    model.zero_grad()
    x.grad = None
    for _ in range(2):  # a forward for each backward
        model(x).square().sum().backward()
    torch.testing.assert_close(model.first.weight.grad, 2 * plain()["first.weight"])


# ---- inputs ----
class Host:
    """Inputs as numpy arrays."""

    def __init__(self):
        self.held, self.log = {}, []

    def save(self, site, tensor):
        self.log.append(("save", site))
        self.held[len(self.log)] = site, tensor.detach().numpy().copy()
        return len(self.log)

    def load(self, handle):
        site, array = self.held.pop(handle)
        self.log.append(("load", site))
        return torch.from_numpy(array)


def test_inputs_are_where_the_frame_puts_them() -> None:
    model, x, host, packed = built(), batch(), Host(), []
    mark(model)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t.data_ptr()) or t, lambda t: t):
        with frame(inputs=host):
            loss = model(x).square().sum()
    assert x.data_ptr() not in packed and len(host.held) == 3
    loss.backward()
    compare(model, x)
    sites = ["first", "second", "head"]
    assert host.log == [*(("save", site) for site in sites), *(("load", site) for site in sites[::-1])]
    assert not host.held


def test_inputs_elsewhere_and_gradients_put_off() -> None:
    model, x, host, deferred = built(), batch(), Host(), DeferredGradients()
    mark(model)
    with frame(inputs=host, weights=deferred):
        model(x).square().sum().backward()
    assert len(host.held) == 3, "they are loaded when the weights' gradients are asked for"
    deferred.run()
    assert not host.held
    compare(model, x)


# ---- frames ----
def test_frames_nest_and_end() -> None:
    assert current_frame() is None
    deferred, kept = DeferredGradients(), Host()
    with frame(weights=deferred):
        with pytest.raises(KeyError), frame(inputs=kept) as inner:
            assert inner.weights is deferred and inner.inputs is kept and current_frame() is inner
            raise KeyError
        assert current_frame().inputs is None
    assert current_frame() is None


def test_a_thread_has_its_own_frame() -> None:
    seen = []
    with frame(), at_site("x"):
        thread = threading.Thread(target=lambda: seen.append(current_frame()))
        thread.start()
        thread.join()
    assert seen == [None]


def test_backward_in_another_thread() -> None:
    model, x, deferred = built(kept_checkpoint(["first"])), batch(), DeferredGradients()
    mark(model)
    with frame(weights=deferred):
        loss = model(x).square().sum()
    thread = threading.Thread(target=loss.backward)
    thread.start()
    thread.join()
    deferred.run()
    compare(model, x)


@pytest.mark.parametrize("put_off", [True, False])
def test_autocast(put_off) -> None:
    outcomes = []
    for framed in (False, True):
        torch.manual_seed(0)
        model, x, deferred = Net(), batch().detach().float().requires_grad_(), DeferredGradients()
        if framed:
            mark(model)
        with frame(weights=deferred if put_off else None), torch.autocast("cpu", dtype=torch.bfloat16):
            out = model(x)
        assert out.dtype is torch.bfloat16
        out.float().square().sum().backward()
        deferred.run()
        outcomes.append(gradients(model, x))
    for name, gradient in outcomes[1].items():
        assert gradient.dtype is torch.float32
        assert torch.allclose(gradient, outcomes[0][name], rtol=2e-2, atol=2e-2), name
