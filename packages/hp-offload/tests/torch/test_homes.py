"""Parameters that live on the host: the bits of the plain program, what visits the device and when, what is refused."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from offload_models import net
from torch import nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from hp_offload import (
    CheckpointPolicy,
    SwapManager,
    apply_memory_plan,
    checkpoint_wrapper,
    fit_memory,
    place,
    plan_cache,
    plan_memory,
    swap_wrapper,
    trace_saved,
)
from hp_offload.homes.cache import Cache
from hp_offload.port import link
from hp_offload.torch.swapping import residents

HOMES = {"embed": "host", "layers.*": "host", "head": "host"}


@pytest.fixture(autouse=True)
def nothing_stays():
    yield
    gc.collect()
    assert not residents, "parameters stayed on the device"


class Layer(nn.Module):
    """A block with a parameter of its own, one that is expanded, and one that a child never calls."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(size), nn.Linear(size, 4 * size), nn.Linear(4 * size, size)
        self.scale = nn.Parameter(torch.ones(1, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = F.gelu(self.up(self.norm(x)))
        return x + F.linear(h, self.down.weight, self.down.bias) * self.scale.expand(x.shape[-1])


class Language(nn.Module):
    """A language model whose head is its embedding."""

    def __init__(self, layers: int = 6, size: int = 8, vocabulary: int = 16) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, size)
        self.layers = nn.ModuleList(Layer(size) for _ in range(layers))
        self.norm = nn.LayerNorm(size)
        self.head = nn.Linear(size, vocabulary, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), tokens.flatten())


def language(layers: int = 6) -> Language:
    torch.manual_seed(0)
    return Language(layers).double()


def batch(step: int = 0) -> torch.Tensor:
    return torch.randint(16, (2, 5), generator=torch.Generator().manual_seed(step))


def train(model: nn.Module, steps: int = 3, accumulate: int = 2) -> list[torch.Tensor]:
    """Losses, then all parameters and gradients of the last step."""
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=0.01)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        for part in range(accumulate):
            loss = model(batch(step * accumulate + part)) / accumulate
            loss.backward()
            losses.append(loss.detach())
        optimizer.step()
    parameters = [each.detach() for each in model.parameters()]
    return [*losses, *parameters, *(each.grad for each in model.parameters() if each.grad is not None)]


def same(got, expected) -> None:
    assert len(got) == len(expected)
    for index, (one, other) in enumerate(zip(got, expected)):
        assert one.dtype is other.dtype and torch.equal(one, other), index


def size_of(module: nn.Module) -> int:
    return sum(each.nbytes for each in module.parameters())


LAYER = size_of(Layer(8).double())
EMBED = 16 * 8 * 8


# ---- bits ----
@pytest.mark.parametrize("ahead", [0, 1, 2])
@pytest.mark.parametrize("layers", [1, 2])
def test_a_model_five_times_the_cache_has_the_bits_of_the_plain_program(layers, ahead):
    model, plain = language(12), language(12)
    cache = max(LAYER * layers, EMBED)
    assert size_of(model) > 5 * cache
    parameters = dict(model.named_parameters())
    placed = place(model, HOMES, cache=cache, ahead=ahead)
    same(train(model), train(plain))
    assert all(parameter is parameters[name] for name, parameter in model.named_parameters())
    assert list(model.state_dict()) == list(plain.state_dict())
    report = placed.report()
    assert report.planned and report.peak <= report.cache == cache
    assert report.gradients == size_of(model) - size_of(model.norm) + EMBED  # the embedding's comes from two blocks


def test_order_bytes_and_peak_are_the_planners():
    model = language(5)
    placed = place(model, HOMES, cache=2 * LAYER)
    assert placed.report().order == () and placed.report().host == size_of(model) - size_of(model.norm)
    names = [f"layers.{index}" for index in range(5)]
    order = ["embed", *names, "head", *reversed(names)]  # no backward needs the embedding's own
    parts = {name: [name] for name in names} | {"embed": ["embed and head"], "head": ["embed and head"]}
    sizes = dict.fromkeys(names, LAYER) | {"embed and head": EMBED}
    plan = plan_cache(order, parts, sizes, 2 * LAYER)
    train(model, 2)
    with SwapManager().record() as events:
        model(batch()).backward()
    report = placed.report()
    assert list(report.order) == order and report.planned
    assert (report.fetched, report.evicted, report.peak) == (plan.fetched, plan.evicted, plan.peak)
    expected = []
    for use in plan.uses:
        expected += [("evict", part) for part in use.evicted] + [("fetch", part) for part in use.fetched]
    assert events[: len(expected)] == expected
    assert {what for what, _ in events[len(expected) :]} == {"evict"}  # a step ends without any


def test_the_first_step_copies_at_each_use():
    model = language(3)
    placed = place(model, HOMES, cache=LAYER)
    model(batch()).backward()
    report = placed.report()
    assert not report.planned and report.peak == LAYER
    assert report.fetched == EMBED * 2 + LAYER * 6


@pytest.mark.parametrize("name", ["float32", "bfloat16"])
def test_dtypes(name):
    model, plain = language(3).to(getattr(torch, name)), language(3).to(getattr(torch, name))
    place(model, HOMES)
    same(train(model), train(plain))


def test_frozen_parameters_and_those_that_thaw():
    models = language(4), language(4)
    placed = place(models[0], HOMES, cache=LAYER)
    for index in (0, 2):
        for model in models:
            model.layers[index].requires_grad_(False)
    same(*(train(model, 1) for model in models))
    assert models[0].layers[0].up.weight.grad is None
    frozen = placed.report().gradients
    for model in models:
        model.layers[0].requires_grad_(True)
    same(*(train(model, 1) for model in models))
    assert placed.report().gradients == frozen + LAYER


def test_evaluation_between_steps():
    models = language(4), language(4)
    placed = place(models[0], HOMES, cache=2 * LAYER)
    for mode in (torch.no_grad, torch.inference_mode, torch.no_grad):
        same(*(train(model, 2) for model in models))
        with mode():
            same([models[0](batch(7))], [models[1](batch(7))])
    report = placed.report()
    assert report.order == ("embed", *(f"layers.{index}" for index in range(4)), "head")
    assert report.planned and report.gradients == 0


def test_values_that_are_written_between_steps_are_seen():
    models = language(3), language(3)
    place(models[0], HOMES, cache=10 * LAYER)
    for write in (
        lambda parameter: parameter.data.mul_(0.5),  # no counter sees this
        lambda parameter: parameter.detach().mul_(0.5),
    ):
        for model in models:
            model(batch())  # no backward
            for parameter in model.parameters():
                write(parameter)
        same([models[0](batch())], [models[1](batch())])
    other = {name: each * 2 for name, each in models[1].state_dict().items()}
    for model in models:
        model.load_state_dict(other)
    same(*(train(model, 1) for model in models))


CHANGES = {
    "checkpoint": checkpoint_wrapper,
    "policy": lambda layer: checkpoint_wrapper(
        layer,
        lambda ctx, op, *args, **kwargs: (
            CheckpointPolicy.MUST_SAVE if op is torch.ops.aten.addmm.default else CheckpointPolicy.MUST_RECOMPUTE
        ),
    ),
    "swap": swap_wrapper,
    "checkpoint of a child": lambda layer: checkpoint_wrapper(layer.up),
}


@pytest.mark.parametrize("first", ["place", "change"])
@pytest.mark.parametrize("change", CHANGES)
def test_blocks_that_are_computed_again_or_swapped(change, first):
    model, plain = language(6), language(6)
    homes = {"layers.*": "host"}
    if first == "place":
        placed = place(model, homes, cache=2 * LAYER)
    for layer in model.layers:
        CHANGES[change](layer)
    if first == "change":
        placed = place(model, homes, cache=2 * LAYER)
    same(train(model), train(plain))
    report = placed.report()
    names = [f"layers.{index}" for index in range(6)]
    assert list(report.order) == names + names[-2::-1] and report.planned


def test_torchs_checkpoint_and_a_plan_of_memory():
    class Checkpointed(Language):
        def forward(self, tokens):
            x = self.embed(tokens)
            for layer in self.layers:
                x = torch_checkpoint(layer, x, use_reentrant=False)
            return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), tokens.flatten())

    torch.manual_seed(0)
    model, plain = Checkpointed().double(), language()
    place(model, HOMES, cache=2 * LAYER)
    same(train(model), train(plain))
    model, plain = language(), language()
    saved = trace_saved(model, (batch(),))
    plan = plan_memory(saved, budget=sum(each.bytes for each in saved) // 2, bandwidth=1e9)
    place(apply_memory_plan(model, plan), HOMES, cache=2 * LAYER)
    same(train(model), train(plain))


def test_one_budget_for_parameters_and_activations():
    pytest.importorskip("scipy", reason="plan_memory needs scipy, in hp-offload's extra plan")
    models = language(6), language(6)
    saved = trace_saved(models[1], (batch(),))
    total = sum(each.bytes for each in saved)
    placed = place(models[0], HOMES, cache=LAYER)
    with pytest.raises(RuntimeError, match="there was none yet"):
        placed.visits()
    sizes = {each.site: each.bytes for each in trace_saved(models[0], (batch(),))}
    assert sizes == {each.site: each.bytes for each in saved}, "parameters that visit are none of it"
    budget = total // 2 + 4 * LAYER
    fit_memory(models[0], budget, bandwidth=1e6, placed=placed)
    same(*(train(model) for model in models))
    report = placed.report()
    assert report.planned and report.peak <= report.cache
    assert 4 * LAYER < report.cache < budget, "over a slow link parameters come once"
    placed.resize(LAYER)
    same(*(train(model) for model in models))
    assert placed.report().peak == LAYER == placed.report().cache
    with pytest.raises(ValueError, match="smaller than block"):
        placed.resize(1)
    other = language(6)
    with pytest.raises(ValueError, match="below the least"):
        fit_memory(other, 100, placed=place(other, HOMES))(batch())


def test_a_block_that_is_used_again_and_another_that_has_two_inputs():
    class Loop(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Bilinear(4, 4, 4)

        def forward(self, tokens):
            x = torch.linspace(-1, 1, 8, dtype=torch.float64).view(2, 4) + tokens.sum()
            left, right = self.a(x).tanh(), self.b(x).tanh()
            for _ in range(3):
                left, right = self.a(self.c(left, right)).tanh(), self.b(left)
            return (left * right).sum()

    torch.manual_seed(0)
    plain = Loop().double()
    model = copy.deepcopy(plain)
    placed = place(model, {"?": "host"}, cache=size_of(model.c))
    same(train(model), train(plain))
    assert placed.report().planned


def test_two_forwards_and_one_backward():
    models = language(3), language(3)
    placed = place(models[0], HOMES, cache=LAYER)
    for model in models:
        for step in range(3):
            (model(batch(step)) * model(batch(step + 1))).backward()
    same(*([each.grad for each in model.parameters()] for model in models))
    assert placed.report().peak <= LAYER


def test_hooks_and_gradients_of_parameters():
    model, plain = language(3), language(3)
    place(model, HOMES)
    seen = []
    for each in model.parameters():
        each.register_post_accumulate_grad_hook(lambda parameter: seen.append(parameter.shape))
    expected = torch.autograd.grad(plain(batch()), [*plain.parameters()])
    same(torch.autograd.grad(model(batch()), [*model.parameters()]), expected)
    assert not seen
    model(batch()).backward()
    assert len(seen) == len(expected)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        (gradient,) = torch.autograd.grad(model(batch()), [model.layers[0].up.weight], create_graph=True)
        gradient.sum().backward()


def test_gradients_are_added_to_those_that_are_there():
    models = language(2), language(2)
    for model in models:
        model(batch()).backward()
    place(models[0], HOMES, cache=LAYER)
    for model in models:
        model(batch(1)).backward(retain_graph=True)
    same(*([each.grad for each in model.parameters()] for model in models))
    loss = models[0](batch(2))
    loss.backward(retain_graph=True)
    loss.backward()
    for _ in range(2):
        models[1](batch(2)).backward()
    same(*([each.grad for each in model.parameters()] for model in models))


def test_blocks_that_are_called_by_hand():
    models = language(3), language(3)
    place(models[0], HOMES, cache=LAYER)
    for model in models:
        for step in range(2):
            x = model.embed(batch(step))
            for layer in model.layers:
                x = layer(x)
            x.square().sum().backward()
        with torch.no_grad():
            model.layers[0](x)
    same(*([each.grad for each in model.layers.parameters()] for model in models))


# ---- errors ----
def test_an_exception_in_forward_sends_everything_home():
    model, plain = language(4), language(4)
    place(model, HOMES, cache=2 * LAYER)
    train(model, 1)
    train(plain, 1)
    homes = list(model.parameters())

    def fail(*args):
        raise KeyError("data")

    for layer in (0, 3):
        for call in (model, model.layers[layer]):
            hook = model.layers[layer].norm.register_forward_pre_hook(fail)
            with pytest.raises(KeyError):
                call(batch() if call is model else torch.ones(1, 8, dtype=torch.float64))
            hook.remove()
            assert not residents
            assert all(one is other for one, other in zip(homes, model.parameters(), strict=True))
    hook = model.layers[1].register_full_backward_hook(fail)
    with pytest.raises(KeyError):
        model(batch()).backward()
    hook.remove()
    for each in (model, plain):
        each.zero_grad()
    same(train(model, 2), train(plain, 2))


def test_a_copy_that_fails_in_between_leaves_nothing_behind(monkeypatch):
    """As where the device's memory runs out: the next step, of a smaller batch, has each parameter in its place."""
    plain, model = (language(3) for _ in range(2))
    place(model, HOMES, cache=LAYER)
    real, count = link().copy_back, 0

    def copy_back(*args):
        nonlocal count
        count += 1
        if count == 4:
            raise torch.OutOfMemoryError("no memory")
        return real(*args)

    monkeypatch.setattr(link(), "copy_back", copy_back)
    with pytest.raises(torch.OutOfMemoryError):
        model(batch())
    same(train(model), train(plain))


def test_a_write_after_the_forward_raises():
    for change in (lambda layer: layer, checkpoint_wrapper):
        model = language(3)
        place(model, HOMES, cache=LAYER)
        change(model.layers[1])
        loss = model(batch())
        with torch.no_grad():
            model.layers[1].up.weight.mul_(2)
        with pytest.raises(RuntimeError, match=r"block 'layers.1'.* modified in place 1 time.*after backward"):
            loss.backward()
        model.zero_grad()
        model(batch()).backward()


def test_a_write_in_the_forward_and_a_parameter_that_is_replaced_raise():
    class Clamp(nn.Linear):
        def forward(self, x):
            with torch.no_grad():
                self.weight.clamp_(-1, 1)
            return super().forward(x)

    model = nn.Sequential(Clamp(2, 2), nn.Linear(2, 2))
    place(model, {"*": "host"})
    with pytest.raises(RuntimeError, match=r"The forward of '0' wrote to a parameter of shape \(2, 2\)"):
        model(torch.ones(1, 2))
    model = nn.Sequential(nn.Linear(2, 2))
    place(model, {"0": "host"})
    model[0].bias = nn.Parameter(torch.ones(2))
    with pytest.raises(RuntimeError, match="bias of Linear in block '0' was replaced or moved since place"):
        model(torch.ones(1, 2))
    with pytest.raises(TypeError, match="A model with homes can't be copied or pickled"):
        copy.deepcopy(model)
    with pytest.raises(NotImplementedError, match="Block '0' .* inside of torch.compile"):
        torch.compile(nn.Sequential(placed_linear()), backend="eager")(torch.ones(1, 2))


def placed_linear() -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 2))
    place(model, {"0": "host"})
    return model


def test_refused_by_name():
    model = language(2)
    before = copy.deepcopy(model.state_dict())

    def refused(error, match, homes, model=model, **options):
        with pytest.raises(error, match=match):
            place(model, homes, **options)

    refused(ValueError, r"'layer.\*' matches no module of Language; near: layers", {"layer.*": "host"})
    refused(ValueError, r"'x' matches no module of Language; there are embed, layers", {"x": "host"})
    refused(ValueError, "'layers.*' has the unknown home 'disk'; the one home is 'host'", {"layers.*": "disk"})
    refused(ValueError, "'neighbour', whose memory is as full", {"layers.*": "neighbour"})
    refused(
        ValueError, r"'layers' and 'layers.\*' overlap: 'layers' and 'layers.0'", {"layers": "host", "layers.*": "host"}
    )
    refused(ValueError, r"'layers.0' and 'layers.\?' overlap", {"layers.0": "host", "layers.?": "host"})
    refused(ValueError, "homes is empty", {})
    refused(TypeError, "homes maps patterns", ["layers.*"])
    refused(TypeError, "place takes a module, got int", {"a": "host"}, model=3)
    refused(
        ValueError,
        f"A cache of {LAYER - 1:,} bytes is smaller than block 'layers.0', .* {LAYER:,}: give cache={LAYER}",
        {"layers.*": "host"},
        cache=LAYER - 1,
    )
    refused(ValueError, "ahead .* got -1", {"layers.*": "host"}, ahead=-1)
    refused(ValueError, "head.weight is a parameter of 'embed', too, .* 'head' has none", {"embed": "host"})
    refused(ValueError, "0.weight is on the meta device", {"0": "host"}, nn.Sequential(nn.Linear(2, 2, device="meta")))
    refused(NotImplementedError, "LSTM .*0.weight_ih_l0.* list of its own", {"0": "host"}, nn.Sequential(nn.LSTM(2, 2)))
    lazy = nn.Sequential(nn.LazyLinear(2))
    refused(NotImplementedError, "0.weight is a UninitializedParameter", {"0": "host"}, lazy)
    same([*model.state_dict().values()], [*before.values()])
    place(model, {"layers.*": "host"})
    refused(RuntimeError, "has homes already", {"layers.*": "host"})


# ---- memory ----
def test_nothing_keeps_a_graph_or_a_copy_alive():
    model = language(4)
    place(model, HOMES, cache=2 * LAYER)
    train(model, 2)
    gc.collect()
    gc.disable()
    try:
        counts = []
        for _ in range(3):
            train(model, 1)
            with torch.no_grad():
                model(batch())
            loss = model(batch())
            graph = weakref.ref(loss)
            del loss
            assert graph() is None
            counts.append(sum(isinstance(each, torch.Tensor) for each in gc.get_objects()))
        assert counts[0] >= counts[-1]
    finally:
        gc.enable()
    with torch.no_grad():
        model(batch())


def test_a_model_that_is_dropped_after_a_forward_is_freed():
    model = language(3)
    place(model, HOMES, cache=3 * LAYER)
    loss, parameter = model(batch()), weakref.ref(model.layers[1].up.weight)
    del model
    gc.collect()
    assert not residents
    loss.backward()  # the graph alone has it still
    assert parameter() is not None
    del loss
    gc.collect()
    assert parameter() is None


def test_a_graph_holds_no_parameters_of_the_device():
    """What backward needs of parameters is in the cache, or nowhere."""
    model = net(4)
    placed = place(model, {"blocks.*": "host"}, cache=size_of(model.blocks[0]))
    loss = model(torch.ones(4, 8, dtype=torch.float64))
    assert len(residents) == len([*model.blocks[3].parameters()])
    loss.backward()
    assert not residents and placed.report().peak == size_of(model.blocks[0])


# ---- the order of copies that are done later ----
class Event:
    """A copy that is done when somebody waits for it: what is read before has no values."""

    def __init__(self, copy, log, name):
        self._copy, self._log, self._name = copy, log, name

    def synchronize(self):
        self._log.append(f"{self._name} on the host")
        self.wait()

    def wait(self):
        if self._copy is not None:
            self._copy()
            self._copy = None


class Stream:
    def __init__(self, log):
        self._log = log

    def wait_stream(self, stream):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def record_event(self):
        self._log.append("gradient leaves")
        return Event(lambda: None, self._log, "gradient")


class Link:
    """Copies to the device that are done late."""

    def __init__(self, log):
        self._log = log

    def copy_back(self, buffer, nbytes, like, stream):
        assert isinstance(stream, Stream)
        new = torch.full((nbytes,), 255, dtype=torch.uint8)  # not a number
        return new.untyped_storage(), Event(lambda: new.copy_(buffer), self._log, "parameter")

    def wait(self, event):
        event.wait()


@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_every_use_waits_for_its_copy_and_the_host_for_all(monkeypatch, ahead):
    log = []
    model, plain = language(6), language(6)
    placed = place(model, HOMES, cache=3 * LAYER, ahead=ahead)
    monkeypatch.setattr("hp_offload.torch.homes.link", lambda: Link(log))
    monkeypatch.setattr(SwapManager, "streams", (Stream(log), Stream(log)))
    model.embed.weight.register_post_accumulate_grad_hook(lambda _: log.append("gradient is added"))
    same(train(model), train(plain))
    report = placed.report()
    assert report.planned and report.peak <= 3 * LAYER
    log.clear()
    model(batch()).backward()
    assert log[0] == "parameter on the host"  # a forward has returned when its copies from homes are done
    assert log.index("gradient leaves") < log.index("gradient on the host") < log.index("gradient is added")
    assert log.count("gradient leaves") == log.count("gradient on the host")
    assert "parameter on the host" in log[1:]


# ---- the cache alone ----
class Carrier:
    def __init__(self):
        self.events, self.stale = [], set()

    def fetch(self, part):
        self.events.append(f"+{part}")

    def wait(self, part):
        pass

    def drop(self, part):
        self.events.append(f"-{part}")

    def is_fresh(self, part):
        return part not in self.stale


def run(cache, carrier, order, kind="training", whole=True):
    carrier.events.clear()
    cache.begin(kind)
    for block in order:
        cache.use(block)
    cache.end(whole)
    return "".join(carrier.events)


def test_a_step_that_goes_another_way_copies_at_each_use():
    carrier = Carrier()
    cache = Cache({name: [name] for name in "abcd"}, dict.fromkeys("abcd", 1), 2, 1, carrier)
    assert run(cache, carrier, "abccba") == "+a+b-a+c-c+a-b-a" and not cache.last.planned
    assert run(cache, carrier, "abccba") == "+a+b-a+c-c+a-b-a" and cache.last.planned
    assert run(cache, carrier, "abd") == "+a+b-a+c-c+d-b-d" and not cache.last.planned
    assert run(cache, carrier, "abd") == "+a+b-a+d-b-d" and cache.last.planned
    assert run(cache, carrier, "a", whole=False) == "+a+b-b-a" and cache.last.order == ("a", "b", "d")
    assert run(cache, carrier, "ab", "evaluation") == "+a+b-a-b" and not cache.last.planned
    assert run(cache, carrier, "abd") == "+a+b-a+d-b-d" and cache.last.planned
    carrier.stale.add("a")
    assert run(cache, carrier, "aba", "other") == "+a+b-a+a-b-a"
