"""The RL algorithms: each is an advantage, a loss per token, and a normalisation of the loss."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from dovetail.core.choice import one_of, require
from dovetail.core.errors import RecipeError, UserError
from dovetail.tune.rl.advantages import ADVANTAGES, SCALED, SCALES
from dovetail.tune.rl.losses import (
    LOSS_TYPES,
    POLICY_LOSSES,
    PolicyLoss,
    check_cap,
    check_kl_loss,
    make_policy_loss,
)

# Settings of one policy loss or another; each policy loss reads some of them.
LOSS_SETTINGS = ("epsilon", "epsilon_high", "delta", "sapo_temperature_pos", "sapo_temperature_neg")
IMPORTANCE_SAMPLING_MODES = ("truncate", "mask", "none")


@dataclass(frozen=True)
class Loss:
    """Change parts of the algorithm's loss. None: as the algorithm has it."""

    RENAMED: ClassVar[Mapping[str, str]] = {
        "policy": "policy_loss", "aggregation": "loss_type", "eps_low": "epsilon", "eps_high": "epsilon_high",
        "kl": "kl_estimator", "entropy": "entropy_coef", "correction": "importance_sampling_mode",
        "cap": "importance_sampling_cap", "dynamic": "dynamic_sampling", "overlong": "soft_punish_cache",
    }  # fmt: skip

    policy_loss: str | None = None  # loss of a token: clipped, gspo, cispo, sapo or plain
    advantage: str | None = None  # grpo, dr_grpo, rloo, reinforce_pp or reinforce_pp_baseline
    loss_type: str | None = None  # normalisation over the batch: grpo, dapo, bnpo or dr_grpo
    epsilon: float | None = None  # the policy's ratio is clipped below 1 - epsilon
    epsilon_high: float | None = None  # and above 1 + epsilon_high (cispo: above epsilon_high)
    delta: float | None = None  # the largest ratio that counts for negative advantages too (two-sided clip)
    sapo_temperature_pos: float | None = None  # temperature of sapo's gate for positive advantages
    sapo_temperature_neg: float | None = None  # and for the others
    scale_rewards: str | None = None  # divide advantages by the std of the group or the batch, or by none
    top_entropy_quantile: float = 1.0  # the share of tokens that are trained, those with the highest entropy
    beta: float | None = None  # weight of the KL from the reference; 0: no reference is run
    kl_estimator: str = "k3"  # estimator of that KL: k2 or k3
    entropy_coef: float = 0.0  # weight of the entropy bonus
    importance_sampling_mode: str = "truncate"  # correct for the sampler's probabilities: truncate, mask or none
    importance_sampling_cap: float = 2.0  # the largest importance ratio; larger ones become the cap, or 0 with mask
    dynamic_sampling: bool | None = None  # draw other prompts in place of groups whose rewards are all equal
    soft_punish_cache: int | None = None  # lower the reward over so many last tokens of max_completion_length; 0: no

    def __post_init__(self) -> None:
        named = (("policy_loss", POLICY_LOSSES), ("advantage", ADVANTAGES), ("loss_type", LOSS_TYPES))
        for name, known in (*named, ("scale_rewards", SCALES)):
            if (value := getattr(self, name)) is not None:
                one_of(name, value, known)
        require(
            0 <= self.top_entropy_quantile <= 1,
            f"top_entropy_quantile must be from 0 to 1, got {self.top_entropy_quantile}.",
            param="top_entropy_quantile",
        )
        one_of("importance_sampling_mode", self.importance_sampling_mode, IMPORTANCE_SAMPLING_MODES)
        check_kl_loss(self.kl_estimator)
        check_cap(self.importance_sampling_cap)
        for name in ("beta", "soft_punish_cache"):
            value = getattr(self, name)
            require(value is None or value >= 0, f"{name} must be 0 or more, got {value}", param=name)


DEFAULT_LOSS = Loss()
_BASE = Loss(policy_loss="clipped", advantage="grpo", loss_type="grpo", beta=0.0, dynamic_sampling=False,
             soft_punish_cache=0)  # fmt: skip
ALGORITHMS: dict[str, Loss] = {
    "grpo": _BASE,
    "dr_grpo": replace(_BASE, advantage="dr_grpo", loss_type="dr_grpo"),
    "dapo": replace(_BASE, loss_type="dapo", epsilon_high=0.28, dynamic_sampling=True),
    "gspo": replace(_BASE, policy_loss="gspo"),
    "cispo": replace(_BASE, policy_loss="cispo", loss_type="dapo"),
    "sapo": replace(_BASE, policy_loss="sapo"),
    "rloo": replace(_BASE, advantage="rloo", loss_type="dr_grpo"),
    "reinforce_pp": replace(_BASE, advantage="reinforce_pp", loss_type="dapo"),
    "ppo": replace(_BASE, advantage=None, loss_type="dapo"),
    "gkd": replace(_BASE, policy_loss=None, advantage=None, loss_type="dapo"),
    "reverse_kl": replace(_BASE, advantage=None, loss_type="dapo"),
}
DISTILLATIONS = ("gkd", "reverse_kl")  # on-policy distillation: a teacher in place of rewards
WITHOUT_GROUPS = ("ppo", "reinforce_pp", *DISTILLATIONS)  # one completion per prompt is enough


def loss_of(algo: str, changes: Loss) -> Loss:
    """Return the loss of an algorithm with the recipe's changes."""
    own = {name: value for name, value in vars(changes).items() if value is not None}
    return replace(ALGORITHMS[algo], **own)


def policy_loss_of(loss: Loss) -> PolicyLoss:
    """Return the policy loss of complete settings.

    Raises:
        RecipeError: A setting belongs to another policy loss.
    """
    given = {name: getattr(loss, name) for name in LOSS_SETTINGS}
    try:
        return make_policy_loss(loss.policy_loss or "clipped", **given)
    except UserError as error:
        raise RecipeError(f"loss.{error}", param=error.param and f"loss.{error.param}") from None


def check_loss(algo: str, changes: Loss, num_generations: int, max_completion_length: int) -> None:
    """Refuse keys of `loss` that the algorithm does not read, or that contradict other keys of the recipe."""
    loss = loss_of(algo, changes)
    policy_loss_of(loss)
    _check_unread(algo, changes, loss)
    require(
        (loss.soft_punish_cache or 0) <= max_completion_length,
        f"loss.soft_punish_cache must be at most max_completion_length, {max_completion_length}, got "
        f"{loss.soft_punish_cache}",
        param="loss.soft_punish_cache",
    )
    require(
        not loss.dynamic_sampling or num_generations > 1,
        "loss.dynamic_sampling requires num_generations of at least 2, got 1: it compares the completions of a prompt",
        param="loss.dynamic_sampling",
    )


def _check_unread(algo: str, changes: Loss, loss: Loss) -> None:
    """Refuse keys that `algo` does not read; `loss` has the algorithm's values and the changes."""
    require(
        algo != "gkd" or changes == DEFAULT_LOSS,
        "loss is not read with algo=gkd, which reads distillation: leave it out",
        param="loss",
    )
    require(
        algo not in ("ppo", *DISTILLATIONS) or changes.advantage is None,
        f"loss.advantage is not read with algo={algo}, got {changes.advantage}: leave it out",
        param="loss.advantage",
    )
    require(
        loss.scale_rewards is None or loss.advantage in SCALED,
        f"loss.scale_rewards requires the advantage {' or '.join(SCALED)}, got {loss.advantage or 'none'} with "
        f"algo={algo}: leave it out",
        param="loss.scale_rewards",
    )
    for name in ("dynamic_sampling", "soft_punish_cache"):
        require(
            algo not in DISTILLATIONS or not getattr(changes, name),
            f"loss.{name} requires rewards, and algo={algo} has a teacher in their place: leave it out",
            param=f"loss.{name}",
        )
    require(
        changes.kl_estimator == DEFAULT_LOSS.kl_estimator or bool(loss.beta),
        f"loss.kl_estimator={changes.kl_estimator} requires loss.beta above 0, got {loss.beta}: set it, or leave "
        "loss.kl_estimator out",
        param="loss.kl_estimator",
    )
    require(
        changes.importance_sampling_cap == DEFAULT_LOSS.importance_sampling_cap
        or changes.importance_sampling_mode != "none",
        "loss.importance_sampling_cap is not read with loss.importance_sampling_mode=none, got "
        f"{changes.importance_sampling_cap}: leave it out",
        param="loss.importance_sampling_cap",
    )
