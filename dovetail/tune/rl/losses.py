"""The losses of RL as formulas on each token's log-probability, without a model and without a sum over tokens.

A policy loss is a function (logprobs, old_logprobs, advantages, mask, sequence_mean) -> (loss, diagnostics) of arrays
of one shape, usually [B, T]. Gradient flows through `logprobs` alone. Where the mask is 0, the other arrays may hold
anything, NaN included: it is replaced by 0 before it is used, because NaN times 0 would still spoil a gradient. The
loss is 0 there.

A policy loss does not normalise: batches.token_weights returns the weight of each token's loss in the batch's loss.

rho = exp(log pi - log pi_old), A is an advantage, sg is stop_gradient.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.lax import stop_gradient

from dovetail.core.choice import did_you_mean, one_of, require

Diagnostics = dict[str, jax.Array]  # per token: `ratio`, and `clipped`, which is 1 where the loss has no gradient
OfSequence = Callable[[jax.Array], jax.Array]  # gives every token one number of its sequence, over the masked tokens
PolicyLoss = Callable[[jax.Array, jax.Array, jax.Array, jax.Array, OfSequence], tuple[jax.Array, Diagnostics]]

KL_ESTIMATORS = ("k1", "k2", "k3")
LEVELS = ("token", "sequence")
ABOVE_CAP = ("truncate", "mask")
LOSS_TYPES = ("grpo", "dapo", "bnpo", "dr_grpo")
MAX_LOG_RATIO = 20.0  # differences of log-probabilities are clipped to this: e^20 is finite in f32


# --- policy losses ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Clipped:
    """-min(rho A, clip(rho, 1 - epsilon, 1 + epsilon_high) A): the loss of PPO, GRPO, RLOO and REINFORCE++.

    PPO is arXiv 1707.06347. DAPO sets epsilon_high to 0.28. With delta the first term is min(rho, delta) A, which also
    bounds the loss of tokens with a negative advantage (arXiv 2505.07291).
    """

    epsilon: float = 0.2
    epsilon_high: float = 0.2
    delta: float | None = None

    def __post_init__(self) -> None:
        _check_range(self.epsilon, self.epsilon_high, self.delta)

    def __call__(
        self, logprobs: jax.Array, old_logprobs: jax.Array, advantages: jax.Array, mask: jax.Array, _: OfSequence
    ) -> tuple[jax.Array, Diagnostics]:
        """Return the loss of each token."""
        logps, old, advantages = _masked(mask, logprobs, old_logprobs, advantages)
        return _clipped(_ratio(logps - old), advantages, self.epsilon, self.epsilon_high, self.delta)


@dataclass(frozen=True)
class Gspo:
    """The clipped loss with one ratio per sequence, s = exp(mean of log rho) (arXiv 2507.18071).

    It is computed per token, log s_t = sg(mean of log rho) + log pi_t - sg(log pi_t), so that tokens of a sequence may
    have different advantages.
    """

    epsilon: float = 3e-4
    epsilon_high: float = 4e-4
    delta: float | None = None

    def __post_init__(self) -> None:
        _check_range(self.epsilon, self.epsilon_high, self.delta)

    def __call__(
        self,
        logprobs: jax.Array,
        old_logprobs: jax.Array,
        advantages: jax.Array,
        mask: jax.Array,
        sequence_mean: OfSequence,
    ) -> tuple[jax.Array, Diagnostics]:
        """Return the loss of each token."""
        logps, old, advantages = _masked(mask, logprobs, old_logprobs, advantages)
        (mean,) = _masked(mask, sequence_mean(stop_gradient(logps - old)))  # 0 / 0 in a sequence without masked tokens
        ratio = _ratio(mean + (logps - stop_gradient(logps)))
        return _clipped(ratio, advantages, self.epsilon, self.epsilon_high, self.delta)


@dataclass(frozen=True)
class Cispo:
    """-sg(min(rho, epsilon_high)) A log pi: the ratio is clipped, and no token loses its gradient (arXiv 2506.13585).

    epsilon_high is the largest ratio itself, not its distance from 1.
    """

    epsilon_high: float = 5.0

    def __post_init__(self) -> None:
        require(
            self.epsilon_high >= 1,
            f"epsilon_high must be 1 or more with cispo, where it is the largest ratio, got {self.epsilon_high}",
            param="epsilon_high",
        )

    def __call__(
        self, logprobs: jax.Array, old_logprobs: jax.Array, advantages: jax.Array, mask: jax.Array, _: OfSequence
    ) -> tuple[jax.Array, Diagnostics]:
        """Return the loss of each token."""
        logps, old, advantages = _masked(mask, logprobs, old_logprobs, advantages)
        ratio = stop_gradient(_ratio(logps - old))
        loss = -jnp.minimum(ratio, self.epsilon_high) * advantages * logps
        return loss, {"ratio": ratio, "clipped": (ratio > self.epsilon_high).astype(jnp.float32)}


@dataclass(frozen=True)
class Sapo:
    """-sigmoid(tau (rho - 1)) 4 / tau A: a smooth gate in place of a clip (arXiv 2511.20347).

    Its gradient at rho = 1 is PPO's. tau is larger for negative advantages, so that their gradient fades sooner.
    """

    sapo_temperature_pos: float = 1.0  # tau where A > 0
    sapo_temperature_neg: float = 1.05  # tau elsewhere

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            require(value > 0, f"{name} must be above 0, got {value}.", param=name)

    def __call__(
        self, logprobs: jax.Array, old_logprobs: jax.Array, advantages: jax.Array, mask: jax.Array, _: OfSequence
    ) -> tuple[jax.Array, Diagnostics]:
        """Return the loss of each token."""
        logps, old, advantages = _masked(mask, logprobs, old_logprobs, advantages)
        ratio = _ratio(logps - old)
        tau = jnp.where(advantages > 0, self.sapo_temperature_pos, self.sapo_temperature_neg)
        loss = -jax.nn.sigmoid(tau * (ratio - 1)) * 4 / tau * advantages
        return loss, {"ratio": stop_gradient(ratio), "clipped": jnp.zeros_like(ratio)}


@dataclass(frozen=True)
class Plain:
    """-A log pi: REINFORCE, for one update per rollout. It does not read the old log-probabilities."""

    def __call__(
        self, logprobs: jax.Array, old_logprobs: jax.Array, advantages: jax.Array, mask: jax.Array, _: OfSequence
    ) -> tuple[jax.Array, Diagnostics]:
        """Return the loss of each token."""
        logps, advantages = _masked(mask, logprobs, advantages)
        return -advantages * logps, {"ratio": jnp.ones_like(logps), "clipped": jnp.zeros_like(logps)}


POLICY_LOSSES: dict[str, Callable[..., PolicyLoss]] = {
    "clipped": Clipped, "gspo": Gspo, "cispo": Cispo, "sapo": Sapo, "plain": Plain,
}  # fmt: skip


def make_policy_loss(wanted: str | PolicyLoss, **settings: float | None) -> PolicyLoss:
    """Return a policy loss by its name in POLICY_LOSSES, or the user's own function unchanged.

    Args:
        wanted: A name, or a function.
        settings: Settings of the named loss; None: its default.

    Raises:
        RecipeError: The loss is not known, or does not have one of the settings; `param` names it.
    """
    given = {name: value for name, value in settings.items() if value is not None}
    if not isinstance(wanted, str):
        require(
            not given,
            f"{', '.join(given)} is not read by a policy loss of your own: bind its settings in the function",
            param=next(iter(given), None),
        )
        return wanted
    one_of("policy_loss", wanted, POLICY_LOSSES)
    made: Any = POLICY_LOSSES[wanted]
    known = [field.name for field in dataclasses.fields(made)]
    for name in given:
        has = " and ".join(known) or "no settings"
        require(
            name in known,
            f"{name} is not a setting of the policy loss {wanted}, which has {has}.{did_you_mean(name, known)}",
            param=name,
        )
    return made(**given)


def _clipped(
    ratio: jax.Array, advantages: jax.Array, low: float, high: float, delta: float | None
) -> tuple[jax.Array, Diagnostics]:
    free = ratio if delta is None else jnp.minimum(ratio, delta)
    loss = -jnp.minimum(free * advantages, jnp.clip(ratio, 1 - low, 1 + high) * advantages)
    clipped = ((ratio > 1 + high) & (advantages > 0)) | ((ratio < 1 - low) & (advantages < 0))
    if delta is not None:
        clipped |= (ratio > delta) & (advantages < 0)
    return loss, {"ratio": stop_gradient(ratio), "clipped": clipped.astype(jnp.float32)}


def _check_range(low: float, high: float, delta: float | None) -> None:
    require(
        delta is None or delta > 1 + high,
        f"delta must be above 1 + epsilon_high = {1 + high:g}, such as 4, got {delta}: leave it out for no bound",
        param="delta",
    )
    require(0 < low <= 1, f"epsilon must be above 0 and at most 1, got {low}", param="epsilon")
    require(high > 0, f"epsilon_high must be above 0, such as 0.2, got {high}", param="epsilon_high")


def _masked(mask: jax.Array, first: jax.Array, *others: jax.Array) -> list[jax.Array]:
    """Return the arrays in f32, 0 where the mask is 0; only the first has a gradient."""
    return [jnp.where(mask > 0, x.astype(jnp.float32), 0.0) for x in (first, *map(stop_gradient, others))]


def _ratio(difference: jax.Array) -> jax.Array:
    return jnp.exp(jnp.clip(difference, -MAX_LOG_RATIO, MAX_LOG_RATIO))


# --- KL from the reference --------------------------------------------------------------------------------------------


def kl(logprobs: jax.Array, reference: jax.Array, mask: jax.Array, estimator: str = "k3") -> jax.Array:
    """Return an estimate of KL(pi || ref) at each token that pi sampled; 0 where the mask is 0.

    k1 = log pi - log ref, k2 = k1^2 / 2, k3 = e^-k1 + k1 - 1. Use it for PPO's rewards and for metrics; `kl_loss` is
    the loss.
    """
    one_of("kl_estimator", estimator, KL_ESTIMATORS)
    logps, reference = _masked(mask, logprobs, reference)
    k1 = logps - reference
    match estimator:
        case "k1":
            return k1
        case "k2":
            return k1 * k1 / 2
    return jnp.expm1(jnp.clip(-k1, -MAX_LOG_RATIO, MAX_LOG_RATIO)) + k1


def kl_loss(logprobs: jax.Array, reference: jax.Array, mask: jax.Array, estimator: str = "k3") -> jax.Array:
    """Return the estimate of `kl` as a loss per token.

    In the mean over samples, the gradient of k2 is that of KL(pi || ref), and the gradient of k3 that of KL(ref || pi).
    """
    check_kl_loss(estimator)
    return kl(logprobs, reference, mask, estimator)


def check_kl_loss(estimator: str) -> None:
    """Refuse an estimator that is not a loss."""
    one_of("kl_estimator", estimator, KL_ESTIMATORS)
    require(
        estimator != "k1",
        "kl_estimator must be k2 or k3, got k1: its gradient is 0 in the mean over samples. Use k2 for "
        "KL(policy || reference)",
        param="kl_estimator",
    )


# --- importance sampling ----------------------------------------------------------------------------------------------


def importance(
    trainer_logprobs: jax.Array,
    sampler_logprobs: jax.Array,
    mask: jax.Array,
    cap: float = 2.0,
    *,
    level: str = "token",
    mode: str = "truncate",
    sequence_sum: OfSequence | None = None,
) -> jax.Array:
    """Return the factor of each token's loss that corrects for the sampler's probabilities, without a gradient.

    It is min(exp(log pi_trainer - log pi_sampler), cap), and 1 where the mask is 0.

    Args:
        trainer_logprobs: Log-probabilities by the trainer.
        sampler_logprobs: Log-probabilities that the sampler reported.
        mask: Tokens that count.
        cap: The largest ratio.
        level: "token", or "sequence" for the ratio of whole sequences.
        mode: "truncate" replaces larger ratios by the cap, "mask" by 0.
        sequence_sum: Required with level="sequence": gives each token the sum over its sequence.
    """
    one_of("level", level, LEVELS)
    one_of("importance_sampling_mode", mode, ABOVE_CAP)
    check_cap(cap)
    trainer, sampler = _masked(mask, trainer_logprobs, sampler_logprobs)
    difference = trainer - sampler
    if level == "sequence":
        require(sequence_sum is not None, "sequence_sum is required with level=sequence", param="sequence_sum")
        assert sequence_sum is not None
        (difference,) = _masked(mask, sequence_sum(difference))
    ratio = _ratio(difference)
    held = jnp.minimum(ratio, cap) if mode == "truncate" else jnp.where(ratio > cap, 0.0, ratio)
    return stop_gradient(held)


def check_cap(cap: float) -> None:
    """Refuse a cap of importance ratios that is below 1."""
    key = "importance_sampling_cap"
    require(cap >= 1, f"{key} must be 1 or more, got {cap}", param=key)


# --- value loss -------------------------------------------------------------------------------------------------------


def value_loss(
    values: jax.Array, old_values: jax.Array, returns: jax.Array, mask: jax.Array, cliprange_value: float = 0.2
) -> tuple[jax.Array, Diagnostics]:
    """Return max((v - R)^2, (clip(v, v_old - c, v_old + c) - R)^2) / 2 at each token.

    `clipped` of the diagnostics is 1 where v has left the range on its way to R, and has no gradient. An infinite
    `cliprange_value` does not clip.
    """
    require(cliprange_value > 0, f"cliprange_value must be above 0, got {cliprange_value}", param="cliprange_value")
    v, old, returns = _masked(mask, values, old_values, returns)
    free = (v - returns) ** 2
    held = (jnp.clip(v, old - cliprange_value, old + cliprange_value) - returns) ** 2
    return jnp.maximum(free, held) / 2, {"clipped": (held > free).astype(jnp.float32)}
