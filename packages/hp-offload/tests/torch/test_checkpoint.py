"""Functions that run again in backward: the bits of the plain program, and errors where they could not be."""

from __future__ import annotations

import contextvars
import copy
import functools
import gc
import pickle
import threading
import weakref

import pytest
import torch
import torch.nn.functional as F
from offload_models import gradients, net, same_bits
from torch import nn
from torch.overrides import TorchFunctionMode

from hp_offload import checkpoint, checkpoint_exclude_wrapper, checkpoint_wrapper, swap, swap_wrapper


class Counted(nn.Module):
    """Counts how often its parts run."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.calls: list[str] = []
        for name, part in self.named_children():
            part.register_forward_hook(lambda *_, name=name: self.calls.append(name))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.third(self.second(self.first(x).tanh()).tanh())


def test_full_recomputation_has_the_same_bits():
    same_bits(checkpoint_wrapper)


def test_nested_checkpoints_have_the_same_bits():
    same_bits(lambda block: (checkpoint_wrapper(block.up), checkpoint_wrapper(block.down), checkpoint_wrapper(block)))


def test_the_whole_model_around_its_blocks():
    model = net()
    expected = gradients(model)
    for block in model.blocks:
        checkpoint_wrapper(block)
    checkpoint_wrapper(model)
    assert all(map(torch.equal, gradients(model), expected))


@pytest.mark.parametrize("early_stop", [True, False])
def test_the_second_run_ends_where_nothing_more_is_needed(early_stop):
    model = Counted()
    checkpoint(model, torch.ones(2, 4), early_stop=early_stop).sum().backward()
    again = ["first", "second"] if early_stop else ["first", "second", "third"]
    assert model.calls == ["first", "second", "third", *again]


def test_nothing_is_kept():
    kept = []

    def function(x):
        h = x.exp()
        kept.append(weakref.ref(h))
        return h.sin()

    x = torch.ones(3, requires_grad=True)
    out = checkpoint(function, x)
    assert kept[0]() is None
    out.sum().backward()
    assert torch.equal(x.grad, x.exp().cos() * x.exp())
    del out
    assert kept[1]() is None, "freed without the garbage collector"


def test_no_memory_waits_for_the_garbage_collector():
    gc.collect()
    gc.disable()
    try:
        model = nn.Linear(4, 4)
        x = torch.ones(2, 4, requires_grad=True)
        out = checkpoint(lambda x: model(x).exp().sin(), x)
        out.sum().backward()
        input = weakref.ref(x)
        del out, x
        assert input() is None
    finally:
        gc.enable()


def test_arguments_in_containers_and_by_name():
    def function(pair, *, named, factor):
        return (pair["a"] * pair["b"][0] * named * factor).exp()

    a, b, c = (torch.full((3,), value, dtype=torch.float64, requires_grad=True) for value in (0.1, 0.2, 0.3))
    expected = torch.autograd.grad(function({"a": a, "b": [b]}, named=c, factor=2).sum(), (a, b, c))
    out = checkpoint(function, {"a": a, "b": [b]}, named=c, factor=2, use_reentrant=False)
    assert all(map(torch.equal, torch.autograd.grad(out.sum(), (a, b, c)), expected))


def test_without_gradients_it_is_a_call():
    model = Counted()
    with torch.no_grad():
        assert not checkpoint(model, torch.ones(2, 4)).requires_grad
    out = checkpoint(lambda x: x + 1, torch.ones(2))
    assert not out.requires_grad


def test_a_graph_that_is_retained_runs_again():
    model = Counted()
    x = torch.ones(2, 4, requires_grad=True)
    out = checkpoint(model, x).sum()
    first = torch.autograd.grad(out, x, retain_graph=True)[0]
    assert torch.equal(torch.autograd.grad(out, x)[0], first)
    assert model.calls.count("first") == 3


def test_second_derivatives():
    x = torch.linspace(0.1, 1, 5, dtype=torch.float64, requires_grad=True)
    function = lambda x: (x.exp() * x).sin()  # noqa: E731
    results = []
    for out in (function(x), checkpoint(function, x)):
        (first,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        results.append(torch.autograd.grad(first.square().sum(), x)[0])
    assert torch.equal(*results)


def test_a_backward_inside():
    def function(x):
        h = x.exp()
        (inner,) = torch.autograd.grad((h * h).sum(), h, retain_graph=True)
        return h * inner.detach()

    x = torch.linspace(0, 1, 4, dtype=torch.float64, requires_grad=True)
    (expected,) = torch.autograd.grad(function(x).sum(), x)
    for early_stop in (True, False):
        assert torch.equal(torch.autograd.grad(checkpoint(function, x, early_stop=early_stop).sum(), x)[0], expected)


def test_random_numbers_stay_where_they_are():
    torch.manual_seed(3)
    x = torch.ones(64, requires_grad=True)
    out = checkpoint(lambda x: F.dropout(x.exp(), 0.5), x)
    expected = torch.rand(3)
    torch.manual_seed(3)
    F.dropout(x.exp(), 0.5)
    assert torch.equal(torch.rand(3), expected)
    before = torch.get_rng_state()
    out.sum().backward()
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(x.grad != 0, out.detach() != 0)


def test_context_variables_are_those_of_forward():
    factor = contextvars.ContextVar("factor", default=1.0)
    x = torch.tensor([0.5, 2.0], requires_grad=True)
    token = factor.set(3.0)
    out = checkpoint(lambda x: (x * factor.get()).exp(), x)
    factor.reset(token)
    out.sum().backward()
    torch.testing.assert_close(x.grad, 3 * (3 * x.detach()).exp())
    assert factor.get() == 1.0


def test_autocast_and_determinism_are_those_of_forward():
    seen = []

    def function(x):
        out = x @ x
        seen.append((out.dtype, torch.are_deterministic_algorithms_enabled()))
        return out.float().exp()

    x = torch.eye(3, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        out = checkpoint(function, x)
    torch._C._set_deterministic_algorithms(True)  # what torch.use_deterministic_algorithms does beside its imports
    try:
        out.sum().backward()
        assert torch.are_deterministic_algorithms_enabled()
    finally:
        torch._C._set_deterministic_algorithms(False)
    assert seen == [(torch.bfloat16, False)] * 2


def test_function_modes_are_those_of_forward():
    class Doubled(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            return out * 2 if func is torch.sin else out

    x = torch.ones(3, requires_grad=True)
    with Doubled():
        out = checkpoint(lambda x: torch.sin(x).exp(), x)
        (expected,) = torch.autograd.grad(torch.sin(x).exp().sum(), x)
    assert torch.equal(torch.autograd.grad(out.sum(), x)[0], expected)


def test_backward_in_another_thread():
    x = torch.ones(3, requires_grad=True)
    out = checkpoint(lambda x: x.exp().sin(), x)
    thread = threading.Thread(target=lambda: out.sum().backward())
    thread.start()
    thread.join()
    assert torch.equal(x.grad, x.exp().cos() * x.exp())


# ---- what would be wrong raises ----
def test_a_write_to_what_was_saved_raises_as_without_a_checkpoint():
    def function(x):
        y = x.exp()
        y.mul_(2)
        return y * 3

    x = torch.ones(3, requires_grad=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        function(x).sum().backward()
    with pytest.raises(RuntimeError, match=r"of .*function.* \(3,\) was modified in place 1 time .* Write to a copy"):
        checkpoint(function, x, early_stop=False).sum().backward()
    checkpoint(lambda x: x.exp() * 2 * 3, x, early_stop=False).sum().backward()
    torch.testing.assert_close(x.grad, 6 * x.detach().exp())


def test_a_parameter_that_changed_since_raises():
    model = nn.Linear(4, 4)
    out = checkpoint(model, torch.ones(2, 4, requires_grad=True))
    with torch.no_grad():
        model.weight.add_(1)
    with pytest.raises(
        RuntimeError, match=r"Between the forward of Linear.* and its recomputation, .* Change it after backward"
    ):
        out.sum().backward()
    x = torch.ones(2, 4, requires_grad=True)
    checkpoint(model, x).sum().backward()
    expected = model.weight.detach().sum(0).expand(2, 4)
    with torch.no_grad():
        model.weight.add_(1)
    torch.testing.assert_close(x.grad, expected)


def test_an_argument_that_changed_since_raises():
    x = torch.ones(3, requires_grad=True)
    h = x * 1
    out = checkpoint(lambda h: h.sin(), h)
    with torch.no_grad():
        h.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation") as error:
        out.sum().backward()
    assert "an argument of" in error.value.__notes__[0]


def test_a_buffer_that_others_write_to_since_raises():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("scale", torch.ones(()))

        def forward(self, x):
            return (x * self.scale).exp()

    module = Scaled()
    out = checkpoint(module, torch.ones(2, requires_grad=True))
    module.scale.add_(1)
    with pytest.raises(RuntimeError, match=r"of Scaled.* modified in place 1 time .* or pass it to the function as an"):
        out.sum().backward()
    x = torch.ones(2, requires_grad=True)
    out = checkpoint(lambda x, scale: (x * scale).exp(), x, module.scale)
    module.scale = module.scale + 1
    out.sum().backward()
    torch.testing.assert_close(x.grad, 2 * (2 * x.detach()).exp())


def test_another_branch_raises_and_names_the_module():
    class Routed(nn.Module):
        turns = 0

        def forward(self, x):
            self.turns += 1
            return x.exp() if self.turns == 1 else x.sin()

    with pytest.raises(
        RuntimeError, match=r"recomputation of Routed.* where its forward saved .* from ExpBackward0: it took"
    ):
        checkpoint(Routed(), torch.ones(2, 3, requires_grad=True)).sum().backward()


@pytest.mark.parametrize(("first", "second"), [(2, 1), (1, 2)])
def test_fewer_or_more_saved_tensors_raise(first, second):
    turns = iter((first, second))

    def function(x):
        for _ in range(next(turns)):
            x = x.exp()
        return x

    with pytest.raises(RuntimeError, match=r"recomputation of .*function.* saved .* that its forward|saved 1 tensors"):
        checkpoint(function, torch.ones(2, requires_grad=True), early_stop=False).sum().backward()


def test_an_exception_in_the_second_run_is_the_users():
    turns = []

    def function(x):
        turns.append(1)
        if len(turns) == 2:
            raise LookupError("no such row")
        return x.exp()

    x = torch.ones(3, requires_grad=True)
    out = checkpoint(function, x)
    before = torch.get_rng_state()
    with pytest.raises(LookupError, match="no such row"):
        out.sum().backward()
    assert torch.equal(torch.get_rng_state(), before)
    checkpoint(lambda x: x.exp(), x).sum().backward()


def test_a_handler_inside_does_not_catch_the_end_of_the_second_run():
    def function(x):
        try:
            return x.exp().sin()
        except Exception:
            raise AssertionError("caught") from None

    checkpoint(function, torch.ones(3, requires_grad=True)).sum().backward()


# ---- excluded modules ----
@pytest.mark.parametrize("save_output", [True, False])
@pytest.mark.parametrize("part", ["up", "dropout", "norm"])
def test_an_excluded_module_has_the_same_bits(save_output, part):
    def change(block):
        checkpoint_exclude_wrapper(getattr(block, part), save_output=save_output)
        checkpoint_wrapper(block)

    same_bits(change)


@pytest.mark.parametrize("save_output", [True, False])
def test_an_excluded_module_runs_once(save_output):
    model = Counted()
    checkpoint_exclude_wrapper(model.first, save_output=save_output)
    checkpoint(model, torch.ones(2, 4, requires_grad=True)).sum().backward()
    assert model.calls.count("second") == 2
    runs = []
    model.first.register_forward_hook(lambda *_: runs.append(torch.is_grad_enabled()))
    checkpoint(model, torch.ones(2, 4, requires_grad=True)).sum().backward()
    assert len(runs) == 2, "its hooks run again; its forward does not"


def test_an_excluded_module_outside_of_a_checkpoint():
    same_bits(lambda block: checkpoint_exclude_wrapper(block.up))


# ---- wrappers ----
def test_names_and_state_stay():
    model, plain = net(), net()
    for block in model.blocks:
        checkpoint_exclude_wrapper(block.up)
        assert checkpoint_wrapper(block) is block
    assert [*model.state_dict()] == [*plain.state_dict()]
    assert [name for name, _ in model.named_modules()] == [name for name, _ in plain.named_modules()]
    copied = copy.deepcopy(model)
    assert all(map(torch.equal, gradients(copied), gradients(plain)))
    assert copied.blocks[0].up.weight.grad is not model.blocks[0].up.weight.grad
    assert all(map(torch.equal, gradients(pickle.loads(pickle.dumps(model))), gradients(plain)))


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # the compiler looks at it
def test_the_compiler_inside_and_outside():
    """Compiled blocks have the bits of compiled blocks; this backend leaves them those of eager ones."""
    compiled = functools.partial(torch.compile, backend="aot_eager")

    def build(*changes):
        torch._dynamo.reset()
        model = net()
        for block in model.blocks:
            for change in changes:
                change(block)
        return gradients(model, 2)

    def compile(block):
        block.forward = compiled(block.forward)

    expected = build()
    keep_products = lambda ctx, op, *args, **kwargs: op is torch.ops.aten.bmm.default  # noqa: E731
    by_policy = functools.partial(checkpoint_wrapper, policy=keep_products)
    with_inputs = functools.partial(checkpoint_wrapper, swap_inputs=True)
    for change, text in (
        (swap_wrapper, "swap inside of torch.compile is not supported: compile the blocks, and swap around them"),
        (by_policy, "without policy_fn, .* Compile the blocks and checkpoint around them"),
        (with_inputs, r"or let the compiler choose \(torch._functorch.config.activation_memory_budget\)"),
    ):
        with pytest.raises(NotImplementedError, match=text):
            build(change, compile)
    with torch._functorch.config.patch(activation_memory_budget=0.5):
        assert all(map(torch.equal, build(compile), expected))
    for changes in (
        (compile,),
        (checkpoint_wrapper, compile),
        (compile, checkpoint_wrapper),
        (compile, swap_wrapper),
        (compile, by_policy),
        (compile, with_inputs),
        (lambda block: compile(block.up), by_policy),
    ):
        assert all(map(torch.equal, build(*changes), expected))


# ---- bad input ----
def test_bad_input():
    x = torch.ones(2)
    with pytest.raises(TypeError, match="checkpoint: function is called, and 3 can't be"):
        checkpoint(3, x)
    with pytest.raises(ValueError, match="use_reentrant=True.: there is no reentrant checkpoint"):
        checkpoint(torch.exp, x, use_reentrant=True)
    with pytest.raises(ValueError, match="policy_fn or context_fn, not both"):
        checkpoint(torch.exp, x, policy_fn=print, context_fn=print)
    with pytest.raises(TypeError, match="got two policies: policy and policy_fn; leave one out"):
        checkpoint_wrapper(nn.Linear(2, 2), print, policy_fn=print)
    for options in ({"policy": print}, {"policy_fn": print}, {"context_fn": print}):
        checkpoint_wrapper(nn.Linear(2, 2), **options)
    with pytest.raises(TypeError, match="checkpoint: policy_fn is called, and 'full' can't be"):
        checkpoint(torch.exp, x, policy_fn="full")
    with pytest.raises(
        TypeError,
        match="checkpoint_wrapper takes a module, got builtin_function_or_method; pass functions to checkpoint",
    ):
        checkpoint_wrapper(torch.exp)
    assert torch.equal(checkpoint(torch.exp, x), swap(torch.exp, x))
    with pytest.raises(ValueError, match=r'policy is "full" or a function like policy_fn, got .selective.'):
        checkpoint_wrapper(nn.Linear(2, 2), "selective")
    with pytest.raises(TypeError, match=r"takes the options swap_inputs, .* got \['early'\]"):
        checkpoint_wrapper(nn.Linear(2, 2), early=True)
    with pytest.raises(TypeError, match="checkpoint_exclude_wrapper takes a module, got int"):
        checkpoint_exclude_wrapper(3)
