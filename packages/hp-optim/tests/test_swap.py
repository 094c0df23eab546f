"""States on the host: the bits of the optimizer as it was, the order of copies, state dicts, what is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from optim_layouts import give, mesh_of
from optim_models import net
from torch import nn

from hp_fsdp import fully_shard, get_optimizer_state_dict, set_optimizer_state_dict
from hp_optim import AdamW, ChainedOptimizer, Muon, SwapOptimizerConfig, get_hyper_optimizer, swap_optimizer
from hp_optim.swapping import cut_in_slices
from hp_platform import get_platform
from hp_testing import device_type, on_ranks

pytestmark = pytest.mark.framework("torch")
Make = Callable[[nn.Module], Any]


class Log:
    """A link that takes notes; copies are done at once."""

    streams = (None, None)

    def __init__(self) -> None:
        self.events: list[str] = []

    def note(self, what: str, name: str) -> None:
        self.events.append(f"{what} {name}")


def adamw(model: nn.Module) -> AdamW:
    named = list(model.named_parameters())
    return AdamW([{"params": named[::2]}, {"params": named[1::2], "lr": 0.05}], amsgrad=True)


def muon(model: nn.Module) -> Muon:
    return Muon([(name, each) for name, each in model.named_parameters() if each.dim() > 1], nesterov=False)


def chained(model: nn.Module) -> ChainedOptimizer:
    matrices = [name for name, each in model.named_parameters() if each.dim() > 1]
    return get_hyper_optimizer(model, matrices, ["*.bias"])


def config(**options: Any) -> SwapOptimizerConfig:
    return SwapOptimizerConfig(**{"swap_times": 4, "min_numel": 16, **options})


def device_net() -> nn.Module:
    return net(torch.float32).to(device_type())


def steps(model: nn.Module, optimizer: Any, first: int, last: int) -> None:
    for step in range(first, last):
        give(model, step, torch.float32, ("out.weight",) if step == 1 else ())
        optimizer.step()


def states(optimizer: Any) -> list[dict[str, Any]]:
    each = optimizer.optimizers.values() if isinstance(optimizer, ChainedOptimizer) else [optimizer]
    return [one.state[parameter] for one in each for group in one.param_groups for parameter in group["params"]]


def check_same(one: Any, other: Any) -> None:
    for parameter, truth in zip(one.parameters(), other.parameters()):
        assert torch.equal(parameter, truth)


@pytest.mark.device
@pytest.mark.parametrize("make", [adamw, muon, chained])
@pytest.mark.parametrize("packed", [True, False])
def test_bits_are_those_of_the_optimizer_as_it_was(make: Make, packed: bool):
    model, truth = device_net(), device_net()
    reference = make(truth)
    swapped = make(model)
    assert swap_optimizer(swapped, config(packed_swap=packed)) is swapped
    for each in states(swapped):
        assert all(value.device.type == "cpu" for key, value in each.items() if value.numel() >= 16 and key != "step")
    steps(model, swapped, 0, 4), steps(truth, reference, 0, 4)
    check_same(model, truth)
    own, other = swapped.state_dict()["state"], reference.state_dict()["state"]
    for name, each in other.items():
        assert list(own[name]) == list(each)
        for key, value in each.items():
            assert torch.equal(own[name][key].cpu(), value.cpu()), (name, key)


def test_the_next_slice_arrives_before_one_is_updated():
    model, log = device_net(), Log()
    optimizer = swap_optimizer(AdamW(model.parameters()), config(), link=log)
    steps(model, optimizer, 0, 1)
    expected = ["load 0", "load 1", "update 0", "store 0", "load 2", "update 1", "store 1", "load 3", "update 2"]
    expected += ["store 2", "update 3", "store 3"]
    assert log.events == [f"{what} AdamW[{number}]" for what, number in map(str.split, expected)]
    del log.events[:]
    optimizer = swap_optimizer(muon(model), config(swap_times=2), link=log)
    steps(model, optimizer, 0, 1)
    assert log.events == ["load Muon[0]", "load Muon[1]", "store Muon[0]", "store Muon[1]"]


class Spy:
    """A stream, and notes of what is asked of it."""

    def __init__(self, name: str, calls: list[str]) -> None:
        self.name, self.calls = name, calls
        self.stream = get_platform().devices.stream()
        self.events: list[Any] = []

    def wait_stream(self, stream: Any) -> None:
        self.calls.append(f"{self.name} waits for the current stream")
        self.stream.wait_stream(stream)

    def wait_event(self, event: Any) -> None:
        self.calls.append(f"{self.name} waits for an event")
        self.stream.wait_event(event)

    def record_event(self) -> Any:
        self.calls.append(f"{self.name} copied")
        return self.stream.record_event()

    def __enter__(self) -> Any:
        return self.stream.__enter__()

    def __exit__(self, *error: Any) -> None:
        self.stream.__exit__(*error)


@pytest.mark.device
@pytest.mark.not_on("torch-cpu", reason="copies are done at once; the test above shows their order")
def test_copies_run_aside_and_wait_for_each_other():
    calls: list[str] = []
    log: Any = Log()
    log.streams = Spy("out", calls), Spy("in", calls)
    log.note = lambda what, name: calls.append(f"{what} {name}")
    model = device_net()
    optimizer = swap_optimizer(AdamW(model.parameters()), config(), link=log)
    steps(model, optimizer, 0, 1)
    del calls[:]
    steps(model, optimizer, 1, 2)
    copied_in, copied_out = ["in waits for an event", "in copied"], ["out waits for the current stream", "out copied"]
    expected: list[str] = []
    for entry in ("load 0", "load 1", "update 0", "store 0", "load 2", "update 1", "store 1", "load 3"):
        what, number = entry.split()
        expected += [f"{what} AdamW[{number}]", *{"load": copied_in, "store": copied_out}.get(what, [])]
    assert calls[: len(expected)] == expected
    assert states(optimizer)[0]["exp_avg"].is_pinned()


@pytest.mark.device
@pytest.mark.parametrize("make", [adamw, muon, chained])
def test_states_are_loaded_from_and_by_the_optimizer_as_it_was(make: Make):
    model, other, truth = device_net(), device_net(), device_net()
    first, second, reference = make(model), swap_optimizer(make(other), config()), make(truth)
    steps(truth, reference, 0, 6), steps(model, first, 0, 2)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    other.load_state_dict(model.state_dict())
    steps(other, second, 2, 4)
    first.load_state_dict(copy.deepcopy(second.state_dict()))
    model.load_state_dict(other.state_dict())
    steps(model, first, 4, 6)
    check_same(model, truth)


def test_states_of_torchs_adamw():
    model, other = device_net(), device_net()
    first, second = torch.optim.AdamW(model.parameters(), fused=True), AdamW(other.parameters(), fused=True)
    swap_optimizer(second, config())
    steps(model, first, 0, 2)
    second.load_state_dict(first.state_dict())
    other.load_state_dict(model.state_dict())
    steps(model, first, 2, 4), steps(other, second, 2, 4)
    for parameter, truth in zip(other.parameters(), model.parameters()):
        torch.testing.assert_close(parameter, truth, rtol=0, atol=1e-6)
    first.load_state_dict(second.state_dict())
    assert float(first.state[next(model.parameters())]["step"]) == 4


@on_ranks(2)
@pytest.mark.parametrize("make", [adamw, muon, chained])
def test_shards_and_their_states_by_name(make: Make):
    torch.set_num_threads(1)
    models = []
    for swapped in (False, True):
        model = device_net()
        fully_shard(model, mesh_of(2))
        optimizer = make(model)
        if swapped:
            swap_optimizer(optimizer, config())
        steps(model, optimizer, 0, 3)
        state = copy.deepcopy(get_optimizer_state_dict(model, optimizer))
        steps(model, optimizer, 3, 4)
        set_optimizer_state_dict(model, optimizer, state)
        steps(model, optimizer, 4, 6)
        models.append(model)
    for parameter, truth in zip(models[1].parameters(), models[0].parameters()):
        assert torch.equal(parameter.full_tensor(), truth.full_tensor())


def test_what_stays_on_the_device():
    model, log = device_net(), Log()
    optimizer = AdamW(model.named_parameters())
    before = {parameter: dict(state) for parameter, state in optimizer.state.items()}
    swap_optimizer(optimizer, config(min_numel=192, state_keys=["exp_avg"], swap_times=2), link=log)
    blocks: list[Any] = optimizer._blocks
    slices = [block for block in blocks if hasattr(block, "slot")]
    assert len(slices) == 2 and {name for each in slices for name in each.names} == {
        *("experts.up", "experts.down", "qkv.weight", "out.weight")
    }
    assert all(list(each.slot_starts) == ["exp_avg"] for each in slices)
    memory = {each.slot.memory.data_ptr(): each.slot.memory.numel() for each in slices}
    assert sum(memory.values()) == 2 * 4 * (384 + 384)  # of one state of 1,152 elements
    assert len(before) == 10
    steps(model, optimizer, 0, 1)
    assert log.events[:3] == ["load AdamW[0]", "load AdamW[1]", "update AdamW[0]"]


def test_slots_are_three_however_many_slices_there_are():
    weights = [nn.Parameter(torch.zeros(1024, device=device_type())) for _ in range(32)]
    optimizer: Any = swap_optimizer(AdamW(weights), SwapOptimizerConfig())
    slots = {id(block.slot): block.slot.memory.numel() for block in optimizer._blocks}
    assert len(optimizer._blocks) == 16 and list(slots.values()) == [2 * 2 * 4096] * 3


def test_slices_are_about_equal():
    assert cut_in_slices([4, 4, 1, 1, 9], lambda item: item, 6) == [[4, 4], [1, 1, 9]]
    assert cut_in_slices([9, 1, 1], lambda item: item, 3) == [[9], [1, 1]]
    assert cut_in_slices([], lambda item: item, 3) == []


def test_groups_and_states_that_come_later():
    model, truth = device_net(), device_net()
    optimizers = []
    for each, swapped in ((model, True), (truth, False)):
        named = list(each.named_parameters())
        optimizer: Any = AdamW(named[:4])
        if swapped:
            swap_optimizer(optimizer, config())
        steps(each, optimizer, 0, 2)
        optimizer.add_param_group({"params": named[4:], "lr": 0.1})
        state = optimizer.state[named[0][1]]
        state["exp_avg"] = torch.full_like(state["exp_avg"], 0.5)
        steps(each, optimizer, 2, 4)
        optimizers.append(optimizer)
    check_same(model, truth)
    assert optimizers[0].state[model.get_parameter("out.weight")]["exp_avg"].device.type == "cpu"


@pytest.mark.not_on("torch-npu-sim", reason="it has no sparse tensors")
def test_an_error_in_a_step_leaves_the_states_on_the_host():
    model = device_net()
    optimizer = swap_optimizer(AdamW(model.named_parameters()), config())
    before = [dict(state) for state in states(optimizer)]
    give(model, 0, torch.float32)
    model.experts.down.grad = torch.ones(4, 12, 8).to_sparse()  # type: ignore[union-attr]
    with pytest.raises(RuntimeError, match=r"gradient of 'experts.down' is sparse"):
        optimizer.step()
    for state, own in zip(states(optimizer), before):
        assert all(state[key] is own[key] for key in ("exp_avg", "exp_avg_sq"))


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"swap_times": 0}, ValueError, r"SwapOptimizerConfig: swap_times must be at least 1, got 0"),
        ({"swap_times": 2.0}, TypeError, r"SwapOptimizerConfig: swap_times must be an integer, got 2.0"),
        ({"min_numel": -1}, ValueError, r"SwapOptimizerConfig: min_numel must be at least 0, got -1"),
        ({"packed_swap": 1}, TypeError, r"SwapOptimizerConfig: packed_swap must be True or False, got 1"),
        ({"state_keys": "exp_avg"}, TypeError, r"state_keys must be a sequence of names .*got 'exp_avg'"),
        ({"state_keys": []}, ValueError, r"state_keys is empty; name the states, or leave it out"),
    ],
)
def test_configs_that_are_refused(options: dict[str, Any], error: type[Exception], text: str):
    with pytest.raises(error, match=text):
        SwapOptimizerConfig(**options)
    if "state_keys" in options:
        assert SwapOptimizerConfig(state_keys=("exp_avg",)).state_keys == ("exp_avg",)
        assert SwapOptimizerConfig().state_keys is None


def test_what_is_refused():
    weight = nn.Parameter(torch.zeros(2000, device=device_type()))
    with pytest.raises(TypeError, match=r"takes an AdamW or a Muon of hp_optim, .*got torch.optim.adamw.AdamW. hp_opt"):
        swap_optimizer(torch.optim.AdamW([weight]))
    weight.grad = torch.ones_like(weight)
    theirs, ours = torch.optim.AdamW([weight]), AdamW([weight])
    theirs.step()
    ours.load_state_dict(theirs.state_dict())
    swap_optimizer(ours).step()
    assert float(ours.state[weight]["step"]) == 2
    with pytest.raises(TypeError, match=r"swap_optimizer: config must be a SwapOptimizerConfig, got 16"):
        swap_optimizer(AdamW([weight]), 16)  # type: ignore[arg-type]
    keys = SwapOptimizerConfig(state_keys=("exp_avq",))
    with pytest.raises(ValueError, match=r"state_keys has 'exp_avq'; the states are .* Did you mean 'exp_avg'"):
        swap_optimizer(AdamW([weight]), keys)
    swap_optimizer(AdamW([weight]), SwapOptimizerConfig(state_keys=("exp_avg",)))
    optimizer = swap_optimizer(AdamW([weight]))
    with pytest.raises(RuntimeError, match=r"swap_optimizer: this AdamW is swapped already"):
        swap_optimizer(optimizer)
    optimizer.param_groups[0]["amsgrad"] = True
    with pytest.raises(RuntimeError, match=r"amsgrad was switched on afterwards; set it when you make the AdamW"):
        optimizer.step()
    optimizer = swap_optimizer(AdamW([weight], amsgrad=True))
    optimizer.step()
    assert bool(optimizer.state[weight]["max_exp_avg_sq"].any())
    image = nn.Parameter(torch.zeros(8, 3, 8, 8, device=device_type()).to(memory_format=torch.channels_last))
    for again in (False, True):
        optimizer = swap_optimizer(AdamW([image]), SwapOptimizerConfig(min_numel=8))
        image.grad = torch.ones_like(image)
        optimizer.step()
        if not again:
            image.data = image.data.contiguous()
            with pytest.raises(RuntimeError, match=r"in another order than before. Change memory formats before you m"):
                optimizer.step()


@pytest.mark.device
@pytest.mark.not_on("torch-cpu", reason="the host is the device")
def test_parameters_on_the_host_are_refused():
    with pytest.raises(ValueError, match=r"parameter 'w' is on the host, and its states are there, too"):
        swap_optimizer(AdamW([("w", nn.Parameter(torch.zeros(3)))]))
    weight = nn.Parameter(torch.zeros(3, device=device_type()))
    weight.grad = torch.ones_like(weight)
    swap_optimizer(AdamW([("w", weight)])).step()
    assert bool((weight < 0).all())
