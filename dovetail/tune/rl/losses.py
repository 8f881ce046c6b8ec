"""The losses of reinforcement learning, as formulas on each token's log-probability: no model, no sum over tokens.

A policy's loss is a function (logprobs, old_logprobs, advantages, mask, sequence_mean) -> (loss, diagnostics) of arrays
of one shape, usually [B, T]; gradient flows through logprobs alone. Where the mask is 0 the others may hold anything,
NaN too: it is put aside before it is computed with, since what 0 is multiplied with later would still spoil a gradient.
There the loss is 0.

What is aggregated, and how, is not theirs to know: `token_weights` says what each token's loss weighs in the batch's.

rho = exp(log pi - log pi_old), A an advantage, sg without a gradient.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.lax import stop_gradient
from numpy.typing import ArrayLike

from dovetail.core.choice import did_you_mean, one_of, require

Diagnostics = dict[str, jax.Array]  # of each token: `ratio`, and `clipped`, 1 where the gradient is held back
OfSequence = Callable[[jax.Array], jax.Array]  # gives each token a number of its sequence, over what the mask counts
PolicyLoss = Callable[[jax.Array, jax.Array, jax.Array, jax.Array, OfSequence], tuple[jax.Array, Diagnostics]]

KL_ESTIMATES = ("k1", "k2", "k3")
LEVELS = ("token", "sequence")
BEYOND = ("truncate", "drop")
AGGREGATIONS = ("grpo", "dapo", "bnpo", "dr_grpo")
FARTHEST = 20.0  # a difference of log-probabilities counts no more than this: e^20 is a number, and 0 times it is 0


# --- of a policy ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Clipped:
    """-min(rho A, clip(rho, 1 - eps_low, 1 + eps_high) A): PPO's (arXiv 1707.06347), and with it GRPO's, RLOO's and
    REINFORCE++'s; DAPO's eps_high is 0.28. With delta, min(rho, delta) A in the first term, so that a token with a
    negative advantage has a bounded loss too (arXiv 2505.07291).
    """

    eps_low: float = 0.2
    eps_high: float = 0.2
    delta: float | None = None

    def __post_init__(self) -> None:
        _check_range(self.eps_low, self.eps_high, self.delta)

    def __call__(
        self, logprobs: jax.Array, old_logprobs: jax.Array, advantages: jax.Array, mask: jax.Array, _: OfSequence
    ) -> tuple[jax.Array, Diagnostics]:
        logps, old, advantages = _counted(mask, logprobs, old_logprobs, advantages)
        return _clipped(_ratio(logps - old), advantages, self.eps_low, self.eps_high, self.delta)


@dataclass(frozen=True)
class Gspo:
    """The same with one ratio for a sequence, s = exp(mean of log rho), clipped as a whole (arXiv 2507.18071). In the
    form of tokens, log s_t = sg(mean of log rho) + log pi_t - sg(log pi_t), each may have an advantage of its own.
    """

    eps_low: float = 3e-4
    eps_high: float = 4e-4
    delta: float | None = None

    def __post_init__(self) -> None:
        _check_range(self.eps_low, self.eps_high, self.delta)

    def __call__(
        self,
        logprobs: jax.Array,
        old_logprobs: jax.Array,
        advantages: jax.Array,
        mask: jax.Array,
        sequence_mean: OfSequence,
    ) -> tuple[jax.Array, Diagnostics]:
        logps, old, advantages = _counted(mask, logprobs, old_logprobs, advantages)
        (mean,) = _counted(mask, sequence_mean(stop_gradient(logps - old)))  # 0 / 0 in a sequence where nothing counts
        ratio = _ratio(mean + (logps - stop_gradient(logps)))
        return _clipped(ratio, advantages, self.eps_low, self.eps_high, self.delta)


@dataclass(frozen=True)
class Cispo:
    """-sg(min(rho, eps_high)) A log pi: a ratio is clipped, a token never loses its gradient (arXiv 2506.13585).
    eps_high is the greatest ratio itself, not how far it may be above 1.
    """

    eps_high: float = 5.0

    def __post_init__(self) -> None:
        require(self.eps_high >= 1, f"eps_high of cispo must be 1 or more, as the greatest ratio; got {self.eps_high}")

    def __call__(
        self, logprobs: jax.Array, old_logprobs: jax.Array, advantages: jax.Array, mask: jax.Array, _: OfSequence
    ) -> tuple[jax.Array, Diagnostics]:
        logps, old, advantages = _counted(mask, logprobs, old_logprobs, advantages)
        ratio = stop_gradient(_ratio(logps - old))
        loss = -jnp.minimum(ratio, self.eps_high) * advantages * logps
        return loss, {"ratio": ratio, "clipped": (ratio > self.eps_high).astype(jnp.float32)}


@dataclass(frozen=True)
class Sapo:
    """-sigmoid(tau (rho - 1)) 4 / tau A: a smooth gate in place of a clip, whose gradient at rho = 1 is PPO's; tau is
    higher for tokens to avoid, so that their gradient fades sooner (arXiv 2511.20347).
    """

    sapo_temperature_pos: float = 1.0  # where A > 0
    sapo_temperature_neg: float = 1.05

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            require(value > 0, f"{name} must be above 0, got {value}.")

    def __call__(
        self, logprobs: jax.Array, old_logprobs: jax.Array, advantages: jax.Array, mask: jax.Array, _: OfSequence
    ) -> tuple[jax.Array, Diagnostics]:
        logps, old, advantages = _counted(mask, logprobs, old_logprobs, advantages)
        ratio = _ratio(logps - old)
        tau = jnp.where(advantages > 0, self.sapo_temperature_pos, self.sapo_temperature_neg)
        loss = -jax.nn.sigmoid(tau * (ratio - 1)) * 4 / tau * advantages
        return loss, {"ratio": stop_gradient(ratio), "clipped": jnp.zeros_like(ratio)}


@dataclass(frozen=True)
class Plain:
    """-A log pi: REINFORCE, for one update per rollout. The old log-probabilities are not read."""

    def __call__(
        self, logprobs: jax.Array, old_logprobs: jax.Array, advantages: jax.Array, mask: jax.Array, _: OfSequence
    ) -> tuple[jax.Array, Diagnostics]:
        logps, advantages = _counted(mask, logprobs, advantages)
        return -advantages * logps, {"ratio": jnp.ones_like(logps), "clipped": jnp.zeros_like(logps)}


LOSSES: dict[str, Callable[..., PolicyLoss]] = {
    "clipped": Clipped, "gspo": Gspo, "cispo": Cispo, "sapo": Sapo, "plain": Plain,
}  # fmt: skip


def policy_loss(wanted: str | PolicyLoss, **settings: float | None) -> PolicyLoss:
    """One of LOSSES by its name, or the user's own function as it is; a setting that is None is the loss's own."""
    given = {name: value for name, value in settings.items() if value is not None}
    if not isinstance(wanted, str):
        require(not given, f"{', '.join(given)}: a loss of your own takes no settings from here; bind them in it")
        return wanted
    one_of("loss", wanted, LOSSES)
    made: Any = LOSSES[wanted]
    known = [field.name for field in dataclasses.fields(made)]
    for name in given:
        has = f"has {' and '.join(known)}" if known else "has none"
        require(name in known, f"{name} is no setting of the loss {wanted}, which {has}.{did_you_mean(name, known)}")
    return made(**given)


def _clipped(
    ratio: jax.Array, advantages: jax.Array, low: float, high: float, delta: float | None
) -> tuple[jax.Array, Diagnostics]:
    free = ratio if delta is None else jnp.minimum(ratio, delta)
    loss = -jnp.minimum(free * advantages, jnp.clip(ratio, 1 - low, 1 + high) * advantages)
    held = ((ratio > 1 + high) & (advantages > 0)) | ((ratio < 1 - low) & (advantages < 0))
    if delta is not None:
        held |= (ratio > delta) & (advantages < 0)
    return loss, {"ratio": stop_gradient(ratio), "clipped": held.astype(jnp.float32)}


def _check_range(low: float, high: float, delta: float | None) -> None:
    require(
        delta is None or delta > 1 + high,
        f"delta must be above 1 + eps_high = {1 + high:g}, such as 4, or left out for no such bound, got {delta}.",
    )
    require(0 < low <= 1, f"eps_low must be above 0 and at most 1, for a ratio is not negative; got {low}")
    require(high > 0, f"eps_high must be above 0, such as 0.2; got {high}")


def _counted(mask: jax.Array, learnt: jax.Array, *given: jax.Array) -> list[jax.Array]:
    """Each in f32, 0 where the mask is; only the first carries a gradient."""
    return [jnp.where(mask > 0, x.astype(jnp.float32), 0.0) for x in (learnt, *map(stop_gradient, given))]


def _ratio(difference: jax.Array) -> jax.Array:
    return jnp.exp(jnp.clip(difference, -FARTHEST, FARTHEST))


# --- how far from a reference -----------------------------------------------------------------------------------------


def kl(logprobs: jax.Array, reference: jax.Array, mask: jax.Array, kind: str = "k3") -> jax.Array:
    """An estimate of KL(pi || ref) at each token that pi sampled, 0 where the mask is: k1 = log pi - log ref,
    k2 = k1^2 / 2, k3 = e^-k1 + k1 - 1. For PPO's rewards and for metrics; as a loss: kl_loss.
    """
    one_of("kl", kind, KL_ESTIMATES)
    logps, reference = _counted(mask, logprobs, reference)
    k1 = logps - reference
    match kind:
        case "k1":
            return k1
        case "k2":
            return k1 * k1 / 2
    return jnp.expm1(jnp.clip(-k1, -FARTHEST, FARTHEST)) + k1


def kl_loss(logprobs: jax.Array, reference: jax.Array, mask: jax.Array, kind: str = "k3") -> jax.Array:
    """The same as a loss at each token: in the mean over samples the gradient of k2 is that of KL(pi || ref), the
    gradient of k3 that of KL(ref || pi).
    """
    check_kl_loss(kind)
    return kl(logprobs, reference, mask, kind)


def check_kl_loss(kind: str) -> None:
    one_of("kl", kind, KL_ESTIMATES)
    require(
        kind != "k1",
        "kl must be k2 or k3 as a loss; got k1, whose gradient is 0 in the mean over samples, so that it pulls nowhere:"
        " take k2 for KL(policy || reference)",
    )


# --- of what another program sampled ----------------------------------------------------------------------------------


def importance(
    trainer_logprobs: jax.Array,
    sampler_logprobs: jax.Array,
    mask: jax.Array,
    cap: float = 2.0,
    *,
    level: str = "token",
    beyond: str = "truncate",
    sequence_sum: OfSequence | None = None,
) -> jax.Array:
    """What a token's loss is to be multiplied with since the sampler's probabilities were not quite the trainer's:
    min(exp(log pi_trainer - log pi_sampler), cap), without a gradient; 1 where the mask is 0.

    level="sequence" takes the ratio of whole sequences, by the sums that `sequence_sum` gives each token.
    beyond="drop" gives 0, not the cap, to what is above it.
    """
    one_of("level", level, LEVELS)
    one_of("beyond", beyond, BEYOND)
    require(cap >= 1, f"cap must be 1 or more, for 1 is a sampler that agrees; got {cap}")
    trainer, sampler = _counted(mask, trainer_logprobs, sampler_logprobs)
    difference = trainer - sampler
    if level == "sequence":
        require(sequence_sum is not None, "sequence_sum must be given where the level is sequence; got None")
        assert sequence_sum is not None
        (difference,) = _counted(mask, sequence_sum(difference))
    ratio = _ratio(difference)
    held = jnp.minimum(ratio, cap) if beyond == "truncate" else jnp.where(ratio > cap, 0.0, ratio)
    return stop_gradient(held)


# --- of a critic ------------------------------------------------------------------------------------------------------


def value_loss(
    values: jax.Array, old_values: jax.Array, returns: jax.Array, mask: jax.Array, clip: float = 0.2
) -> tuple[jax.Array, Diagnostics]:
    """max((v - R)^2, (clip(v, v_old - c, v_old + c) - R)^2) / 2 at each token, and `clipped`: where v has left the
    range on its way to R, and has no gradient. An infinite clip is none.
    """
    require(clip > 0, f"clip must be above 0, or infinite for none; got {clip}")
    v, old, returns = _counted(mask, values, old_values, returns)
    free, held = (v - returns) ** 2, (jnp.clip(v, old - clip, old + clip) - returns) ** 2
    return jnp.maximum(free, held) / 2, {"clipped": (held > free).astype(jnp.float32)}


# --- of a batch -------------------------------------------------------------------------------------------------------


def token_weights(
    aggregation: str, lengths: ArrayLike, num_sequences: int | None = None, max_tokens: int | None = None
) -> np.ndarray:
    """[S] f32: what each token of each sequence weighs, so that the sum of loss times weight over the tokens that count
    is the loss of the whole batch, however it is taken in parts. `lengths` [S]: how many of its tokens count, of every
    sequence of the batch; the weight of one without any is 0.

    grpo is the mean over sequences of their tokens' mean; dapo, which is bnpo where the batch is whole, the mean over
    all tokens; dr_grpo the sum over B max_tokens, a constant (it alone reads max_tokens). B is num_sequences, or where
    that is not given all there are, those without a token too; dapo does not ask.
    """
    one_of("aggregation", aggregation, AGGREGATIONS)
    lengths = np.asarray(lengths, np.float64)
    total, filled = len(lengths) if num_sequences is None else num_sequences, int(np.count_nonzero(lengths))
    require(
        total >= filled,
        f"num_sequences must be at least the {filled} sequences that have tokens; got {total}: count those of the whole"
        " batch",
    )
    if aggregation == "grpo":
        each = np.maximum(lengths, 1) * max(total, 1)
    elif aggregation == "dr_grpo":
        each = np.full_like(lengths, max(total, 1) * _constant(max_tokens))
    else:
        each = np.full_like(lengths, max(lengths.sum(), 1.0))
    return np.where(lengths > 0, 1 / each, 0.0).astype(np.float32)


def top_entropy(entropy: np.ndarray, counts: np.ndarray, quantile: float) -> np.ndarray:
    """[B, T] f32: 1 at the share `quantile` of the tokens that count (a mask) with the highest entropy, 0 at the others
    (arXiv 2506.01939).
    """
    if not counts.any():
        return np.zeros(entropy.shape, np.float32)
    least = np.quantile(entropy[counts].astype(np.float64), 1 - quantile)
    return (counts & (entropy >= least)).astype(np.float32)


def _constant(max_tokens: int | None) -> int:
    require(
        max_tokens is not None and max_tokens >= 1,
        f"max_tokens must be given where the aggregation is dr_grpo, which divides by it; got {max_tokens}",
    )
    assert max_tokens is not None
    return max_tokens
