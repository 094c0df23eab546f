"""`[objective]`: the loss that training makes smaller."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hp_plan.sections.bounds import more_than, within


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
