"""Preference losses as formulas of one number per document.

A ratio is the sum over a completion's tokens of log pi - log pi_ref; a mean is log pi averaged over them. Each function
works element by element on arrays of any shape, and returns the loss and the implicit rewards: the policy prefers the
completion with the greater reward. Rewards have no gradient.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.nn import log_sigmoid, sigmoid

LEAST_DOUBT = 1e-6  # mean log-probabilities above minus this are lowered to it


class Judged(NamedTuple):
    """Loss and rewards of each pair."""

    loss: jax.Array
    chosen: jax.Array  # reward
    rejected: jax.Array


class Rated(NamedTuple):
    """Loss and reward of each document."""

    loss: jax.Array
    reward: jax.Array


def _judged(loss: jax.Array, chosen: jax.Array, rejected: jax.Array) -> Judged:
    return Judged(loss, jax.lax.stop_gradient(chosen), jax.lax.stop_gradient(rejected))


# --- with a reference -------------------------------------------------------------------------------------------------


def dpo(chosen: jax.Array, rejected: jax.Array, *, beta: float, label_smoothing: float = 0.0) -> Judged:
    """Compute DPO's loss (arXiv 2305.18290; smoothed: cDPO): -(1 - e) log sigma(beta D) - e log sigma(-beta D).

    D is the difference of the ratios, and e (`label_smoothing`) the assumed share of pairs with swapped labels.
    """
    return _judged(_logistic(beta * (chosen - rejected), label_smoothing), beta * chosen, beta * rejected)


def robust(chosen: jax.Array, rejected: jax.Array, *, beta: float, label_smoothing: float) -> Judged:
    """Compute robust DPO (arXiv 2403.00409): (-(1 - e) log sigma(beta D) + e log sigma(-beta D)) / (1 - 2e).

    Averaged over pairs of which the share e has swapped labels, it is the loss of `dpo` on the correct labels.
    """
    e, x = label_smoothing, beta * (chosen - rejected)
    loss = (-(1 - e) * log_sigmoid(x) + e * log_sigmoid(-x)) / (1 - 2 * e)
    return _judged(loss, beta * chosen, beta * rejected)


def hinge(chosen: jax.Array, rejected: jax.Array, *, beta: float) -> Judged:
    """Compute the hinge loss (SLiC, arXiv 2305.10425): max(0, 1 - beta D)."""
    return _judged(jax.nn.relu(1 - beta * (chosen - rejected)), beta * chosen, beta * rejected)


def ipo(chosen: jax.Array, rejected: jax.Array, *, beta: float) -> Judged:
    """Compute IPO (arXiv 2310.12036, equation 17): (d - 1 / (2 beta))^2.

    d is the difference of the ratios, each averaged over its tokens: with sums the loss would grow with the square of
    the length (the authors' choice, as in TRL).
    """
    return _judged((chosen - rejected - 0.5 / beta) ** 2, beta * chosen, beta * rejected)


def apo_zero(chosen: jax.Array, rejected: jax.Array, *, beta: float) -> Judged:
    """Compute APO-zero (arXiv 2408.06266, equation 7): 1 - sigma(beta chosen) + sigma(beta rejected).

    It suits chosen completions that are better than the model's own.
    """
    loss = 1 - sigmoid(beta * chosen) + sigmoid(beta * rejected)
    return _judged(loss, beta * chosen, beta * rejected)


def apo_down(chosen: jax.Array, rejected: jax.Array, *, beta: float) -> Judged:
    """Compute APO-down (equation 8): sigma(beta chosen) + 1 - sigma(beta D).

    It suits chosen completions that are worse than the model's own.
    """
    loss = sigmoid(beta * chosen) + 1 - sigmoid(beta * (chosen - rejected))
    return _judged(loss, beta * chosen, beta * rejected)


def bco_pair(chosen: jax.Array, rejected: jax.Array, *, beta: float) -> Judged:
    """Compute BCO for pairs: -log sigma(beta chosen) - log sigma(-beta rejected).

    Each completion counts by itself (arXiv 2404.04656 without its shift, as in TRL; a part of MPO).
    """
    loss = -log_sigmoid(beta * chosen) - log_sigmoid(-beta * rejected)
    return _judged(loss, beta * chosen, beta * rejected)


def kto(
    ratio: jax.Array, label: jax.Array, kl: jax.Array, *, beta: float, desirable: float = 1.0, undesirable: float = 1.0
) -> Rated:
    """Compute KTO (arXiv 2402.01306).

    For a desirable document, label > 0: desirable (1 - sigma(beta (ratio - kl))); for another: undesirable (1 -
    sigma(beta (kl - ratio))). `kl` is that of the policy from the reference, and has no gradient.
    """
    kl = jax.lax.stop_gradient(kl)
    good = desirable * (1 - sigmoid(beta * (ratio - kl)))
    bad = undesirable * (1 - sigmoid(beta * (kl - ratio)))
    return Rated(jnp.where(label > 0, good, bad), jax.lax.stop_gradient(beta * ratio))


# --- without a reference ----------------------------------------------------------------------------------------------


def orpo(chosen: jax.Array, rejected: jax.Array, *, beta: float) -> Judged:
    """Compute ORPO (arXiv 2403.07691) from means: -chosen - beta log sigma(log odds(chosen) - log odds(rejected)).

    log odds(m) = m - log(1 - e^m), and beta is the paper's lambda. The first term is the cross entropy of the chosen
    completion.
    """
    odds = (chosen - rejected) - (_log1mexp(chosen) - _log1mexp(rejected))
    return _judged(-chosen - beta * log_sigmoid(odds), beta * chosen, beta * rejected)


def simpo(chosen: jax.Array, rejected: jax.Array, *, beta: float, gamma: float, label_smoothing: float = 0.0) -> Judged:
    """Compute SimPO (arXiv 2405.14734) from means: -log sigma(beta (chosen - rejected) - gamma), smoothed as `dpo`."""
    loss = _logistic(beta * (chosen - rejected) - gamma, label_smoothing)
    return _judged(loss, beta * chosen, beta * rejected)


# --- reward model -----------------------------------------------------------------------------------------------------


def bradley_terry(
    chosen: jax.Array, rejected: jax.Array, *, margin: jax.Array | float = 0.0, centering: float = 0.0
) -> Judged:
    """Compute the reward model's loss from scores: -log sigma(chosen - rejected - margin).

    The term centering (chosen + rejected)^2 keeps the scores near 0 (arXiv 2312.09244): the first learns differences
    only.
    """
    loss = -log_sigmoid(chosen - rejected - margin) + centering * (chosen + rejected) ** 2
    return _judged(loss, chosen, rejected)


def _logistic(x: jax.Array, label_smoothing: float) -> jax.Array:
    return -(1 - label_smoothing) * log_sigmoid(x) - label_smoothing * log_sigmoid(-x)


def _log1mexp(x: jax.Array) -> jax.Array:
    """Return log(1 - e^x) for x < 0, by the more precise of two forms.

    Both are computed, so each gets only inputs in its range: an infinity that is not selected would still make the
    gradient NaN.
    """
    x = jnp.minimum(x, -LEAST_DOUBT)
    near = x > -jnp.log(2.0)
    by_expm1 = jnp.log(-jnp.expm1(jnp.where(near, x, -0.5)))
    return jnp.where(near, by_expm1, jnp.log1p(-jnp.exp(jnp.where(near, -1.0, x))))
