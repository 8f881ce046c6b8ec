"""What a recipe says of learning from preferences, and of a reward model."""

from __future__ import annotations

from dataclasses import dataclass

from dovetail.core.choice import not_negative, one_of, require

WITHOUT_REFERENCE = ("orpo", "simpo")
LOSSES = ("sigmoid", "robust", "ipo", "hinge", "kto", *WITHOUT_REFERENCE)
SMOOTHED = ("sigmoid", "robust", "simpo")
REFERENCES = ("", "live", "disk", "none")


@dataclass(frozen=True)
class Preference:
    loss: str = "sigmoid"  # of DPO; see tune.preference_losses
    beta: float = 0.1  # how much a log-ratio counts; of orpo, the weight of the odds (its lambda)
    label_smoothing: float = 0.0  # the share of pairs taken to be the wrong way round: of sigmoid, robust and simpo
    gamma: float = 0.5  # simpo: the margin to reach, in rewards
    desirable: float = 1.0  # kto: what a good document's loss weighs
    undesirable: float = 1.0  # and a bad one's
    # where the reference's log-probabilities come from: a model that is run (live), or the rows (disk), to which they
    # were written beforehand; unless given, live where the loss has a reference
    reference: str = ""

    def __post_init__(self) -> None:
        one_of("loss", self.loss, LOSSES)
        one_of("reference", self.reference, REFERENCES)
        require(self.beta > 0, f"beta must be above 0, such as 0.1; got {self.beta}")
        not_negative(self, "gamma", "desirable", "undesirable")
        self._check_smoothing()
        if self.loss in WITHOUT_REFERENCE:
            require(
                self.reference in ("", "none"), f"reference must be none: {self.loss} has none; got {self.reference!r}"
            )
        else:
            require(
                self.reference != "none", f"reference must be live or disk: {self.loss} compares with one; got none"
            )

    def _check_smoothing(self) -> None:
        share = self.label_smoothing
        require(0 <= share < 0.5, f"label_smoothing must be at least 0 and below 0.5; got {share}")
        require(
            share == 0 or self.loss in SMOOTHED,
            f"label_smoothing is of the losses {', '.join(SMOOTHED)}; {self.loss} has none: set it to 0",
        )
        require(
            self.loss != "robust" or share > 0,
            "label_smoothing must be above 0 for the loss robust, which without it is sigmoid",
        )

    @property
    def source(self) -> str:
        """Of the reference's log-probabilities: live, disk or none."""
        return self.reference or ("none" if self.loss in WITHOUT_REFERENCE else "live")


@dataclass(frozen=True)
class RewardLoss:
    """A reward model: a score of each document, learnt from pairs."""

    margin: bool = False  # rows say in a column `margin` by how much the chosen score should lead
    centering: float = 0.0  # the weight of (chosen + rejected)^2: keeps scores near 0

    def __post_init__(self) -> None:
        not_negative(self, "centering")
