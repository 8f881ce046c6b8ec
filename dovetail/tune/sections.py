"""Sections of fine-tuning recipes: samples, preference, reward, reference and distillation."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Self

from dovetail.core.choice import not_negative, one_of, require
from dovetail.core.training import TorchModel
from dovetail.models.config import ModelConfig
from dovetail.ops.token_loss import DIVERGENCES

WITHOUT_REFERENCE = ("orpo", "simpo")
MIXED = ("sigmoid", "robust", "ipo", "hinge", "apo_zero", "apo_down", "bco_pair", "sft")  # those that a list may have
LOSSES = (*MIXED, "kto", *WITHOUT_REFERENCE)
SMOOTHED = ("sigmoid", "robust", "simpo")
READ_BY = {"gamma": "simpo", "desirable": "kto", "undesirable": "kto"}  # keys of `preference` that one loss reads
REFERENCES = ("", "live", "disk", "none")
REFERENCE_MODELS = ("policy", "base")
MIXUP_ALPHA = 0.6
SIMILARITIES = ("cosine", "mse")
TEACHERS = ("live", "disk")


@dataclass(frozen=True)
class SampleSettings:
    """Answers of the model to a few prompts during training, for the report."""

    every: int = 0  # steps between samples; 0: never
    prompts: tuple[str, ...] = ()  # the prompts: user messages, where the tokenizer has a chat template
    tokens: int = 64  # the most tokens of an answer

    def __post_init__(self) -> None:
        not_negative(self, "every")
        require(self.tokens >= 1, f"tokens must be at least 1; got {self.tokens}", param="tokens")
        require(
            bool(self.every) == bool(self.prompts),
            f"every and prompts must be set together; got every={self.every}, prompts={list(self.prompts)}",
            param="every",
        )


@dataclass(frozen=True)
class Preference:
    """The loss of preference training: see tune.preference_losses."""

    # sigmoid is DPO's. A list is the weighted sum of its losses; sft is the cross entropy of the chosen completions
    loss_type: tuple[str, ...] | str = "sigmoid"
    loss_weights: tuple[float, ...] = ()  # one for each loss of a list; default: 1 each
    beta: float = 0.1  # scale of the log-ratios; of orpo, the weight of the odds ratio (its lambda)
    label_smoothing: float = 0.0  # assumed share of pairs with swapped labels: of sigmoid, robust and simpo
    gamma: float = 0.5  # simpo: the target reward margin
    desirable: float = 1.0  # kto: weight of the loss of desirable documents
    undesirable: float = 1.0  # kto: weight of the loss of undesirable documents
    # where the reference's log-probabilities come from: a model that runs beside the policy (live), or a column that is
    # computed before the training (disk); default: live, if the loss has a reference
    reference: str = ""

    def __post_init__(self) -> None:
        self._check_losses()
        one_of("reference", self.reference, REFERENCES)
        require(self.beta > 0, f"beta must be above 0, such as 0.1; got {self.beta}", param="beta")
        not_negative(self, "gamma", "desirable", "undesirable")
        for key, loss in READ_BY.items():
            _require_read(self, key, loss in self.losses, f"loss_type={loss}")
        self._check_smoothing()
        has_reference = self.losses[0] not in WITHOUT_REFERENCE
        allowed = ("", "live", "disk") if has_reference else ("", "none")
        require(
            self.reference in allowed,
            f"reference must be {'live or disk' if has_reference else 'none'} with loss_type={self.loss_name}; got "
            f"{self.reference!r}",
            param="reference",
        )

    def _check_losses(self) -> None:
        names, weights = self.losses, self.loss_weights
        for name in names:
            one_of("loss_type", name, MIXED if len(names) > 1 else LOSSES)
        require(
            any(name != "sft" for name in names),
            "loss_type must include a preference loss, such as [sigmoid, sft], got sft alone: use `dovetail sft` to "
            "train on completions",
            param="loss_type",
        )
        require(
            len(set(names)) == len(names), f"loss_type must not name a loss twice; got {self.loss_name}",
            param="loss_type",
        )  # fmt: skip
        require(
            not weights or (isinstance(self.loss_type, tuple) and len(weights) == len(names)),
            f"loss_weights must have one number for each loss ({self.loss_name}); got {len(weights)}",
            param="loss_weights",
        )
        require(
            all(0 < w < math.inf for w in weights), f"loss_weights must be above 0; got {list(weights)}",
            param="loss_weights",
        )  # fmt: skip

    def _check_smoothing(self) -> None:
        share, key = self.label_smoothing, "label_smoothing"
        require(0 <= share < 0.5, f"{key} must be at least 0 and below 0.5; got {share}", param=key)
        require(
            share == 0 or any(name in SMOOTHED for name in self.losses),
            f"{key} is read by {', '.join(SMOOTHED)} only, got {share} with {self.loss_name}: leave it out",
            param=key,
        )
        require(
            "robust" not in self.losses or share > 0,
            f"{key} must be above 0 with loss_type=robust; without it, robust is sigmoid",
            param=key,
        )

    @property
    def losses(self) -> tuple[str, ...]:
        """Return the names of the losses."""
        return (self.loss_type,) if isinstance(self.loss_type, str) else self.loss_type

    @property
    def weights(self) -> dict[str, float]:
        """Return the weight of each loss, by its name."""
        return dict(zip(self.losses, self.loss_weights or (1.0,) * len(self.losses), strict=True))

    @property
    def is_kto(self) -> bool:
        """Return whether the records are unpaired."""
        return self.losses == ("kto",)

    @property
    def loss_name(self) -> str:
        """Return the losses as one name, for messages."""
        return " + ".join(self.losses)

    @property
    def source(self) -> str:
        """Return where the reference's log-probabilities come from: live, disk or none."""
        return self.reference or ("none" if self.losses[0] in WITHOUT_REFERENCE else "live")


@dataclass(frozen=True)
class RewardLoss:
    """The loss of a reward model."""

    margin: bool = False  # the records have a field `margin`: by how much the chosen score should lead
    centering: float = 0.0  # weight of (chosen + rejected)^2, which keeps scores near 0

    def __post_init__(self) -> None:
        not_negative(self, "centering")


@dataclass(frozen=True)
class ReferenceSettings:
    """The reference model that the policy is compared with, in DPO and in a KL term."""

    # policy: the weights that the run starts with, those of from_adapter included; base: the model without the adapter;
    # dpo: also a torch module, {torch: package.module:function}
    model: str | TorchModel = "policy"
    sync_every: int = 0  # steps between updates of the reference from the policy (TRL's ref_model_sync_steps); 0: none
    mixup_alpha: float = MIXUP_ALPHA  # an update is: reference = alpha policy + (1 - alpha) reference

    def __post_init__(self) -> None:
        if isinstance(self.model, str):
            one_of("model", self.model, REFERENCE_MODELS)
        not_negative(self, "sync_every")
        alpha, key = self.mixup_alpha, "mixup_alpha"
        require(0 < alpha <= 1, f"{key} must be above 0 and at most 1; got {alpha}", param=key)
        require(
            alpha == MIXUP_ALPHA or self.sync_every > 0,
            f"{key} requires sync_every, got {key}={alpha} and sync_every=0: set sync_every, such as 512, or leave "
            f"{key} out",
            param=key,
        )
        require(
            self.model == "policy" or not self.sync_every,
            f"sync_every must be 0 with model=base, which does not change; got {self.sync_every}",
            param="sync_every",
        )

    def check(self, lora: bool, from_adapter: str) -> None:
        """Refuse settings that do not fit the policy."""
        require(
            self.model == "policy" or isinstance(self.model, TorchModel) or bool(from_adapter),
            f"reference.model={self.model} requires from_adapter, which is not set: leave reference.model out",
            param="reference.model",
        )
        require(
            not (self.sync_every and lora) or self.mixup_alpha == 1,
            f"reference.mixup_alpha must be 1 with lora, got {self.mixup_alpha}: the two matrices of an adapter cannot "
            "be averaged separately. Set it to 1, which copies the adapter, or train all weights",
            param="reference.mixup_alpha",
        )

    def kept(self, from_adapter: str) -> Self | None:
        """Return these settings if the training state holds the reference; None if it is a frozen model.

        The state holds it where it changes, or starts from an adapter.
        """
        return self if self.sync_every or (from_adapter and self.model == "policy") else None


@dataclass(frozen=True)
class AttentionLoss:
    """Match the student's attention to the teacher's: KL(teacher || student) of the mean attention weights of heads.

    Whole maps [T, T] are in memory for it: use short rows.
    """

    weight: float = 0.0  # weight in the loss; 0: not used
    student: tuple[int, ...] = ()  # layers of the student, from 1; default: the last
    teacher: tuple[int, ...] = ()  # layers of the teacher, one for each of the student's

    def __post_init__(self) -> None:
        not_negative(self, "weight")
        require(
            len(self.student) == len(self.teacher),
            f"teacher must have one layer for each of student; got student={list(self.student)}, "
            f"teacher={list(self.teacher)}",
            param="teacher",
        )
        for name in ("student", "teacher"):
            layers = getattr(self, name)
            require(min(layers, default=1) >= 1, f"{name} must be layers from 1 on; got {list(layers)}", param=name)


@dataclass(frozen=True)
class FeatureLoss(AttentionLoss):
    """Match the student's hidden states after these layers, through a learnt projection, to the teacher's."""

    kind: str = "cosine"  # 1 - cos, or mse

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of("kind", self.kind, SIMILARITIES)


@dataclass(frozen=True)
class Distillation:
    """The loss of distillation, over targets alone.

    alpha T^2 divergence(softmax(teacher / T), softmax(student / T)) + (1 - alpha) cross entropy. The factor T^2
    compensates for the temperature, which scales the gradient by 1 / T^2.
    """

    kind: str = "forward"  # KL(teacher || student); reverse; or jsd, with beta between the two (GKD)
    beta: float = 0.5  # jsd: 0 is forward, 1 is reverse
    alpha: float = 0.5  # weight of the divergence from the teacher; 1 - alpha is that of cross entropy
    temperature: float = 1.0  # of both distributions
    top_k: int = 0  # the teacher's likeliest tokens, over which both distributions are renormalised; 0: all tokens
    teacher: str = "live"  # runs beside the student; or disk: its likeliest tokens are computed before the training
    features: FeatureLoss = FeatureLoss()
    attention: AttentionLoss = AttentionLoss()

    def __post_init__(self) -> None:
        one_of("kind", self.kind, DIVERGENCES)
        one_of("teacher", self.teacher, TEACHERS)
        for name in ("beta", "alpha"):
            value = getattr(self, name)
            require(0 <= value <= 1, f"{name} must be from 0 to 1; got {value}", param=name)
        _require_read(self, "beta", self.kind == "jsd", "kind=jsd")
        require(self.temperature > 0, f"temperature must be above 0; got {self.temperature}", param="temperature")
        not_negative(self, "top_k")
        live = self.teacher == "live"
        require(live or self.top_k > 0, "top_k must be above 0 with teacher=disk, such as 32; got 0", param="top_k")
        for name in ("features", "attention"):
            require(
                live or getattr(self, name).weight == 0,
                f"{name}.weight must be 0 with teacher=disk, which keeps tokens only: set teacher=live",
                param=f"{name}.weight",
            )


def _require_read(settings: Preference | Distillation, key: str, is_read: bool, reader: str) -> None:
    """Refuse a key that the chosen loss does not read, if it differs from its default."""
    value, default = getattr(settings, key), getattr(type(settings), key)
    require(
        is_read or value == default,
        f"{key} is read with {reader} only, got {value}: leave it at {default}",
        param=key,
    )


def check_teacher(cfg: ModelConfig, teacher_cfg: ModelConfig) -> None:
    """Refuse a teacher without token probabilities, or with another vocabulary than the student's."""
    require(
        not teacher_cfg.scored,
        "teacher must be a causal language model, got a reward model: choose another teacher",
        param="teacher",
    )
    require(
        cfg.vocab == teacher_cfg.vocab,
        f"teacher must have the student's vocabulary of {cfg.vocab:,} tokens, got {teacher_cfg.vocab:,}: choose a "
        "teacher with the same tokenizer",
        param="teacher",
    )
