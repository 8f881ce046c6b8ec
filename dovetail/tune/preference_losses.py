"""The losses of preferences, as formulas on one number per document: no model, no batch.

A ratio is the sum over a completion's tokens of log pi - log pi_ref; a mean is log pi averaged over them. Each function
works element by element on arrays of any shape, and gives the loss and the rewards that it implies: the policy prefers
what has the greater reward. Rewards carry no gradient.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.nn import log_sigmoid, sigmoid

LEAST_DOUBT = 1e-6  # a completion is never taken to be surer than a mean log-probability of minus this


class Judged(NamedTuple):
    """Of each pair."""

    loss: jax.Array
    chosen: jax.Array  # reward
    rejected: jax.Array


class Rated(NamedTuple):
    """Of each document alone."""

    loss: jax.Array
    reward: jax.Array


def _judged(loss: jax.Array, chosen: jax.Array, rejected: jax.Array) -> Judged:
    return Judged(loss, jax.lax.stop_gradient(chosen), jax.lax.stop_gradient(rejected))


# --- with a reference -------------------------------------------------------------------------------------------------


def dpo(chosen: jax.Array, rejected: jax.Array, *, beta: float, label_smoothing: float = 0.0) -> Judged:
    """-(1 - e) log sigma(beta D) - e log sigma(-beta D), D the difference of the ratios and e the share of pairs that
    are taken to be the wrong way round (arXiv 2305.18290; smoothed: cDPO)."""
    return _judged(_logistic(beta * (chosen - rejected), label_smoothing), beta * chosen, beta * rejected)


def robust(chosen: jax.Array, rejected: jax.Array, *, beta: float, label_smoothing: float) -> Judged:
    """(-(1 - e) log sigma(beta D) + e log sigma(-beta D)) / (1 - 2e): in the mean over pairs of which the share e is
    the wrong way round, what dpo would be on the right ones (arXiv 2403.00409)."""
    e, x = label_smoothing, beta * (chosen - rejected)
    loss = (-(1 - e) * log_sigmoid(x) + e * log_sigmoid(-x)) / (1 - 2 * e)
    return _judged(loss, beta * chosen, beta * rejected)


def hinge(chosen: jax.Array, rejected: jax.Array, *, beta: float) -> Judged:
    """max(0, 1 - beta D) (SLiC, arXiv 2305.10425)."""
    return _judged(jax.nn.relu(1 - beta * (chosen - rejected)), beta * chosen, beta * rejected)


def ipo(chosen: jax.Array, rejected: jax.Array, *, beta: float) -> Judged:
    """(d - 1 / (2 beta))^2 (arXiv 2310.12036, equation 17), d the difference of the ratios, each here averaged over its
    tokens: as sums they would make the loss grow with the square of the length (its authors' own choice, by TRL)."""
    return _judged((chosen - rejected - 0.5 / beta) ** 2, beta * chosen, beta * rejected)


def apo_zero(chosen: jax.Array, rejected: jax.Array, *, beta: float) -> Judged:
    """1 - sigma(beta chosen) + sigma(beta rejected): for chosen completions better than the model's own (APO, arXiv
    2408.06266, equation 7)."""
    loss = 1 - sigmoid(beta * chosen) + sigmoid(beta * rejected)
    return _judged(loss, beta * chosen, beta * rejected)


def apo_down(chosen: jax.Array, rejected: jax.Array, *, beta: float) -> Judged:
    """sigma(beta chosen) + 1 - sigma(beta D): for chosen completions worse than the model's own (APO, equation 8)."""
    loss = sigmoid(beta * chosen) + 1 - sigmoid(beta * (chosen - rejected))
    return _judged(loss, beta * chosen, beta * rejected)


def bco_pair(chosen: jax.Array, rejected: jax.Array, *, beta: float) -> Judged:
    """-log sigma(beta chosen) - log sigma(-beta rejected): each completion by itself (arXiv 2404.04656 without its
    shift, as in TRL; a part of MPO)."""
    loss = -log_sigmoid(beta * chosen) - log_sigmoid(-beta * rejected)
    return _judged(loss, beta * chosen, beta * rejected)


def kto(
    ratio: jax.Array, label: jax.Array, kl: jax.Array, *, beta: float, desirable: float = 1.0, undesirable: float = 1.0
) -> Rated:
    """Of a document that is good, label > 0: desirable (1 - sigma(beta (ratio - kl))); of one that is not: undesirable
    (1 - sigma(beta (kl - ratio))) (arXiv 2402.01306). kl, of the policy from the reference, carries no gradient."""
    kl = jax.lax.stop_gradient(kl)
    good = desirable * (1 - sigmoid(beta * (ratio - kl)))
    bad = undesirable * (1 - sigmoid(beta * (kl - ratio)))
    return Rated(jnp.where(label > 0, good, bad), jax.lax.stop_gradient(beta * ratio))


# --- without one ------------------------------------------------------------------------------------------------------


def orpo(chosen: jax.Array, rejected: jax.Array, *, beta: float) -> Judged:
    """Of means: -chosen - beta log sigma(log odds(chosen) - log odds(rejected)), log odds(m) = m - log(1 - e^m)
    (arXiv 2403.07691; beta is its lambda). The first term is the chosen completion's own cross entropy."""
    odds = (chosen - rejected) - (_log1mexp(chosen) - _log1mexp(rejected))
    return _judged(-chosen - beta * log_sigmoid(odds), beta * chosen, beta * rejected)


def simpo(chosen: jax.Array, rejected: jax.Array, *, beta: float, gamma: float, label_smoothing: float = 0.0) -> Judged:
    """Of means: -log sigma(beta (chosen - rejected) - gamma), smoothed as dpo (arXiv 2405.14734)."""
    loss = _logistic(beta * (chosen - rejected) - gamma, label_smoothing)
    return _judged(loss, beta * chosen, beta * rejected)


# --- of a reward model ------------------------------------------------------------------------------------------------


def bradley_terry(
    chosen: jax.Array, rejected: jax.Array, *, margin: jax.Array | float = 0.0, centering: float = 0.0
) -> Judged:
    """Of scores: -log sigma(chosen - rejected - margin) + centering (chosen + rejected)^2. Only differences are learnt,
    and the last term keeps scores near 0 (arXiv 2312.09244)."""
    loss = -log_sigmoid(chosen - rejected - margin) + centering * (chosen + rejected) ** 2
    return _judged(loss, chosen, rejected)


def _logistic(x: jax.Array, label_smoothing: float) -> jax.Array:
    return -(1 - label_smoothing) * log_sigmoid(x) - label_smoothing * log_sigmoid(-x)


def _log1mexp(x: jax.Array) -> jax.Array:
    """log(1 - e^x) of x < 0, by whichever of two forms keeps its digits. Both are computed, so each sees only numbers
    that it can take: an infinity that is not chosen would still spoil the gradient."""
    x = jnp.minimum(x, -LEAST_DOUBT)
    near = x > -jnp.log(2.0)
    by_expm1 = jnp.log(-jnp.expm1(jnp.where(near, x, -0.5)))
    return jnp.where(near, by_expm1, jnp.log1p(-jnp.exp(jnp.where(near, -1.0, x))))
