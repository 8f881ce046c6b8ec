"""Each advantage against its formula, group by group and token by token; what has no reward takes no part."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch

from dovetail.tune.rl.advantages import (
    ADVANTAGES,
    all_equal,
    gae,
    group_advantages,
    grpo,
    maj_at_k,
    overlong_penalty,
    pass_at_k,
    token_rewards,
    whiten,
)

NAN = np.nan


def some_rewards(seed: int) -> np.ndarray:
    """[7, 5]: a third has none, one group has none at all, one has a single reward, and in one all are the same."""
    rng = np.random.default_rng(seed)
    rewards = np.where(rng.random((7, 5)) < 0.3, NAN, rng.normal(size=(7, 5)))
    rewards[0], rewards[1] = rng.normal(size=5), NAN
    rewards[2], rewards[3] = [NAN, NAN, 0.7, NAN, NAN], [0.1, NAN, 0.1, 0.1, 0.1]
    return rewards


def by_formula(name: str, rewards: np.ndarray) -> np.ndarray:
    """The same with torch, from lists of the rewards that there are."""
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
def test_an_advantage_is_its_formula(name, seed):
    rewards = some_rewards(seed)
    found = group_advantages(rewards, name)
    np.testing.assert_allclose(found, by_formula(name, rewards), rtol=1e-9, atol=1e-9)
    assert np.all(found[np.isnan(rewards)] == 0)
    np.testing.assert_array_equal(ADVANTAGES[name](rewards.astype(np.float32)).shape, rewards.shape)


def test_none_is_no_reward():
    with_none: Any = [[1.0, None, 0.0], [None, None, None]]
    for name in ADVANTAGES:
        found = group_advantages(with_none, name)
        np.testing.assert_array_equal(found, group_advantages([[1.0, NAN, 0.0], [NAN] * 3], name))
        assert found[0, 0] > 0 > found[0, 2] and np.all(found[1] == 0)


def test_a_group_that_agrees_has_no_advantage():
    """Exactly none: three times 0.1 is not 0.3, and what is left over is not to be magnified."""
    rewards = np.asarray([[0.1] * 7, [0.3] * 7, [1.0, 0.0] * 3 + [NAN], [NAN] * 6 + [2.0]])
    np.testing.assert_array_equal(all_equal(rewards), [True, True, False, True])
    for name in ("grpo", "dr_grpo", "rloo"):
        assert np.all(group_advantages(rewards, name)[[0, 1, 3]] == 0), name
    np.testing.assert_allclose(group_advantages([[0.1] * 7] * 3, "reinforce_pp"), 0, atol=1e-9)


def test_scaling_can_be_left_out():
    rewards = some_rewards(2)
    np.testing.assert_array_equal(grpo(rewards, scale="none"), group_advantages(rewards, "dr_grpo"))


def test_a_function_of_ones_own():
    def best_of(rewards: np.ndarray) -> np.ndarray:
        return (rewards == np.nanmax(rewards, axis=1, keepdims=True)) - 0.5

    rewards = np.asarray([[1.0, 3.0, NAN], [2.0, 1.0, 0.0]])
    np.testing.assert_array_equal(group_advantages(rewards, best_of), [[-0.5, 0.5, 0.0], [0.5, -0.5, -0.5]])


# --- tokens and lengths -----------------------------------------------------------------------------------------------


def test_gae_is_its_sum():
    """A_t is the sum over l of (gamma lam)^l delta_t+l, over the tokens that count, wherever they stand in a row."""
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


def test_without_discount_a_return_is_the_reward_to_go():
    mask, rewards = np.ones((1, 4)), np.asarray([[0.0, -1.0, 0.5, 2.0]])
    found = gae(rewards, np.asarray([[0.3, 0.1, 0.9, 0.2]]), mask, gamma=1.0, lam=1.0)
    np.testing.assert_allclose(found.returns, [[1.5, 1.5, 2.5, 2.0]])


def test_a_token_is_rewarded_for_staying_near_and_the_last_one_for_the_score():
    mask = np.asarray([[0, 1, 1, 0, 1, 0], [1, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0]])
    kl = np.where(mask > 0, 2.0, NAN)
    want = [[0, -0.2, -0.2, 0, 4.8, 0], [6.8, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0]]
    np.testing.assert_allclose(token_rewards([5.0, 7.0, NAN], kl, mask, beta=0.1), want)
    with pytest.raises(ValueError, match=r"scores must be finite .* set the mask"):
        token_rewards([5.0, NAN, 1.0], kl, mask, beta=0.1)


def test_whitening():
    rng = np.random.default_rng(4)
    mask = rng.random((4, 9)) < 0.5
    values = np.where(mask, 3 + 2 * rng.normal(size=mask.shape), NAN)
    x = torch.tensor(values[mask])
    want = (x - x.mean()) * torch.rsqrt(x.var(unbiased=True) + 1e-8)
    found = whiten(values, mask)
    np.testing.assert_allclose(found[mask], want, rtol=1e-12)
    assert np.all(found[~mask] == 0)
    np.testing.assert_array_equal(whiten([[5.0, NAN]], [[1, 0]]), 0)  # one alone is its mean
    np.testing.assert_array_equal(whiten([[NAN, NAN]], [[0, 0]]), 0)


def test_the_penalty_of_length_is_in_tokens():
    found = overlong_penalty([0, 80, 81, 90, 99, 100, 130], max_tokens=100, buffer=20)
    np.testing.assert_allclose(found, [0, 0, -0.05, -0.5, -0.95, -1, -1])
    for buffer in (0, 101):
        with pytest.raises(ValueError, match="buffer must be from 1 to max_tokens, which is 100"):
            overlong_penalty([1], 100, buffer)


# --- evaluations ------------------------------------------------------------------------------------------------------


def test_pass_at_k_is_the_mean_over_all_choices():
    for n, correct, k in [(5, 2, 1), (5, 2, 3), (6, 1, 4), (4, 0, 2), (4, 4, 4), (5, 3, 4)]:
        marks = [i < correct for i in range(n)]
        want = np.mean([any(few) for few in itertools.combinations(marks, k)])
        np.testing.assert_allclose(pass_at_k(correct, n, k), want)
    np.testing.assert_allclose(pass_at_k([0, 1, 2], [2, 2, 4], 2), [0, 1, 5 / 6])
    assert 0 < pass_at_k(1, 5000, 2000) < 1  # whose binomials no float holds


def test_maj_at_k():
    assert maj_at_k(["4", "5", "4"], [True, False, True]) == 1
    assert maj_at_k(["4", "5", "5"], [True, False, False]) == 0
    assert maj_at_k(["4", "5", "6", "4", "5"], [1, 0, 0, 1, 0]) == 0.5  # a tie
    assert maj_at_k([None, None, "4"], [False, False, True]) == 1
    assert maj_at_k([None, None], [False, False]) == maj_at_k([], []) == 0


# --- refusals ---------------------------------------------------------------------------------------------------------


def as_nan(rewards: np.ndarray) -> np.ndarray:
    return rewards * NAN


REFUSED = {
    "advantage must be one of .*Did you mean 'grpo'": lambda: group_advantages([[1.0]], "grop"),
    "rewards must be .prompts, completions of each.; got the shape": lambda: group_advantages([1.0, 2.0], "grpo"),
    "rewards must be finite.*got an infinity": lambda: group_advantages([[1.0, np.inf]], "grpo"),
    r"rewards' shape \(1, 2\); <lambda> gave \(1,\)": lambda: group_advantages([[1.0, 2.0]], lambda r: r.mean(axis=1)),
    "must give finite numbers; as_nan gave .nan.": lambda: group_advantages([[1.0, NAN]], as_nan),
    "gamma must be from 0 to 1; got 1.1": lambda: gae([[0.0]], [[0.0]], [[1]], gamma=1.1),
    "lam must be from 0 to 1; got -0.1": lambda: gae([[0.0]], [[0.0]], [[1]], lam=-0.1),
    "k must be at most the completions of a prompt, which are 4": lambda: pass_at_k([1, 1], [8, 4], 5),
    "k must be 1 or more": lambda: pass_at_k(1, 4, 0),
    "correct must be from 0 to n": lambda: pass_at_k(5, 4, 2),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_means_nothing_is_refused(message):
    with pytest.raises(ValueError, match=message):
        REFUSED[message]()
