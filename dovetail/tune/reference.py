"""What a recipe says of the reference: the model that a policy is compared with, by DPO and by a KL term."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from dovetail.core.choice import not_negative, one_of, require

MODELS = ("policy", "base")
MIXUP_ALPHA = 0.6


@dataclass(frozen=True)
class Reference:
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
