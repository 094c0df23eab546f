"""What the packages use of PyTorch's private interface does what its names say."""

import pytest
import torch

from hp_platform.torch import internals
from hp_platform.torch.internals import plainly


class Intercepted(torch.Tensor):
    """Tells of every function that is called with it."""

    calls: list = []

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        cls.calls.append(function)
        return super().__torch_function__(function, types, args, kwargs or {})


@pytest.fixture
def tensor():
    Intercepted.calls.clear()
    return torch.ones(2, 3, dtype=torch.float64).as_subclass(Intercepted)


def test_attributes_are_read_and_set_without_interception(tensor):
    plainly(internals.set_requires_grad, (), (tensor, True))
    plainly(internals.set_grad, (), (tensor, torch.full((2, 3), 2.0, dtype=torch.float64)))
    read = [internals.get_shape, internals.get_dtype, internals.get_device, internals.get_is_leaf]
    assert [plainly(each, (), (tensor,)) for each in read] == [(2, 3), torch.float64, torch.device("cpu"), True]
    assert plainly(internals.get_grad, (), (tensor,))[0, 0] == 2
    assert plainly(internals.get_requires_grad, (), (tensor,))
    assert not plainly(internals.get_retains_grad, (), (tensor,))
    assert type(plainly(internals.get_base, (), (tensor,))) is torch.Tensor
    empty = [internals.get_grad_fn, internals.get_hooks, internals.get_accumulation_hooks]
    assert [plainly(each, (), (tensor,)) for each in empty] == [None] * 3
    assert Intercepted.calls == []
    assert tensor.dtype is torch.float64 and Intercepted.calls  # by its name it is intercepted


def test_interception_is_switched_off_and_on(tensor):
    with internals.without_torch_function():
        assert not internals.torch_function_enabled()
        torch.add(tensor, 1)
        assert Intercepted.calls == []
        with internals.with_torch_function():
            torch.add(tensor, 1)
    with internals.without_all_torch_functions():
        torch.add(tensor, 1)
    assert len(Intercepted.calls) == 1
    assert internals.torch_function_enabled()
    assert internals.torch_functions_above() == internals.torch_dispatches_above() == 0


def test_versions_memory_and_dispatch_of_tensors():
    x, y = torch.zeros(3), torch.ones(3)
    view = x.view(3, 1)
    internals.set_versions((x,), (7,))
    assert internals.get_version(x) == 7
    assert internals.same_memory(x, view) and not internals.same_memory(x, y)
    internals.set_data(x, y)
    assert internals.same_memory(internals.get_data(x), y)
    assert internals.is_native(x)


def test_the_backward_pass_is_told():
    told, x = [], torch.ones(2, requires_grad=True)
    y = x * 2
    node = y.grad_fn
    y.register_hook(lambda grad: told.append((internals.backward_id(), internals.current_node() is node)))
    assert internals.backward_id() == -1 and not internals.in_backward()
    first = internals.next_node_number()
    y.sum().backward()
    assert told[0][0] >= 0
    (torch.ones(1, requires_grad=True) * 2).sum()
    assert internals.next_node_number() > first


def test_the_hooks_of_saved_tensors_are_told():
    def pack(x):
        return x

    assert internals.saved_hooks_above(True) is None
    with torch.autograd.graph.saved_tensors_hooks(pack, pack):
        assert internals.saved_hooks_above(True)[0] is pack


def test_transforms_and_modes_are_told():
    seen = []

    def function(x):
        seen.append((internals.transforms_active(), internals.is_transformed(x), internals.current_transform()))
        return x.sum()

    torch.func.grad(function)(torch.ones(2))
    assert seen[0][:2] == (True, True) and seen[0][2] is not None
    assert not internals.transforms_active() and internals.current_transform() is None
    assert internals.current_fake_mode() is None
    with torch._subclasses.fake_tensor.FakeTensorMode() as mode:
        assert internals.current_fake_mode() is mode
