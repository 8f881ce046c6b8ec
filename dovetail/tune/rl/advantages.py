"""Advantages: how much better a completion did than expected, from the rewards of groups or from a critic's values.

All of this is NumPy on the host, in f64. A reward that is NaN (or None) is missing: its completion counts in no mean,
and its advantage is 0. The caller masks it out of the loss.

N prompts, G completions of each; B sequences, T tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from dovetail.core.choice import one_of, require

Advantage = Callable[[np.ndarray], np.ndarray]  # rewards [N, G] -> advantages [N, G]

SCALES = ("group", "batch", "none")  # whose standard deviation an advantage is divided by
SCALED = ("grpo", "dr_grpo")  # the advantages that read `scale_rewards`
STD_FLOOR = 1e-4  # added to a standard deviation
VARIANCE_FLOOR = 1e-8  # added to the variance of values that are whitened


class TokenAdvantages(NamedTuple):
    """Advantages and returns of each token, [B, T]; 0 where the mask is 0."""

    advantages: np.ndarray
    returns: np.ndarray  # the targets of the value model


# --- from groups ------------------------------------------------------------------------------------------------------


def grpo(rewards: ArrayLike, *, scale: str = "group") -> np.ndarray:
    """Return (r - mean of the group) / (std + 1e-4), std with Bessel's correction.

    Args:
        rewards: [N, G].
        scale: The std of the group (arXiv 2402.03300) or of the whole batch (arXiv 2508.08221); "none" does not divide,
            which removes the bias towards prompts with nearly equal rewards (Dr. GRPO).
    """
    one_of("scale_rewards", scale, SCALES)
    r = _rewards(rewards)
    centred = r - _mean(r, axis=1)
    if scale != "none":
        centred = centred / (np.sqrt(_variance(r, axis=1 if scale == "group" else None)) + STD_FLOOR)
    return np.where(_differs(r), centred, 0.0)


def dr_grpo(rewards: ArrayLike) -> np.ndarray:
    """Return r - mean of the group (arXiv 2503.20783)."""
    return grpo(rewards, scale="none")


def rloo(rewards: ArrayLike) -> np.ndarray:
    """Return r - mean of the group's others (arXiv 2402.14740), which is n / (n - 1) times r - mean of all."""
    r = _rewards(rewards)
    n = _count(r, axis=1)
    return np.where(_differs(r), (r - _mean(r, axis=1)) * n / np.maximum(n - 1, 1), 0.0)


def reinforce_pp(rewards: ArrayLike) -> np.ndarray:
    """Return the rewards whitened over the whole batch (REINFORCE++, arXiv 2501.03262).

    Every completion counts once, whatever its length. Other implementations whiten tokens, which weights long
    completions more.
    """
    r = _rewards(rewards)
    return whiten(r, ~np.isnan(r))


def reinforce_pp_baseline(rewards: ArrayLike) -> np.ndarray:
    """Return r - mean of the group, whitened over the whole batch: REINFORCE++ with a group baseline."""
    return whiten(dr_grpo(rewards), ~np.isnan(_rewards(rewards)))


ADVANTAGES: dict[str, Advantage] = {
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "rloo": rloo,
    "reinforce_pp": reinforce_pp,
    "reinforce_pp_baseline": reinforce_pp_baseline,
}


def group_advantages(rewards: ArrayLike, by: str | Advantage, scale: str | None = None) -> np.ndarray:
    """Return the advantages [N, G] of rewards [N, G], in which None or NaN is a missing reward.

    Args:
        rewards: [N, G].
        by: A name in ADVANTAGES, or the user's function. The function is given NaN for missing rewards, and what it
            returns for them is not read.
        scale: One of SCALES, for the names in SCALED; None: their own.

    Raises:
        RecipeError: A name is not known, or the function's result is not finite or has another shape.
    """
    r = _rewards(rewards)
    require(
        scale is None or by in SCALED,
        f"scale_rewards is read by the advantages {' and '.join(SCALED)} only, got {scale} with {by}",
        param="scale_rewards",
    )
    if scale is not None:
        return grpo(r, scale=scale)
    if isinstance(by, str):
        one_of("advantage", by, ADVANTAGES)
        return ADVANTAGES[by](r)
    found = np.asarray(by(r.copy()), np.float64)
    name = getattr(by, "__name__", "the function")
    require(
        found.shape == r.shape,
        f"advantage must return one number for each completion, an array {r.shape}; {name} returned {found.shape}",
        param="advantage",
    )
    found = np.where(np.isnan(r), 0.0, found)
    wrong = found[~np.isfinite(found)]
    require(
        not wrong.size,
        f"advantage must return finite numbers where there is a reward; {name} returned {wrong[:1]}: guard its "
        "divisions, and leave NaN rewards out of its means",
        param="advantage",
    )
    return found


def all_equal(rewards: ArrayLike) -> np.ndarray:
    """Return whether the rewards of each group are all the same, [N] bool: such a group has no gradient.

    DAPO samples another group in its place. A group with fewer than two rewards is such a group.
    """
    r = _rewards(rewards)
    absent = np.isnan(r)
    return np.where(absent, -np.inf, r).max(axis=1) <= np.where(absent, np.inf, r).min(axis=1)


def soft_overlong_punishment(lengths: ArrayLike, max_completion_length: int, soft_punish_cache: int) -> np.ndarray:
    """Return what DAPO adds to the reward of completions of these lengths (arXiv 2503.14476, equation 13).

    It is 0 up to max_completion_length - soft_punish_cache, falls linearly to -1 at max_completion_length, and is -1
    beyond.
    """
    require(
        1 <= soft_punish_cache <= max_completion_length,
        f"soft_punish_cache must be from 1 to max_completion_length, {max_completion_length}, got {soft_punish_cache}",
        param="soft_punish_cache",
    )
    over = max_completion_length - soft_punish_cache - np.asarray(lengths, np.float64)
    return np.clip(over / soft_punish_cache, -1.0, 0.0)


# --- from a critic ----------------------------------------------------------------------------------------------------


def token_rewards(scores: ArrayLike, kl: ArrayLike, mask: ArrayLike, kl_coef: float) -> np.ndarray:
    """Return the reward of each token, [B, T]: -kl_coef kl, and the score of the sequence [B] at its last token."""
    scores, counts = np.asarray(scores, np.float64), np.asarray(mask) > 0
    require(
        bool(np.isfinite(scores[counts.any(axis=1)]).all()),
        "scores must be finite for every sequence with tokens that count, got NaN or an infinity: set the mask of a "
        "sequence without a reward to 0",
        param="scores",
    )
    is_last = counts & (np.cumsum(counts[:, ::-1], axis=1)[:, ::-1] == 1)
    penalty = np.where(counts, -kl_coef * np.where(counts, kl, 0.0), 0.0)
    return penalty + np.where(is_last, scores[:, None], 0.0)


def gae(
    rewards: ArrayLike, values: ArrayLike, mask: ArrayLike, gamma: float = 1.0, lam: float = 0.95
) -> TokenAdvantages:
    """Return generalised advantage estimates (arXiv 1506.02438) of rows [B, T] with one sequence each.

    delta_t = r_t + gamma V_t+1 - V_t, A_t = delta_t + gamma lam A_t+1, returns A + V; V is 0 after the last token. The
    next token is the next one in the mask: a tool's output between two turns is skipped. Advantages are not whitened.
    """
    for name, share in (("gamma", gamma), ("lam", lam)):
        require(0 <= share <= 1, f"{name} must be from 0 to 1, got {share}", param=name)
    counts = np.asarray(mask) > 0
    r, v = (np.where(counts, np.asarray(x, np.float64), 0.0) for x in (rewards, values))
    found, after, next_v = np.zeros_like(v), np.zeros(len(v)), np.zeros(len(v))
    for t in reversed(range(v.shape[1])):
        now = counts[:, t]
        after = np.where(now, r[:, t] + gamma * next_v - v[:, t] + gamma * lam * after, after)
        next_v = np.where(now, v[:, t], next_v)
        found[:, t] = np.where(now, after, 0.0)
    return TokenAdvantages(found, found + v)


def whiten(values: ArrayLike, mask: ArrayLike) -> np.ndarray:
    """Return (x - mean) / sqrt(variance + 1e-8) over the masked values, with Bessel's correction; 0 elsewhere."""
    counts = np.asarray(mask) > 0
    x = np.where(counts, np.asarray(values, np.float64), np.nan)
    white = (x - _mean(x)) / np.sqrt(_variance(x) + VARIANCE_FLOOR)
    return np.where(counts, white, 0.0)


# --- statistics without the missing values ----------------------------------------------------------------------------


def _rewards(rewards: ArrayLike) -> np.ndarray:
    r = np.asarray(rewards, np.float64)  # None becomes NaN
    require(r.ndim == 2, f"rewards must be [prompts, completions of each], got the shape {r.shape}", param="rewards")
    require(
        not np.isinf(r).any(),
        "rewards must be finite, or None where there is none, got an infinity: bound what the reward function returns",
        param="rewards",
    )
    return r


def _differs(r: np.ndarray) -> np.ndarray:
    """Return whether a completion has a reward and its group's rewards are not all equal, [N, G].

    If they are, the rounding error of the mean must not become an advantage.
    """
    return ~np.isnan(r) & ~all_equal(r)[:, None]


def _count(x: np.ndarray, axis: int | None = None) -> np.ndarray:
    return (~np.isnan(x)).sum(axis=axis, keepdims=True)


def _mean(x: np.ndarray, axis: int | None = None) -> np.ndarray:
    return np.nansum(x, axis=axis, keepdims=True) / np.maximum(_count(x, axis), 1)


def _variance(x: np.ndarray, axis: int | None = None) -> np.ndarray:
    """Return the variance with Bessel's correction; 0 for a single number."""
    squares = np.nansum((x - _mean(x, axis)) ** 2, axis=axis, keepdims=True)
    return squares / np.maximum(_count(x, axis) - 1, 1)
