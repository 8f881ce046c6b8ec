"""What a recipe says of learning from preferences, and of a reward model."""

from __future__ import annotations

import math
from dataclasses import dataclass

from dovetail.core.choice import not_negative, one_of, require

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
