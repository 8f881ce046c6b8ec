"""How much better a completion did than was to be expected: from the rewards of groups, or from a critic's values.

All of this is NumPy on the host, in f64. A reward that is NaN (or None) is one that nobody could give: its completion
takes no part in any mean, and its advantage is 0; to keep it out of the loss altogether is for the caller's mask.

N prompts, G completions of each; B sequences, T tokens.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from dovetail.core.choice import one_of, require

Advantage = Callable[[np.ndarray], np.ndarray]  # rewards [N, G] -> advantages [N, G]

SCALES = ("group", "batch", "none")  # whose standard deviation an advantage is divided by
SCALED = ("grpo", "dr_grpo")  # the advantages that can be scaled in each of these ways
STD_FLOOR = 1e-4  # of a group's standard deviation
VARIANCE_FLOOR = 1e-8  # of what is whitened


class Estimated(NamedTuple):
    """Of each token, [B, T]; 0 where the mask is."""

    advantages: np.ndarray
    returns: np.ndarray  # what its value should have been


# --- of groups --------------------------------------------------------------------------------------------------------


def grpo(rewards: ArrayLike, *, scale: str = "group") -> np.ndarray:
    """(r - mean of the group) / (std + 1e-4), std with Bessel's correction: of the group (arXiv 2402.03300), of the
    whole batch (arXiv 2508.08221), or with scale "none" r - mean, which does not favour prompts that are nearly always
    or nearly never answered (Dr. GRPO).
    """
    one_of("scale_rewards", scale, SCALES)
    r = _rewards(rewards)
    off = r - _mean(r, axis=1)
    if scale != "none":
        off = off / (np.sqrt(_variance(r, axis=1 if scale == "group" else None)) + STD_FLOOR)
    return np.where(_plays(r), off, 0.0)


def dr_grpo(rewards: ArrayLike) -> np.ndarray:
    """R - mean of the group (arXiv 2503.20783)."""
    return grpo(rewards, scale="none")


def rloo(rewards: ArrayLike) -> np.ndarray:
    """R - the mean of the group's others (arXiv 2402.14740), which is n / (n - 1) times r - the mean of all."""
    r = _rewards(rewards)
    n = _count(r, axis=1)
    return np.where(_plays(r), (r - _mean(r, axis=1)) * n / np.maximum(n - 1, 1), 0.0)


def reinforce_pp(rewards: ArrayLike) -> np.ndarray:
    """Rewards whitened over the whole batch (REINFORCE++, arXiv 2501.03262). A completion counts once, whatever its
    length: to whiten tokens, as is done too, lets long ones draw the mean.
    """
    r = _rewards(rewards)
    return whiten(r, ~np.isnan(r))


def reinforce_pp_baseline(rewards: ArrayLike) -> np.ndarray:
    """R - mean of the group, whitened over the whole batch: REINFORCE++ with a group's baseline."""
    return whiten(dr_grpo(rewards), ~np.isnan(_rewards(rewards)))


ADVANTAGES: dict[str, Advantage] = {
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "rloo": rloo,
    "reinforce_pp": reinforce_pp,
    "reinforce_pp_baseline": reinforce_pp_baseline,
}


def group_advantages(rewards: ArrayLike, by: str | Advantage, scale: str | None = None) -> np.ndarray:
    """[N, G], of rewards [N, G] in which None or NaN is no reward; `by` one of ADVANTAGES or the user's own function,
    which is given NaN for what has none and whose answer there is not read. `scale`, one of SCALES, is for those in
    SCALED; None: their own.
    """
    r = _rewards(rewards)
    require(
        scale is None or by in SCALED,
        f"scale_rewards={scale} is read by the advantages {' and '.join(SCALED)} alone, got {by}.",
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
        f"advantage must give an array of the rewards' shape {r.shape}; {name} gave {found.shape}: return one number"
        " for each completion",
    )
    found = np.where(np.isnan(r), 0.0, found)
    wrong = found[~np.isfinite(found)]
    require(
        not wrong.size,
        f"advantage must give finite numbers; {name} gave {wrong[:1]} for a completion that has a reward: guard its"
        " divisions, and skip NaN rewards in its means",
    )
    return found


def all_equal(rewards: ArrayLike) -> np.ndarray:
    """[N]: whether a group's rewards are all the same, so that nothing is to be learnt from it: DAPO samples another in
    its place. True of a group with fewer than two rewards.
    """
    r = _rewards(rewards)
    absent = np.isnan(r)
    return np.where(absent, -np.inf, r).max(axis=1) <= np.where(absent, np.inf, r).min(axis=1)


def overlong_penalty(lengths: ArrayLike, max_tokens: int, buffer: int) -> np.ndarray:
    """What DAPO adds to the reward of a completion of so many tokens (arXiv 2503.14476, equation 13): 0 up to
    max_tokens - buffer, from there evenly down to -1 at max_tokens, and -1 beyond.
    """
    require(
        1 <= buffer <= max_tokens,
        f"buffer must be from 1 to max_tokens, which is {max_tokens}; got {buffer}: over so many tokens the penalty"
        " grows",
    )
    return np.clip((max_tokens - buffer - np.asarray(lengths, np.float64)) / buffer, -1.0, 0.0)


# --- of a critic ------------------------------------------------------------------------------------------------------


def token_rewards(scores: ArrayLike, kl: ArrayLike, mask: ArrayLike, beta: float) -> np.ndarray:
    """[B, T]: -beta kl at each token that counts, and the sequence's score [B] at the last of them."""
    scores, counts = np.asarray(scores, np.float64), np.asarray(mask) > 0
    require(
        bool(np.isfinite(scores[counts.any(axis=1)]).all()),
        "scores must be finite for every sequence whose tokens count; got NaN or an infinity: set the mask of a"
        " sequence without a reward to 0",
    )
    is_last = counts & (np.cumsum(counts[:, ::-1], axis=1)[:, ::-1] == 1)
    off = np.where(counts, -beta * np.where(counts, kl, 0.0), 0.0)
    return off + np.where(is_last, scores[:, None], 0.0)


def gae(rewards: ArrayLike, values: ArrayLike, mask: ArrayLike, gamma: float = 1.0, lam: float = 0.95) -> Estimated:
    """Generalised advantage estimation (arXiv 1506.02438) of rows [B, T] that hold a sequence each:
    delta_t = r_t + gamma V_t+1 - V_t, A_t = delta_t + gamma lam A_t+1, returns A + V; after the last token V is 0.

    The next token is the next that counts: what a tool wrote between two turns is stepped over. Advantages are not
    whitened.
    """
    for name, share in (("gamma", gamma), ("lam", lam)):
        require(0 <= share <= 1, f"{name} must be from 0 to 1; got {share}")
    counts = np.asarray(mask) > 0
    r, v = (np.where(counts, np.asarray(x, np.float64), 0.0) for x in (rewards, values))
    found, after, next_v = np.zeros_like(v), np.zeros(len(v)), np.zeros(len(v))
    for t in reversed(range(v.shape[1])):
        now = counts[:, t]
        after = np.where(now, r[:, t] + gamma * next_v - v[:, t] + gamma * lam * after, after)
        next_v = np.where(now, v[:, t], next_v)
        found[:, t] = np.where(now, after, 0.0)
    return Estimated(found, found + v)


def whiten(values: ArrayLike, mask: ArrayLike) -> np.ndarray:
    """(x - mean) / sqrt(variance + 1e-8) over all that counts, with Bessel's correction; 0 elsewhere."""
    counts = np.asarray(mask) > 0
    x = np.where(counts, np.asarray(values, np.float64), np.nan)
    white = (x - _mean(x)) / np.sqrt(_variance(x) + VARIANCE_FLOOR)
    return np.where(counts, white, 0.0)


# --- of an evaluation -------------------------------------------------------------------------------------------------


def pass_at_k(correct: ArrayLike, n: ArrayLike, k: int) -> np.ndarray:
    """The chance that one at least of k completions is right, where `correct` of n were, for each prompt; without bias
    1 - C(n - correct, k) / C(n, k) (arXiv 2107.03374).
    """
    correct, n = np.broadcast_arrays(np.asarray(correct, np.int64), np.asarray(n, np.int64))
    require(k >= 1, f"k must be 1 or more; got {k}")
    fewest = int(n.min(initial=np.iinfo(np.int64).max))
    require(k <= fewest, f"k must be at most the completions of a prompt, which are {fewest}; got {k}: sample more")
    require(
        bool(((correct >= 0) & (correct <= n)).all()),
        f"correct must be from 0 to n for each prompt; got {correct.tolist()} of {n.tolist()}",
    )
    shares = [1.0 - math.comb(of - c, k) / math.comb(of, k) for c, of in zip(correct.flat, n.flat, strict=True)]
    return np.asarray(shares, np.float64).reshape(n.shape)


def maj_at_k(answers: Sequence[Hashable], correct: Sequence[bool | float]) -> float:
    """Whether the answer that most of a prompt's k completions give is right; where several are given equally often,
    the share of them that is. None is no answer, and has no vote; 0 where nobody votes.
    """
    votes = Counter(answer for answer in answers if answer is not None)
    most = max(votes.values(), default=0)
    right = [float(ok) for answer, ok in zip(answers, correct, strict=True) if votes[answer] == most > 0]
    return sum(right) / len(right) if right else 0.0


# --- among numbers of which some are absent ---------------------------------------------------------------------------


def _rewards(rewards: ArrayLike) -> np.ndarray:
    r = np.asarray(rewards, np.float64)  # None becomes NaN
    require(r.ndim == 2, f"rewards must be [prompts, completions of each]; got the shape {r.shape}: reshape them")
    require(
        not np.isinf(r).any(),
        "rewards must be finite, or None where there is none; got an infinity: bound what the reward function returns",
    )
    return r


def _plays(r: np.ndarray) -> np.ndarray:
    """[N, G]: has a reward, and another than somebody in its group. Where all are equal a mean's rounding is not to
    become an advantage.
    """
    return ~np.isnan(r) & ~all_equal(r)[:, None]


def _count(x: np.ndarray, axis: int | None = None) -> np.ndarray:
    return (~np.isnan(x)).sum(axis=axis, keepdims=True)


def _mean(x: np.ndarray, axis: int | None = None) -> np.ndarray:
    return np.nansum(x, axis=axis, keepdims=True) / np.maximum(_count(x, axis), 1)


def _variance(x: np.ndarray, axis: int | None = None) -> np.ndarray:
    """With Bessel's correction; of a single number 0."""
    squares = np.nansum((x - _mean(x, axis)) ** 2, axis=axis, keepdims=True)
    return squares / np.maximum(_count(x, axis) - 1, 1)
