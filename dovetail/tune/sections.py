"""What a recipe says of learning from preferences, and of a reward model.

What a recipe says of learning from a teacher.

What a recipe says of the reference: the model that a policy is compared with, by DPO and by a KL term.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Self

from dovetail.core.choice import not_negative, one_of, require
from dovetail.models.config import ModelConfig
from dovetail.ops.token_loss import DIVERGENCES

WITHOUT_REFERENCE = ("orpo", "simpo")
MIXED = ("sigmoid", "robust", "ipo", "hinge", "apo_zero", "apo_down", "bco_pair", "sft")  # those that may be in a list
LOSSES = (*MIXED, "kto", *WITHOUT_REFERENCE)
SMOOTHED = ("sigmoid", "robust", "simpo")
REFERENCES = ("", "live", "disk", "none")


@dataclass(frozen=True)
class Preference:
    # sigmoid is DPO's: see tune.preference_losses. A list is their sum, times loss_weights; sft is the cross entropy of
    # the chosen completions
    loss_type: tuple[str, ...] | str = "sigmoid"
    loss_weights: tuple[float, ...] = ()  # of a list: one of each; 1 unless given
    beta: float = 0.1  # how much a log-ratio counts; of orpo, the weight of the odds (its lambda)
    label_smoothing: float = 0.0  # the share of pairs taken to be the wrong way round: of sigmoid, robust and simpo
    gamma: float = 0.5  # simpo: the margin to reach, in rewards
    desirable: float = 1.0  # kto: what a good document's loss weighs
    undesirable: float = 1.0  # and a bad one's
    # where the reference's log-probabilities come from: a model that is run (live), or the rows (disk), to which they
    # were written beforehand; unless given, live where the loss has a reference
    reference: str = ""

    def __post_init__(self) -> None:
        self._check_losses()
        one_of("reference", self.reference, REFERENCES)
        require(self.beta > 0, f"beta must be above 0, such as 0.1; got {self.beta}")
        not_negative(self, "gamma", "desirable", "undesirable")
        self._check_smoothing()
        if self.losses[0] in WITHOUT_REFERENCE:
            require(
                self.reference in ("", "none"), f"reference must be none: {self.told} has none; got {self.reference!r}"
            )
        else:
            require(
                self.reference != "none", f"reference must be live or disk: {self.told} compares with one; got none"
            )

    def _check_losses(self) -> None:
        listed, weights = isinstance(self.loss_type, tuple), self.loss_weights
        for name in self.losses:
            one_of("loss_type", name, MIXED if len(self.losses) > 1 else LOSSES)
        require(
            any(name != "sft" for name in self.losses),
            "loss_type must include a preference loss, such as [sigmoid, sft], got sft alone: use `dovetail sft` "
            "to train on completions.",
        )
        require(
            len(set(self.losses)) == len(self.losses),
            f"loss_type must not name a loss twice, got {', '.join(self.losses)}.",
        )
        require(
            not weights or (listed and len(weights) == len(self.losses)),
            f"loss_weights must have one number for each of the losses ({self.told}), got {len(weights)}.",
        )
        require(all(0 < w < math.inf for w in weights), f"loss_weights must be above 0, got {list(weights)}.")

    def _check_smoothing(self) -> None:
        share = self.label_smoothing
        require(0 <= share < 0.5, f"label_smoothing must be at least 0 and below 0.5; got {share}")
        require(
            share == 0 or any(name in SMOOTHED for name in self.losses),
            f"label_smoothing is of the losses {', '.join(SMOOTHED)}; {self.told} has none: set it to 0",
        )
        require(
            "robust" not in self.losses or share > 0,
            "label_smoothing must be above 0 for the loss robust, which without it is sigmoid",
        )

    @property
    def losses(self) -> tuple[str, ...]:
        return (self.loss_type,) if isinstance(self.loss_type, str) else self.loss_type

    @property
    def weights(self) -> dict[str, float]:
        """Return what each loss is multiplied with, by its name."""
        return dict(zip(self.losses, self.loss_weights or (1.0,) * len(self.losses), strict=True))

    @property
    def is_kto(self) -> bool:
        return self.losses == ("kto",)

    @property
    def told(self) -> str:
        return " + ".join(self.losses)

    @property
    def source(self) -> str:
        """Of the reference's log-probabilities: live, disk or none."""
        return self.reference or ("none" if self.losses[0] in WITHOUT_REFERENCE else "live")


@dataclass(frozen=True)
class RewardLoss:
    """A reward model: a score of each document, learnt from pairs."""

    margin: bool = False  # rows say in a column `margin` by how much the chosen score should lead
    centering: float = 0.0  # the weight of (chosen + rejected)^2: keeps scores near 0

    def __post_init__(self) -> None:
        not_negative(self, "centering")


LIKENESSES = ("cosine", "mse")
TEACHERS = ("live", "disk")


@dataclass(frozen=True)
class AttentionLoss:
    """What the student attends to made what the teacher attends to: KL(teacher || student) of how each spreads over the
    tokens, averaged over its heads. Whole maps [T, T] are in memory for it: for short rows."""

    weight: float = 0.0  # beside the other parts of the loss; 0: none
    student: tuple[int, ...] = ()  # which layers, from 1; unless given, the last
    teacher: tuple[int, ...] = ()  # and of the teacher, one for each of the student's

    def __post_init__(self) -> None:
        not_negative(self, "weight")
        require(
            len(self.student) == len(self.teacher),
            "teacher must have a number of layers for each of student's; "
            f"got student={list(self.student)}, teacher={list(self.teacher)}",
        )
        for name in ("student", "teacher"):
            require(
                min(getattr(self, name), default=1) >= 1,
                f"{name} must be numbers of layers from 1, the first; got {list(getattr(self, name))}",
            )


@dataclass(frozen=True)
class FeatureLoss(AttentionLoss):
    """The student's hidden states after these layers, projected by a weight that is learnt too, made like the
    teacher's."""

    kind: str = "cosine"  # 1 - cos, or mse

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of("kind", self.kind, LIKENESSES)


@dataclass(frozen=True)
class Distillation:
    """The loss is alpha T^2 divergence(softmax(teacher / T), softmax(student / T)) + (1 - alpha) cross entropy, over
    targets alone. T^2 makes up for a temperature's effect on the gradient, which is 1 / T^2 of it."""

    kind: str = "forward"  # KL(teacher || student); reverse; or jsd, with beta between the two (GKD)
    beta: float = 0.5  # jsd: 0 is forward, 1 is reverse
    alpha: float = 0.5  # the weight of the divergence from the teacher; 1 - alpha is that of cross entropy
    temperature: float = 1.0  # of both distributions
    top_k: int = 0  # the teacher's likeliest words, over which both distributions are renormalised; 0: all words
    teacher: str = "live"  # run beside the student; or disk: its likeliest words are in the rows
    features: FeatureLoss = FeatureLoss()
    attention: AttentionLoss = AttentionLoss()

    def __post_init__(self) -> None:
        one_of("kind", self.kind, DIVERGENCES)
        one_of("teacher", self.teacher, TEACHERS)
        require(0 <= self.beta <= 1, f"beta must be from 0 (forward) to 1 (reverse); got {self.beta}")
        require(0 <= self.alpha <= 1, f"alpha must be a share of the loss from 0 to 1; got {self.alpha}")
        require(self.temperature > 0, f"temperature must be above 0; got {self.temperature}")
        not_negative(self, "top_k")
        require(
            self.teacher == "live" or self.top_k > 0,
            "top_k must say how many of the teacher's likeliest words the rows hold (teacher=disk), such as 32; got 0",
        )
        for name in ("features", "attention"):
            require(
                self.teacher == "live" or getattr(self, name).weight == 0,
                f"{name}.weight must be 0 with teacher=disk: the rows hold only words of it; set teacher=live",
            )


def check_teacher(cfg: ModelConfig, teacher_cfg: ModelConfig) -> None:
    require(
        not teacher_cfg.scored, "the teacher gives texts a score and has no words to teach: choose a model that writes"
    )
    require(
        cfg.vocab == teacher_cfg.vocab,
        f"the teacher must have the student's vocabulary, of {cfg.vocab:,} words; it has {teacher_cfg.vocab:,}: "
        "choose a teacher with the same tokenizer",
    )


MODELS = ("policy", "base")
MIXUP_ALPHA = 0.6


@dataclass(frozen=True)
class ReferenceSettings:
    # policy: the weights that the run starts with, those of from_adapter included; base: the model without them
    model: str = "policy"
    sync_every: int = 0  # steps between updates of the reference from the policy (TRL's ref_model_sync_steps); 0: none
    mixup_alpha: float = MIXUP_ALPHA  # of an update: reference = alpha policy + (1 - alpha) reference

    def __post_init__(self) -> None:
        one_of("model", self.model, MODELS)
        not_negative(self, "sync_every")
        require(0 < self.mixup_alpha <= 1, f"mixup_alpha must be above 0 and at most 1, got {self.mixup_alpha}.")
        require(
            self.mixup_alpha == MIXUP_ALPHA or self.sync_every > 0,
            f"mixup_alpha={self.mixup_alpha} is the share of the policy in an update of the reference, and there are "
            "none: set sync_every, such as 512, or leave mixup_alpha out.",
        )
        require(
            self.model == "policy" or not self.sync_every,
            f"sync_every={self.sync_every} updates the reference from the policy, and model=base keeps it: leave one "
            "of them out.",
        )

    def check(self, lora: bool, from_adapter: str) -> None:
        """Refuse what does not fit the policy."""
        require(
            self.model == "policy" or bool(from_adapter),
            f"reference.model={self.model} is the model without from_adapter, which is not set: leave it out.",
        )
        require(
            not (self.sync_every and lora) or self.mixup_alpha == 1,
            f"reference.mixup_alpha must be 1 with lora, got {self.mixup_alpha}: the two matrices of an adapter cannot "
            "be mixed one by one. Set it to 1, which copies the adapter, or train all weights.",
        )

    def kept(self, from_adapter: str) -> Self | None:
        """Return these settings if the training state must hold the reference: where it changes, or starts from an
        adapter. None: it is a frozen model."""
        return self if self.sync_every or (from_adapter and self.model == "policy") else None
