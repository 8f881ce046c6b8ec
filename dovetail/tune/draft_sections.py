"""Sections of recipes that train a drafter: `drafter` and `answers`."""

from __future__ import annotations

from dataclasses import dataclass

from dovetail.core.choice import not_negative, one_of, require

BLOCKS, CHAINS = ("dspark", "dflash", "dflash2"), ("eagle3", "mtp")
KINDS = (*BLOCKS, *CHAINS)
STATES = ("disk", "live")


@dataclass(frozen=True)
class DrafterSettings:
    """Configure the new drafter and its loss."""

    kind: str = "dspark"  # dspark, dflash, dflash2, eagle3 or mtp
    layers: int = 1  # of the drafter
    num_speculative_tokens: int = 5  # draft tokens of a step: a block, or unrolled steps of eagle3 and mtp
    taps: tuple[int, ...] = ()  # layers of the target to read, from 0; default: an early, a middle and a late one
    vocab: int = 8192  # draft only the most frequent tokens of the answers; 0, and with mtp and dflash2: all tokens
    markov_rank: int = 64  # dspark, dflash2: rank of the head that adds what the token before says
    mask_token_id: int = -1  # of blocks: the token at their slots; -1: the vocabulary's last
    anchors: int = 64  # drafts of each row and step, at random tokens of the answers
    gamma: float = 4.0  # draft token k counts exp(-(k - 1) / gamma)
    l1: float = -1.0  # weight of |p - q|; the rest is that of cross entropy; -1: 0.9, and 0 for dflash
    hidden_states: str = "disk"  # the target's, computed once before the training; or live: in every step

    def __post_init__(self) -> None:
        one_of("kind", self.kind, KINDS)
        one_of("hidden_states", self.hidden_states, STATES)
        not_negative(self, "vocab", "markov_rank")
        for name in ("layers", "num_speculative_tokens", "anchors"):
            value = getattr(self, name)
            require(value >= 1, f"{name} must be at least 1; got {value}", param=name)
        require(self.gamma > 0, f"gamma must be above 0; got {self.gamma}", param="gamma")
        require(self.l1 == -1 or 0 <= self.l1 <= 1, f"l1 must be from 0 to 1; got {self.l1}", param="l1")
        require(
            self.kind in BLOCKS or self.layers == 1,
            f"layers must be 1 with kind={self.kind}; got {self.layers}",
            param="layers",
        )
        require(
            self.kind != "mtp" or not self.taps,
            f"taps must not be set with kind=mtp, which reads the target's last states; got {list(self.taps)}",
            param="taps",
        )

    @property
    def vocab_size(self) -> int:
        """Return how many tokens the drafter knows; 0 for all."""
        return 0 if self.kind in ("mtp", "dflash2") else self.vocab

    @property
    def l1_weight(self) -> float:
        """Return the weight of |p - q| in the loss."""
        return self.l1 if self.l1 >= 0 else 0.0 if self.kind == "dflash" else 0.9


@dataclass(frozen=True)
class AnswerSettings:
    """Configure the answers of the target that a drafter learns from."""

    temperature: float = 0.0  # of sampling; 0: greedy
    max_tokens: int = 128  # the most tokens of an answer
    keep: bool = False  # learn from the answers that records have, and generate only those that are missing

    def __post_init__(self) -> None:
        not_negative(self, "temperature")
        require(self.max_tokens >= 1, f"max_tokens must be at least 1; got {self.max_tokens}", param="max_tokens")
