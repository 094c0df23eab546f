"""Sections of a training run: its data, its loss and optimizer, its steps, its memory, and what it shows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from hp_optim.extend import decayed
from hp_plan.reading.tables import at_least, each_within, more_than, within


@dataclass(frozen=True)
class DataSection:
    """Training data: text, as bytes (a vocabulary of 256) or by a tokenizer, or files of tokens.

    An epoch has each sample once, in an order that `run.seed` decides unless `shuffle` is false.

    Attributes:
        paths: text files or folders; none means the Python sources of the running interpreter's standard library,
            without its tests. Or token files, `.bin` beside `.idx`, as `hyper-parallel data prepare` and Megatron write
            them.
        tokenizer: of text: a `tokenizer.json`, a folder that has one, or `"bytes"`. Files become documents, as by
            `hyper-parallel data prepare`, and tokens once, in the run's folder. None takes the tokenizer in
            `model.path`; where there is none, too, the files' bytes are one text.
        field: with a tokenizer, the text's name in JSON lines, Parquet and Arrow files.
        format: of JSON lines, Parquet and Arrow files: `"text"`; or examples to fine-tune on, of whose answers alone a
            loss is taken: `"messages"` (a list of messages with `role` and `content`, and maybe `tools`, written by the
            tokenizer's chat template), `"prompt-completion"`, or `"preference"` (`prompt`, `chosen` and `rejected`, for
            an objective that compares two answers). Prompts and answers are text, or lists of messages. Each sample is
            one example and padding, or with `packing` as many as fit.
        truncation: of examples longer than a sample: `"right"` keeps the beginning, `"left"` the end, `"drop"` leaves
            them out, and `"refuse"` raises. One without an answer left is left out. A run says how many.
        weights: of token files, or of paths with a tokenizer: each path's part of the samples, in any unit; none is by
            their tokens.
        packing: of token files, or with a tokenizer: each sample holds whole documents, which don't see each other and
            of whose first token no loss is taken; false cuts samples from the tokens of all documents side by side.
        shuffle: take the samples of each epoch in a random order; false takes them as they follow each other in the
            files, which packed and weighted samples don't. Samples to validate on are drawn as ever.
        sequence_length: tokens of one sample.
        batch_size: samples of one step over all ranks; pairs, of preferences.
        max_bytes: read no more than this of text as bytes.
    """

    paths: tuple[str, ...] = ()
    tokenizer: str | None = None
    field: str = "text"
    format: Literal["text", "messages", "prompt-completion", "preference"] = "text"
    truncation: Literal["right", "left", "drop", "refuse"] = "right"
    weights: tuple[float, ...] = at_least(0.0, ())
    packing: bool = False
    shuffle: bool = True
    sequence_length: int = at_least(2, 128)
    batch_size: int = at_least(1, 8)
    max_bytes: int = at_least(1, 64_000_000)

    @property
    def width(self) -> int:
        """Rows of one sample: two of a pair of answers."""
        return 2 if self.format == "preference" else 1


@dataclass(frozen=True)
class ObjectiveSection:
    """The loss that training makes smaller (PyTorch, but for `"causal-lm"`).

    Attributes:
        kind: `"causal-lm"` predicts each token from those before it. `"dpo"` raises the probability of the preferred of
            two answers over that of the other, in relation to a reference that is not trained (Rafailov et al., "Direct
            Preference Optimization", 2023). `"reward"` trains a model with one output to score the preferred answer
            higher (Bradley and Terry, 1952; Ouyang et al., 2022). `"distill"` makes the predictions those of a teacher
            (Hinton et al., "Distilling the Knowledge in a Neural Network", 2015). The second and the third take
            `data.format = "preference"`, of which a sample is a pair.
        function: `"module:function"` in place of a kind; called with the model and a dictionary of `input_ids`,
            `labels` and, with packing, `position_ids`. It returns the sum of its losses over the labels that count,
            which are `labels[:, 1:] != -100`, or over the pairs of preferences, whose rows follow each other, the
            preferred one first. The sums of all ranks are divided by the number of these labels or pairs.
        reference: the folder of dpo's reference, or of the teacher, with the mesh and styles of the model; none takes
            the model as it is before training: without its adapter if it has one, else a second copy.
        beta: how much dpo holds the model to its reference.
        loss: of a pair, dpo's: `"sigmoid"`, `"hinge"` (Zhao et al., 2023) or `"ipo"` (Azar et al., 2023, of mean
            log-probabilities of a token).
        label_smoothing: the part of dpo's preferences that is taken to be wrong (Mitchell, 2023).
        temperature: by which a teacher's and a student's logits are divided; the loss is multiplied by its square.
        mix: the part of the usual loss over the labels in that of distillation.
    """

    kind: Literal["causal-lm", "dpo", "reward", "distill"] = "causal-lm"
    function: str | None = None
    reference: str | None = None
    beta: float = more_than(0.0, 0.1)
    loss: Literal["sigmoid", "hinge", "ipo"] = "sigmoid"
    label_smoothing: float = within(0.0, 0.5, 0.0)
    temperature: float = more_than(0.0, 1.0)
    mix: float = within(0.0, 1.0, 0.0)

    @property
    def is_own(self) -> bool:
        """True if the loss is not the one that a model returns."""
        return self.kind != "causal-lm" or self.function is not None


@dataclass(frozen=True)
class OptimizerGroup:
    """Parameters with values of their own, in an array of tables. A parameter is in one group at most.

    Attributes:
        patterns: of the parameters, such as `"model.layers.*.*norm.weight"`.
        weight_decay: theirs; none takes the optimizer's.
        lr_multiple: their learning rate, as a multiple of the optimizer's, at each step of the schedule.
    """

    patterns: tuple[str, ...] = ()
    weight_decay: float | None = at_least(0.0, None)
    lr_multiple: float = more_than(0.0, 1.0)


@dataclass(frozen=True)
class OptimizerSection:
    """The optimizer and its constants.

    Attributes:
        name: `adamw`, `sgd`, `muon`, or `adamw8bit`: AdamW with states of eight bits.
        lr: the learning rate at the schedule's top.
        betas: AdamW's averaging of the gradient and of its square.
        eps: AdamW's divisor offset.
        weight_decay: decoupled for AdamW and Muon, added to the gradient for SGD.
        momentum: SGD's.
        muon: of `muon`, patterns of the parameters that Muon trains; AdamW trains the others. None means the hidden
            matrices: all but embeddings, output layers, norms and biases.
        muon_momentum: Muon's averaging of the gradient.
        groups: parameters with a weight decay or a learning rate of their own.
        swap_slices: of `adamw` and `muon`, keep states on the host, and bring them to the device in so many slices of a
            step; 0 keeps them on the device.
    """

    name: Literal["adamw", "sgd", "muon", "adamw8bit"] = "adamw"
    lr: float = more_than(0.0, 1e-3)
    betas: tuple[float, float] = each_within(0.0, 1.0, (0.9, 0.999))
    eps: float = more_than(0.0, 1e-8)
    weight_decay: float = at_least(0.0, 0.01)
    momentum: float = at_least(0.0, 0.0)
    muon: tuple[str, ...] = ()
    muon_momentum: float = within(0.0, 1.0, 0.95)
    groups: tuple[OptimizerGroup, ...] = ()
    swap_slices: int = at_least(0, 0)


@dataclass(frozen=True)
class ScheduleSection:
    """The learning rate over the run: up from 0 in `warmup_steps`, then by `kind` down to `final * lr`.

    Attributes:
        kind: `constant`, `linear`, `cosine` or `wsd`: warm up, stay, decay over the last `decay_steps`.
        warmup_steps: optimizer steps until the learning rate is the optimizer's.
        final: the last learning rate as a part of the optimizer's (no use for `constant`).
        decay_steps: of `wsd`; 0 is a tenth of the run.
        decay: of `wsd`, the shape: `linear`, `cosine`, `exponential` or `minus_sqrt`.
    """

    kind: Literal["constant", "linear", "cosine", "wsd"] = "constant"
    warmup_steps: int = at_least(0, 0)
    final: float = at_least(0.0, 0.0)
    decay_steps: int = at_least(0, 0)
    decay: Literal["linear", "cosine", "exponential", "minus_sqrt"] = "linear"


def schedule_factor(section: ScheduleSection, step: int, steps: int) -> float:
    """Return the factor of the learning rate at step `step` (from 0) of `steps`.

    >>> [schedule_factor(ScheduleSection("linear", warmup_steps=2), step, 6) for step in range(6)]
    [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]
    """
    if step < section.warmup_steps:
        return (step + 1) / section.warmup_steps
    if section.kind == "constant":
        return 1.0
    start = section.warmup_steps
    if section.kind == "wsd":
        start = max(start, steps - (section.decay_steps or max(1, steps // 10)))
    progress = min(1.0, max(0, step - start) / max(1, steps - start))
    falling = decayed(section.decay if section.kind == "wsd" else section.kind, progress)
    return section.final + (1.0 - section.final) * falling


@dataclass(frozen=True)
class RunSection:
    """One training run.

    Attributes:
        steps: optimizer steps.
        seed: of the weights and of the samples.
        dtype: of the weights.
        grad_clip: scale gradients down to this global norm; none leaves them alone.
        accumulate: micro-batches that a rank's part of the batch is cut into, one after the other; their gradients are
            added up, and exchanged in the last. Stages have micro-batches of their own (`pipeline.micro_batches`).
        deterministic: weights have the same bits in each run, and on any number of ranks of `dp_replicate` and
            `dp_shard` that divides the step's micro-batches.
        generation: with `"exact"`, and `deterministic`, the log-probabilities that `generating` reports have the same
            bits as those of the training forward; both are slower then (PyTorch, on CPUs). With `"plain"` they differ
            by rounding.
        platform: the framework that the model is written for; none takes the one in use (see `get_platform`).
        checkpoint_every: save a checkpoint after so many steps; 0 saves at the end and when the run is stopped.
        checkpoint_layout: `"files"`, which all ranks write together, are a Hugging Face model; `"shards"` are files of
            each rank that writes, which `hyper-parallel checkpoint convert` joins; `"auto"` takes the first unless two
            ranks can't write one file in the run's folder, which it tries.
        keep: so many checkpoints, the newest.
        keep_best: so many with the smallest validation loss as well; `checkpoint_every` is a multiple of
            `validation.every` then. A checkpoint of a step that was not validated, as when the run is stopped, is none
            of them.
        stop_within: seconds between SIGTERM and the end of a rank: enough for a step and a checkpoint.
        hang_after: seconds without a move of any rank after which a run is ended, with the name of the rank that holds
            it up; six times as many before the end of the first step, in a save and at the end. 0 waits forever.
    """

    steps: int = at_least(1, 100)
    seed: int = at_least(0, 0)
    dtype: Literal["float64", "float32", "bfloat16", "float16"] = "float32"
    grad_clip: float | None = more_than(0.0, None)
    accumulate: int = at_least(1, 1)
    deterministic: bool = False
    generation: Literal["plain", "exact"] = "plain"
    platform: Literal["torch", "mindspore"] | None = None
    checkpoint_every: int = at_least(0, 0)
    checkpoint_layout: Literal["auto", "files", "shards"] = "auto"
    keep: int = at_least(1, 2)
    keep_best: int = at_least(0, 0)
    stop_within: float = more_than(0.0, 25.0)
    hang_after: float = at_least(0.0, 300.0)


@dataclass(frozen=True)
class MemorySection:
    """A rank's memory, and what it is made to fit.

    Attributes:
        budget: of a rank for its shard of weights, gradients and optimizer states, and for what backward needs of each
            block, such as `"20GiB"`; what of the latter does not fit is swapped or computed again, by a plan that the
            first step makes (`hp_offload.fit_memory`), with the cache of `homes` on one rank. None keeps everything.
        recompute: patterns of modules that backward computes again, in place of what they save for it.
        swap: patterns of modules whose saved activations wait on the host.
        homes: where the parameters of modules live, with their gradients and optimizer states, by pattern:
            `{"model.layers.*" = "host"}`. They visit the device when they are used: on one rank by `hp_offload.place`,
            on several as groups whose shards are on the host, as `fsdp.offload` has all of them.
        cache: bytes of the device for parameters that visit, such as `"4GiB"`; on one rank. None is what `budget`
            leaves for it, else twice the largest module of `homes`.
        bandwidth: between device and host, bytes a second in each direction; 0 swaps nothing.
    """

    budget: str | None = None
    recompute: tuple[str, ...] = ()
    swap: tuple[str, ...] = ()
    homes: Mapping[str, str] = field(default_factory=dict)
    cache: str | None = None
    bandwidth: float = at_least(0.0, 25e9)


@dataclass(frozen=True)
class MetricsSection:
    """Where a run's metrics go, beside the display and `metrics.jsonl`.

    Attributes:
        sinks: `tensorboard` writes event files into the run's folder; `wandb` sends them to Weights & Biases, as its
            own environment variables say (`WANDB_PROJECT`, `WANDB_MODE`).
        peak_flops: operations a second that one device can do in the dtype that the model computes in; MFU is the part
            of them that the model takes. None is that of a known device; of any other, MFU is left out.
    """

    sinks: tuple[Literal["tensorboard", "wandb"], ...] = ()
    peak_flops: float | None = more_than(0.0, None)


@dataclass(frozen=True)
class ValidationSection:
    """Loss on data that is not trained on, with the sequence length, packing and batch size of `[data]`; and texts.

    Attributes:
        paths: as `data.paths`; none validates nothing.
        every: so many steps, and at the end of the run.
        batches: how many of `data.batch_size` samples; the same samples each time, and in each run.
        prompts: texts that the model goes on with as often; none writes nothing.
        prompt_tokens: how many tokens it writes after each.
    """

    paths: tuple[str, ...] = ()
    every: int = at_least(1, 100)
    batches: int = at_least(1, 8)
    prompts: tuple[str, ...] = ()
    prompt_tokens: int = at_least(1, 64)


@dataclass(frozen=True)
class ProfileSection:
    """Steps that are profiled, as a trace for Chrome or Perfetto: `profile/rank-0.json` in the run's folder.

    Attributes:
        start: the first of them, from 1; none profiles nothing.
        steps: how many.
        ranks: which ranks write one.
    """

    start: int | None = at_least(1, None)
    steps: int = at_least(1, 3)
    ranks: tuple[int, ...] = at_least(0, (0,))


@dataclass(frozen=True)
class MonitorSection:
    """Numbers of tensors that a run writes as it trains.

    They are in the run's folder, in files of each rank; `hyper-parallel monitor show` and `monitor compare` read them.
    A monitored run (`every` is not 0) looks at the gradients' norm before the optimizer's step. Where it isn't finite
    the step is run once more to find the module, rank and element where the first such number was born, and no weight
    has it.

    Attributes:
        every: read the first step and each so many after it; 0 reads nothing.
        phases: `"loss"` (each rank's), `"gradient"` (before clipping), `"weight"` and `"moment"` (after the step) of
            parameters; `"forward"` and `"backward"`, the output of modules and the gradient with respect to it.
        names: patterns of modules, such as `"model.layers.*"`: their outputs and all parameters inside. None reads all
            parameters, and the modules that have no others inside.
        numbers: of each tensor: `"norm"`; `"range"`, its smallest and largest element; `"zeros"`, the part of them that
            is zero; `"bits"`, the sum of the elements' bits, by which runs are compared to the last of them. Zeros cost
            most, then the range.
    """

    every: int = at_least(0, 0)
    phases: tuple[Literal["loss", "forward", "backward", "gradient", "weight", "moment"], ...] = ("loss", "gradient")
    names: tuple[str, ...] = ()
    numbers: tuple[Literal["norm", "range", "zeros", "bits"], ...] = ("norm", "range")


@dataclass(frozen=True)
class RecoverySection:
    """How `hyper-parallel train --recover` goes on when a process is lost (PyTorch).

    Attributes:
        every: keep a copy of each rank's state after so many steps, in memory that the launcher holds; a fault costs
            the steps since then.
        holders: so many copies, each in memory of its own: where one has other bits than were written, the next is
            taken.
        replace: `"lost"` puts a spare process into the place of one that is lost, and the others stay; `"all"` replaces
            every process. None is `"lost"` over gloo, and `"all"` over other backends, whose collectives one process
            can't end.
        limit: so many recoveries an hour; then the run ends with the error.
        same_step: so many faults in one step; then it is taken for a fault of the program, and ends the run.
        wait_for_spare: seconds that a fault waits for a spare to be ready.
    """

    every: int = at_least(1, 1)
    holders: int = at_least(1, 1)
    replace: Literal["lost", "all"] | None = None
    limit: int = at_least(1, 3)
    same_step: int = at_least(1, 2)
    wait_for_spare: float = more_than(0.0, 30.0)


@dataclass(frozen=True)
class SdcSection:
    """What looks for silent data corruption: numbers that a device computes, keeps or sends wrongly without an error.

    Both look for bits that differ where the same work has been done twice, so that work has to give the same bits on
    each rank: `run.deterministic`, or kernels that are known to be so. The first step checks that, and a run that can't
    be compared is refused there.

    Attributes:
        replicas: after each step compare the bits of the weights and optimizer states that several ranks hold
            (`dp_replicate`, what `tp` leaves whole, weights that stages share). Of three or more copies most are right;
            of two that differ nobody knows which is.
        replay_every: in the first step and each so many after it other ranks compute each rank's samples again, and the
            bits of all modules are compared; where they differ, a third computation decides. 0 never does. With one
            data parallel rank it computes them again itself, and finds what does not last.
        on_fault: `"report"` tells and goes on. `"restore"` computes a step anew before its update and takes corrupt
            weights and states from a replica, three times at one step at most; what lasts, or can't be told, ends the
            run. `"replace"` does the same, but a rank that is wrong twice ends its own process, and one of the spares
            of `hyper-parallel train --recover` goes on in its place from a copy of the last step whose computations
            agreed; where nobody can tell which rank is wrong, the run ends.
    """

    replicas: bool = False
    replay_every: int = at_least(0, 0)
    on_fault: Literal["report", "restore", "replace"] = "restore"
