"""`generating`: transformers' `generate` on a model under a plan.

Note [Draws by number]
    A token is drawn from its distribution by a number in [0, 1) that is a function of a seed, of the number of its
    prompt among all, and of its place after the prompt. So the tokens of a prompt do not depend on the rank that
    generates them, nor on what else is in its batch, as far as the probabilities have the same bits. transformers draws
    by `torch.multinomial`: the last of its processors of logits leaves it the one token that the number chooses.
"""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hp_fsdp import FSDPModule
from hp_fsdp.extend import kept_gathered
from hp_fsdp.torch.extend import all_gathered
from hp_pipeline import PipelinedModel
from hp_plan.torch.generation.exact.forward import exact, is_exact, refuse_later_modules
from hp_plan.torch.generation.log_probabilities import log_probabilities, refuse_cut_texts
from hp_plan.torch.generation.stages import Forwards, forwards_of, stand_in
from hp_plan.torch.training.objectives import evaluating
from hp_platform import collectives, get_platform
from hp_platform.groups import default_group
from hp_styles.extend import style_of

T = torch.Tensor
_ASSISTED = (
    "generating: what candidates of an assistant or of a lookup in the prompt are worth is not recorded; leave out"
    " assistant_model and prompt_lookup_num_tokens"
)
_64 = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class GenerationReport:
    """How far what generation said of its tokens is from what the model's forward in training says of them.

    Attributes:
        tokens: generated on this rank, ends of texts with them, padding without.
        largest: difference of two log-probabilities of one token, in nats.
        equal: share of tokens with the same bits.
        row: of the text with the largest difference.
        place: of that token, counted from the prompt's end.
    """

    tokens: int
    largest: float
    equal: float
    row: int
    place: int

    def __str__(self) -> str:
        """Say it in a line."""
        if not self.tokens:
            return "no token was generated"
        return (
            f"{self.tokens} tokens: log-probabilities differ by at most {self.largest:.2g} (text {self.row}, token"
            f" {self.place}), {self.equal:.0%} have the same bits"
        )


class Generation:
    """What `generating` yields.

    Attributes:
        gathered: names of the groups of `fully_shard` whose parameters stay gathered.
        sequences: what the last `generate` returned, (rows, prompt and new tokens); None before.
        log_probabilities: of its new tokens, (rows, new tokens), as generation computed them, at temperature 1 and
            before any filter; 0 after a text's end. None where beams were searched.
        counts: (rows, new tokens), True for tokens up to the end of their text.
    """

    def __init__(
        self,
        model: nn.Module,
        gathered: list[str],
        seed: int | None,
        *,
        forwards: Forwards | None,
        whole: Sequence[FSDPModule],
    ) -> None:
        self._model, self._seed, self._forwards, self._whole = model, seed, forwards, whole
        self._owner: Any = model if forwards is None else stand_in(forwards)
        self.gathered = gathered
        self.sequences: T | None = None
        self.log_probabilities: T | None = None
        self.counts: T | None = None
        self._mask: T | None = None

    def report(self) -> GenerationReport:
        """Compare the log-probabilities of the last `generate` with those of one forward of whole texts.

        Every rank calls it, after its `generate`.

        Raises:
            RuntimeError: before a `generate`, or after one with beams.
        """
        if self.sequences is None or self.log_probabilities is None or self.counts is None:
            raise RuntimeError("report: call it after a generate without beams, in the same generating(...)")
        new = self.log_probabilities.shape[1]
        mask = torch.ones_like(self.sequences)
        if self._mask is not None:
            mask[:, : self._mask.shape[1]] = self._mask
        if new:
            mask[:, -new:] = self.counts
        with torch.no_grad():
            whole = log_probabilities(self._model, self.sequences, attention_mask=mask).log_probabilities
        whole = whole[:, whole.shape[1] - new :]
        both = self.log_probabilities[self.counts], whole[self.counts].to(self.log_probabilities.dtype)
        if not both[0].numel():
            return GenerationReport(0, 0.0, 1.0, 0, 0)
        differences = torch.where(self.counts, (self.log_probabilities - whole).abs(), 0.0)
        row, place = divmod(int(differences.argmax()), new)
        equal = float((both[0] == both[1]).double().mean())
        return GenerationReport(both[0].numel(), float(differences.max()), equal, row, place)

    def _generate(self, original: Any, *args: Any, samples: Sequence[int] | None = None, **options: Any) -> Any:
        name = next((name for name in ("inputs", "input_ids") if options.get(name) is not None), "inputs")
        prompts, *rest = args if args else (options.pop(name, None),)
        if samples is not None:
            try:
                samples = list(map(operator.index, samples))
            except TypeError:
                raise ValueError(f"generate: samples= must be the numbers of prompts, got {samples!r}") from None
        batch = len(prompts) if isinstance(prompts, torch.Tensor) else -1
        if not batch:  # transformers takes no batch of none: a text that ends at once stands in, and is dropped
            prompts, samples = prompts.new_zeros((1, max(prompts.shape[1], 1))), None if samples is None else [0]
            options |= {"attention_mask": torch.ones_like(prompts), "stopping_criteria": [_ends_at_once]}
        if options.get("assistant_model") is not None:
            raise ValueError(_ASSISTED)
        owner, shared = self._owner, self._forwards is not None or any(map(style_of, self._model.modules()))
        if self._forwards is not None:
            self._forwards.compare({"prompts": prompts, "seed": self._seed, "samples": samples, **options})
            options.setdefault("synced_gpus", self._forwards.in_step)
        elif self._whole and not shared:  # forwards exchange nothing
            options.setdefault("synced_gpus", False)
        recorder = _Recorder(self._seed, samples, shared=shared, exact=is_exact(self._model))
        inner, inner_stops = owner._get_logits_processor, owner._get_stopping_criteria

        @functools.wraps(inner)
        def with_recorder(generation_config: Any, *args: Any, **options: Any) -> Any:
            processors = inner(generation_config, *args, **options)
            recorder.begin(generation_config)
            processors.insert(0, _Processor(recorder.look))
            if recorder.draws:
                processors.append(_Processor(recorder.draw))
            return processors

        def with_stops(*args: Any, **options: Any) -> Any:
            criteria = inner_stops(*args, **options)
            if shared and any(type(each).__name__ == "MaxTimeCriteria" for each in criteria):
                raise ValueError("generate: ranks that share a model would stop at different times; leave max_time out")
            return recorder.watched(criteria)

        owner._get_logits_processor, owner._get_stopping_criteria = with_recorder, with_stops
        owner._has_unfinished_sequences = _texts_are_left
        try:
            with contextlib.ExitStack() as stack:
                # What is drawn by number leaves torch's generators as they are.
                stack.enter_context(torch.random.fork_rng(enabled=self._seed is not None, **_generators(owner)))
                for root in self._whole:
                    stack.enter_context(all_gathered(root))
                output = original(*([] if prompts is None else [prompts]), *rest, **options)
        finally:
            del owner._get_logits_processor, owner._get_stopping_criteria, owner._has_unfinished_sequences
        if not batch:
            output = output[:0] if isinstance(output, torch.Tensor) else output.sequences[:0]
        sequences: T = output if isinstance(output, torch.Tensor) else output.sequences
        self.sequences = sequences
        self.log_probabilities, self.counts = recorder.end(sequences)
        mask = options.get("attention_mask")
        if mask is None and isinstance(prompts, torch.Tensor):
            mask = recorder.inferred_mask(prompts)
        each = len(sequences) // len(mask) if mask is not None and batch else 1
        self._mask = None if mask is None else mask[: len(sequences)].repeat_interleave(each, 0)
        return output


def _texts_are_left(done: bool, in_step: bool, device: torch.device) -> bool:
    """Tell whether to go on: where ranks go in step, as long as any has texts. A rank that is lost is named."""
    if not in_step:
        return not done
    left = torch.tensor(not done, dtype=torch.int32, device=device)
    collectives.all_reduce(left, group=default_group())
    return bool(left)


def _generators(model: nn.Module) -> dict[str, Any]:
    """Return what of torch's generators a model's device has, as arguments of `fork_rng`."""
    device = next(model.parameters()).device
    return {"devices": []} if device.type == "cpu" else {"devices": [device], "device_type": device.type}


class _Processor:
    """A processor of logits. transformers reads the signature of ``__call__`` for each token: Python's own is fast."""

    def __init__(self, process: Callable[[T, T], T]) -> None:
        self._process = process

    def __call__(self, ids: T, scores: T) -> T:
        return self._process(ids, scores)


def _ends_at_once(ids: T, scores: Any, **options: Any) -> T:
    return torch.ones(len(ids), dtype=torch.bool, device=ids.device)


class _Recorder:
    """Notes log-probabilities as tokens are chosen, and chooses them; see Note [Draws by number]."""

    def __init__(self, seed: int | None, samples: Sequence[int] | None, *, shared: bool, exact: bool) -> None:
        self._seed, self._samples, self._shared, self._exact = seed, samples, shared, exact
        self._stopped: list[T] = []
        self._padding: T | None = None
        self._found: list[T] = []
        self._before: T | None = None
        self._prompt = -1
        self._ends: T | None = None
        self.draws = False
        self._beams = False

    def begin(self, config: Any) -> None:
        """Read how tokens are chosen.

        Raises:
            ValueError: numbers of prompts are missing, or there is nothing to draw by them.
        """
        if config.get_generation_mode() == "assisted_generation":
            raise ValueError(_ASSISTED)
        self._beams = (config.num_beams or 1) > 1
        self._padding = getattr(config, "_pad_token_tensor", None)
        self._ends = getattr(config, "_eos_token_tensor", None)
        self.draws = bool(config.do_sample) and self._seed is not None
        if config.do_sample and self._seed is None and self._shared and get_platform().groups.size() > 1:
            raise ValueError(
                "generate: ranks that share a model (tp, pp) would draw different tokens of one prompt, each by its own"
                " generator; pass generating(seed=)"
            )
        if self.draws and self._beams:
            raise ValueError("generating(seed=): beams are not drawn by number; take num_beams=1, or no seed")
        if self.draws and self._samples is None:
            if get_platform().groups.size() > 1:
                raise ValueError(
                    "generate: with generating(seed=) on several ranks pass samples=, the number of each prompt among"
                    " those of all ranks; ranks that share prompts (tp, pp) pass the same"
                )
        if self._samples is not None and not self.draws:
            raise ValueError("generate: samples= is for do_sample=True inside generating(model, seed=...)")

    def watched(self, criteria: Any) -> Any:
        """Return the criteria that stop texts, which note what they say."""
        watched = _watching(type(criteria))(criteria)
        watched.stopped = self._stopped
        return watched

    def inferred_mask(self, prompts: T) -> T | None:
        """Return the mask that transformers makes of prompts that come without one."""
        pad, ends = self._padding, self._ends
        if pad is None or not bool(torch.isin(prompts, pad.to(prompts.device)).any()):
            return None
        if ends is not None and bool(torch.isin(ends, pad).any()):
            return None
        return prompts.ne(pad.to(prompts.device)).long()

    def look(self, ids: T, scores: T) -> T:
        """Note the log-probabilities of the next token, before any filter."""
        if self._prompt < 0:
            self._prompt = ids.shape[1]
        if not self._beams:
            self._note(ids)
            with exact(self._exact):
                self._before = scores - scores.logsumexp(-1, keepdim=True)
        return scores

    def _note(self, ids: T) -> None:
        if self._before is not None:
            self._found.append(self._before.gather(-1, ids[:, -1:]))

    def draw(self, ids: T, scores: T) -> T:
        """Leave one token of each row."""
        rows = len(scores)
        samples = range(rows) if self._samples is None else self._samples
        each = rows // max(len(samples), 1)
        if each * len(samples) != rows:
            raise ValueError(f"generate: samples= has {len(samples)} numbers for {rows} texts")
        place = ids.shape[1] - self._prompt
        assert self._seed is not None
        drawn = [uniform(self._seed, samples[row // each], row % each, place) for row in range(rows)]
        numbers = torch.tensor(drawn, dtype=torch.float64, device=scores.device)[:, None]
        sums = scores.double().softmax(-1).cumsum(-1)
        chosen = torch.searchsorted(sums, numbers * sums[:, -1:], right=True).clamp_max(scores.shape[-1] - 1)
        return torch.full_like(scores, -torch.inf).scatter_(-1, chosen, 0.0)

    def end(self, sequences: T) -> tuple[T | None, T | None]:
        """Return the log-probabilities of the new tokens, and which of them count."""
        if self._beams or self._prompt < 0:
            return None, None
        new = sequences[:, self._prompt :]
        if len(sequences):
            self._note(sequences)
        elif self._before is not None:
            self._found.append(self._before[:, :1])
        found = torch.cat(self._found, 1)[: len(new), : new.shape[1]]
        stops = torch.stack(self._stopped, 1)[: len(new), : new.shape[1]].long()
        over = (stops.cumsum(1) - stops) > 0  # after a stop transformers fills up
        return torch.where(over, 0.0, found), ~over


@functools.cache
def _watching(kind: Any) -> Any:
    """Return a class of lists of criteria that keeps what they say; one for all, since classes are cycles."""

    class Watching(kind):
        stopped: list[T]

        def __call__(self, *args: Any, **options: Any) -> T:
            done = super().__call__(*args, **options)
            self.stopped.append(done)
            return done

    return Watching


def uniform(seed: int, *numbers: int) -> float:
    """Return a number in [0, 1) that looks drawn, a function of the arguments alone.

    It mixes 64 bits by the finalizer of Steele, Lea and Flood, "Fast splittable pseudorandom number generators",
    OOPSLA 2014, once for each argument; 53 of them are used.
    """
    state = seed & _64
    for number in (*numbers, 0):
        state = (state + 0x9E3779B97F4A7C15 * (number + 1)) & _64
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _64
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _64
        state ^= state >> 31
    return (state >> 11) / float(1 << 53)


@contextlib.contextmanager
def generating(model: nn.Module, *, seed: int | None = None, memory: int | None = None) -> Iterator[Generation]:
    """Generate with a model under a plan: inside, `model.generate` is transformers' own, and fast and repeatable.

    The model is in evaluation mode. Groups of `fully_shard` gather their parameters as `model.generate` begins, and
    keep them instead of gathering them for each token; at the end all are shards again. Ranks whose texts end early
    wait for the others where forwards exchange anything: under styles, in stages, and where groups do not stay
    gathered. Under `pp` every rank generates the same texts: the stages take turns at each token, and the last one's
    logits go to all.

    Example:
        >>> with generating(model, seed=0) as generation:
        ...     texts = model.generate(ids, attention_mask=mask, do_sample=True, max_new_tokens=64, samples=numbers)
        ...     print(generation.report())

    Args:
        model: a causal language model of transformers, plain or under a plan. Every rank of the plan calls it; ranks
            of one pipeline pass the same prompts and options to `generate`.
        seed: of draws. With it `model.generate(..., do_sample=True)` draws each token by (seed, number of the prompt,
            place), so tokens do not depend on the layout; on several ranks it needs `samples=`, the number of each
            prompt of this rank among those of all, and torch's generators are left as they were. Default: torch's
            generator draws.
        memory: bytes of gathered parameters that may stay on a device; groups that do not fit are gathered for each
            token. Default: all stay.

    Yields:
        A `Generation`.

    Raises:
        NotImplementedError: a model with `cp`, stages that are not of `hp_pipeline.split_model`, no `generate`; an
            exact model in float64 or float16, or that modules have joined. Under `pp` `generate` raises it for caches
            other than `DynamicCache` and for states of blocks (`output_hidden_states`, `output_attentions`).
        ValueError: a seed that is no whole number, a negative number of bytes. `generate` raises it for what is drawn
            or recorded wrongly: no `seed` where ranks share a model, no `samples` on several ranks, beams that are
            drawn with a seed, candidates of an assistant, `max_time` where ranks share a model, other prompts or
            options on the ranks of a pipeline.
    """
    refuse_cut_texts(model, "generating")
    forwards = forwards_of(model, "generating") if isinstance(model, PipelinedModel) else None
    owner: Any = model if forwards is None else forwards.last
    if not callable(getattr(owner, "generate", None)) or not hasattr(owner, "_get_logits_processor"):
        raise NotImplementedError(f"generating: {type(owner).__name__} has no generate of transformers")
    if is_exact(model):
        refuse_later_modules(model)
        if any(each.dtype not in (torch.float32, torch.bfloat16) for each in model.parameters()):
            raise NotImplementedError(
                "generating: with generation = 'exact' weights must be float32 or bfloat16: transformers chooses tokens"
                " by logits in float32"
            )
    if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int)):
        raise ValueError(f"generating: seed must be a whole number, got {seed!r}")
    if memory is not None and memory < 0:
        raise ValueError(f"generating: memory must be a number of bytes, got {memory}")
    with contextlib.ExitStack() as stack:
        stack.enter_context(evaluating(model))
        roots = [model] if forwards is None else list(forwards.model.stages.values())
        sharded = [each for each in roots if isinstance(each, FSDPModule)]
        gathered, whole = stack.enter_context(kept_gathered(sharded, memory))
        generation = Generation(model, gathered, seed, forwards=forwards, whole=sharded if whole else ())
        caller: Any = model
        before = vars(caller).get("generate")
        caller.generate = functools.partial(generation._generate, generation._owner.generate)
        try:
            yield generation
        finally:
            if before is None:
                del caller.generate
            else:
                caller.generate = before
