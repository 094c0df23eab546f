"""`[data]`, `[run]` and `[memory]`: one training run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hp_plan.sections.bounds import at_least, more_than


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
            first step makes (`hp_offload.fit_memory`). None keeps everything.
        recompute: patterns of modules that backward computes again, in place of what they save for it.
        swap: patterns of modules whose saved activations wait on the host.
        bandwidth: between device and host, bytes a second in each direction; 0 swaps nothing.
    """

    budget: str | None = None
    recompute: tuple[str, ...] = ()
    swap: tuple[str, ...] = ()
    bandwidth: float = at_least(0.0, 25e9)
