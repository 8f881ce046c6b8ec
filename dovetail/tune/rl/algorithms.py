"""The algorithms: each an advantage, a loss of each token, and how these are added up."""

from __future__ import annotations

from dataclasses import dataclass

from dovetail.core.choice import one_of, require
from dovetail.tune.rl.advantages import ADVANTAGES, SCALES
from dovetail.tune.rl.losses import AGGREGATIONS, LOSSES, PolicyLoss, check_kl_loss, policy_loss

LOSS_SETTINGS = ("eps_low", "eps_high", "delta", "sapo_temperature_pos", "sapo_temperature_neg")  # of losses by name
CORRECTIONS = ("truncate", "drop", "none")


@dataclass(frozen=True)
class Loss:
    """None: as the algorithm has it."""

    policy: str | None = None  # of tune.rl.losses.LOSSES
    advantage: str | None = None  # of tune.rl.advantages.ADVANTAGES
    aggregation: str | None = None  # of tune.rl.losses.AGGREGATIONS
    eps_low: float | None = None  # the policy's ratio is clipped below 1 - eps_low
    eps_high: float | None = None  # and above 1 + eps_high (cispo: above eps_high)
    delta: float | None = None  # the greatest ratio that counts, for negative advantages too (two-sided clip)
    sapo_temperature_pos: float | None = None  # of sapo's gate, for positive advantages
    sapo_temperature_neg: float | None = None  # and for the others
    scale_rewards: str | None = None  # by the std of each group, of the batch, or none; None: as `advantage` has it
    top_entropy_quantile: float = 1.0  # the share of tokens that are trained, those of the highest entropy
    beta: float | None = None  # what the KL from the reference weighs; 0: no reference is run
    kl: str = "k3"  # its estimate: k2 or k3
    entropy: float = 0.0  # what is added to the gain for each nat
    correction: str = "truncate"  # of what the sampler's probabilities differ from the trainer's
    cap: float = 2.0  # the greatest such ratio: what is above counts as this (truncate), or not at all (drop)
    dynamic: bool | None = None  # groups whose rewards are all equal are sampled anew, of other prompts
    overlong: int | None = None  # the last so many tokens before max_tokens lower a reward, by 1 at the end; 0: none

    def __post_init__(self) -> None:
        for name, known in (("policy", LOSSES), ("advantage", ADVANTAGES), ("aggregation", AGGREGATIONS)):
            if (value := getattr(self, name)) is not None:
                one_of(name, value, known)
        if self.scale_rewards is not None:
            one_of("scale_rewards", self.scale_rewards, SCALES)
        require(
            0 <= self.top_entropy_quantile <= 1,
            f"top_entropy_quantile must be from 0 to 1 (all tokens), got {self.top_entropy_quantile}.",
        )
        one_of("correction", self.correction, CORRECTIONS)
        check_kl_loss(self.kl)
        require(self.beta is None or self.beta >= 0, f"beta must be 0 or more; got {self.beta}")
        require(self.cap >= 1, f"cap must be 1 or more, for 1 is a sampler that agrees; got {self.cap}")
        require(self.overlong is None or self.overlong >= 0, f"overlong must be 0 or more; got {self.overlong}")


ALGORITHMS: dict[str, Loss] = {
    "grpo": Loss("clipped", "grpo", "grpo", beta=0.0, dynamic=False, overlong=0),
    "dr_grpo": Loss("clipped", "dr_grpo", "dr_grpo", beta=0.0, dynamic=False, overlong=0),
    "dapo": Loss("clipped", "grpo", "dapo", eps_high=0.28, beta=0.0, dynamic=True, overlong=0),
    "gspo": Loss("gspo", "grpo", "grpo", beta=0.0, dynamic=False, overlong=0),
    "cispo": Loss("cispo", "grpo", "dapo", beta=0.0, dynamic=False, overlong=0),
    "sapo": Loss("sapo", "grpo", "grpo", beta=0.0, dynamic=False, overlong=0),
    "rloo": Loss("clipped", "rloo", "dr_grpo", beta=0.0, dynamic=False, overlong=0),
    "reinforce_pp": Loss("clipped", "reinforce_pp", "dapo", beta=0.0, dynamic=False, overlong=0),
    "ppo": Loss("clipped", None, "dapo", beta=0.0, dynamic=False, overlong=0),
    "gkd": Loss(None, None, "dapo", beta=0.0, dynamic=False, overlong=0),
    "reverse_kl": Loss("clipped", None, "dapo", beta=0.0, dynamic=False, overlong=0),
}
TAUGHT = ("gkd", "reverse_kl")  # a teacher takes the place of rewards: on-policy distillation


def loss_of(wanted: Loss) -> PolicyLoss:
    """Return the policy's loss with its settings; ValueError where one of them is another loss's."""
    return policy_loss(wanted.policy or "clipped", **{name: getattr(wanted, name) for name in LOSS_SETTINGS})
