"""Compare every advantage with its formula, per group and per token; missing rewards are left out."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from refusals import refuses

from dovetail.core.errors import RecipeError
from dovetail.tune.rl.advantages import (
    ADVANTAGES,
    all_equal,
    gae,
    group_advantages,
    grpo,
    soft_overlong_punishment,
    token_rewards,
    whiten,
)
from dovetail.tune.rl.evaluation import maj_at_k, pass_at_k

NAN = np.nan


def some_rewards(seed: int) -> np.ndarray:
    """Return [7, 5]: a third is missing, one group has none, one a single reward, and in one all are equal."""
    rng = np.random.default_rng(seed)
    rewards = np.where(rng.random((7, 5)) < 0.3, NAN, rng.normal(size=(7, 5)))
    rewards[0], rewards[1] = rng.normal(size=5), NAN
    rewards[2], rewards[3] = [NAN, NAN, 0.7, NAN, NAN], [0.1, NAN, 0.1, 0.1, 0.1]
    return rewards


def by_formula(name: str, rewards: np.ndarray) -> np.ndarray:
    """Return the same with torch, from lists without the missing rewards."""
    out, there = torch.zeros(rewards.shape, dtype=torch.float64), torch.tensor(~np.isnan(rewards))
    for row, values in enumerate(torch.tensor(rewards)):
        r = values[there[row]]
        if name == "rloo":
            others = [torch.cat([r[:i], r[i + 1 :]]) for i in range(len(r))]
            found = [x - o.mean() if len(o) else x * 0 for x, o in zip(r, others, strict=True)]
            out[row, there[row]] = torch.stack(found) if found else r
        elif name == "grpo":
            std = r.std() if len(r) > 1 else torch.tensor(0.0)
            out[row, there[row]] = (r - r.mean()) / (std + 1e-4)
        else:
            out[row, there[row]] = r if name == "reinforce_pp" else r - r.mean()
    if name.startswith("reinforce_pp"):
        x = out[there]
        out[there] = (x - x.mean()) * torch.rsqrt(x.var() + 1e-8)
    return out.numpy()


@pytest.mark.parametrize("name", ADVANTAGES)
@pytest.mark.parametrize("seed", [0, 1])
def test_advantage_matches_its_formula(name, seed):
    rewards = some_rewards(seed)
    found = group_advantages(rewards, name)
    np.testing.assert_allclose(found, by_formula(name, rewards), rtol=1e-9, atol=1e-9)
    assert np.all(found[np.isnan(rewards)] == 0)
    np.testing.assert_array_equal(ADVANTAGES[name](rewards.astype(np.float32)).shape, rewards.shape)


def test_none_is_a_missing_reward():
    with_none: Any = [[1.0, None, 0.0], [None, None, None]]
    for name in ADVANTAGES:
        found = group_advantages(with_none, name)
        np.testing.assert_array_equal(found, group_advantages([[1.0, NAN, 0.0], [NAN] * 3], name))
        assert found[0, 0] > 0 > found[0, 2] and np.all(found[1] == 0)


def test_a_group_with_equal_rewards_has_no_advantage():
    """Exactly 0: the rounding error of 3 x 0.1 - 0.3 must not be divided by a small std."""
    rewards = np.asarray([[0.1] * 7, [0.3] * 7, [1.0, 0.0] * 3 + [NAN], [NAN] * 6 + [2.0]])
    np.testing.assert_array_equal(all_equal(rewards), [True, True, False, True])
    for name in ("grpo", "dr_grpo", "rloo"):
        assert np.all(group_advantages(rewards, name)[[0, 1, 3]] == 0), name
    np.testing.assert_allclose(group_advantages([[0.1] * 7] * 3, "reinforce_pp"), 0, atol=1e-9)


def test_scale_none_is_dr_grpo():
    rewards = some_rewards(2)
    np.testing.assert_array_equal(grpo(rewards, scale="none"), group_advantages(rewards, "dr_grpo"))


def test_an_advantage_function_of_the_user():
    def best_of(rewards: np.ndarray) -> np.ndarray:
        return (rewards == np.nanmax(rewards, axis=1, keepdims=True)) - 0.5

    rewards = np.asarray([[1.0, 3.0, NAN], [2.0, 1.0, 0.0]])
    np.testing.assert_array_equal(group_advantages(rewards, best_of), [[-0.5, 0.5, 0.0], [0.5, -0.5, -0.5]])


# --- tokens and lengths -----------------------------------------------------------------------------------------------


def test_gae_matches_its_sum():
    """A_t is the sum over l of (gamma lam)^l delta_t+l, over the masked tokens, wherever they are in a row."""
    rng, gamma, lam = np.random.default_rng(3), 0.97, 0.9
    mask = (rng.random((6, 11)) < 0.6).astype(np.float32)
    mask[2] = 0
    rewards, values = (np.where(mask > 0, rng.normal(size=mask.shape), NAN) for _ in range(2))
    found = gae(rewards, values, mask, gamma, lam)
    for row in range(len(mask)):
        here = mask[row] > 0
        r, v = torch.tensor(rewards[row, here]), torch.tensor(values[row, here])
        delta = r + gamma * torch.cat([v[1:], torch.zeros(min(1, len(v)))]) - v
        want = [sum((gamma * lam) ** k * float(d) for k, d in enumerate(delta[t:])) for t in range(len(v))]
        np.testing.assert_allclose(found.advantages[row, here], want, rtol=1e-12)
        np.testing.assert_allclose(found.returns[row, here], np.asarray(want) + v.numpy(), rtol=1e-12)
    assert np.all(found.advantages[mask == 0] == 0) and np.all(found.returns[mask == 0] == 0)


def test_without_discount_a_return_is_the_sum_of_later_rewards():
    mask, rewards = np.ones((1, 4)), np.asarray([[0.0, -1.0, 0.5, 2.0]])
    found = gae(rewards, np.asarray([[0.3, 0.1, 0.9, 0.2]]), mask, gamma=1.0, lam=1.0)
    np.testing.assert_allclose(found.returns, [[1.5, 1.5, 2.5, 2.0]])


def test_token_rewards_are_the_kl_penalty_and_the_score_at_the_last_token():
    mask = np.asarray([[0, 1, 1, 0, 1, 0], [1, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0]])
    kl = np.where(mask > 0, 2.0, NAN)
    want = [[0, -0.2, -0.2, 0, 4.8, 0], [6.8, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0]]
    np.testing.assert_allclose(token_rewards([5.0, 7.0, NAN], kl, mask, kl_coef=0.1), want)


def test_whitening():
    rng = np.random.default_rng(4)
    mask = rng.random((4, 9)) < 0.5
    values = np.where(mask, 3 + 2 * rng.normal(size=mask.shape), NAN)
    x = torch.tensor(values[mask])
    want = (x - x.mean()) * torch.rsqrt(x.var(unbiased=True) + 1e-8)
    found = whiten(values, mask)
    np.testing.assert_allclose(found[mask], want, rtol=1e-12)
    assert np.all(found[~mask] == 0)
    np.testing.assert_array_equal(whiten([[5.0, NAN]], [[1, 0]]), 0)  # a single value is its mean
    np.testing.assert_array_equal(whiten([[NAN, NAN]], [[0, 0]]), 0)


def test_soft_overlong_punishment():
    found = soft_overlong_punishment([0, 80, 81, 90, 99, 100, 130], max_completion_length=100, soft_punish_cache=20)
    np.testing.assert_allclose(found, [0, 0, -0.05, -0.5, -0.95, -1, -1])


# --- evaluations ------------------------------------------------------------------------------------------------------


def test_pass_at_k_is_the_mean_over_all_subsets():
    for n, correct, k in [(5, 2, 1), (5, 2, 3), (6, 1, 4), (4, 0, 2), (4, 4, 4), (5, 3, 4)]:
        marks = [i < correct for i in range(n)]
        want = np.mean([any(few) for few in itertools.combinations(marks, k)])
        np.testing.assert_allclose(pass_at_k(correct, n, k), want)
    np.testing.assert_allclose(pass_at_k([0, 1, 2], [2, 2, 4], 2), [0, 1, 5 / 6])
    assert 0 < pass_at_k(1, 5000, 2000) < 1  # its binomials overflow a float


def test_maj_at_k():
    assert maj_at_k(["4", "5", "4"], [True, False, True]) == 1
    assert maj_at_k(["4", "5", "5"], [True, False, False]) == 0
    assert maj_at_k(["4", "5", "6", "4", "5"], [1, 0, 0, 1, 0]) == 0.5  # a tie
    assert maj_at_k([None, None, "4"], [False, False, True]) == 1
    assert maj_at_k([None, None], [False, False]) == maj_at_k([], []) == 0


# --- refusals ---------------------------------------------------------------------------------------------------------


def as_nan(rewards: np.ndarray) -> np.ndarray:
    return rewards * NAN


REFUSED = [
    ("advantage", "'grpo'", lambda: group_advantages([[1.0]], "grop")),
    ("rewards", "(2,)", lambda: group_advantages([1.0, 2.0], "grpo")),
    ("rewards", "infinity", lambda: group_advantages([[1.0, np.inf]], "grpo")),
    ("advantage", "(1, 2); <lambda>", lambda: group_advantages([[1.0, 2.0]], lambda r: r.mean(axis=1))),
    ("advantage", "as_nan", lambda: group_advantages([[1.0, NAN]], as_nan)),
    ("gamma", "1.1", lambda: gae([[0.0]], [[0.0]], [[1]], gamma=1.1)),
    ("lam", "-0.1", lambda: gae([[0.0]], [[0.0]], [[1]], lam=-0.1)),
    ("k", "4", lambda: pass_at_k([1, 1], [8, 4], 5)),
    ("k", "0", lambda: pass_at_k(1, 4, 0)),
    ("correct", "5", lambda: pass_at_k(5, 4, 2)),
    ("soft_punish_cache", "100", lambda: soft_overlong_punishment([1], 100, 0)),
    ("soft_punish_cache", "101", lambda: soft_overlong_punishment([1], 100, 101)),
    ("scores", "NaN", lambda: token_rewards([NAN], [[0.0]], [[1]], kl_coef=0.1)),
]


@pytest.mark.parametrize("param, naming, call", REFUSED)
def test_invalid_arguments_are_refused(param, naming, call):
    with refuses(param, RecipeError, naming=naming):
        call()
