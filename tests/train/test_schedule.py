"""Test learning rate schedules at key steps."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from refusals import refuses

from dovetail.core.errors import RecipeError
from dovetail.core.training import Schedule
from dovetail.train.optim import learning_rate

LR, STEPS = 2e-3, 100

# name -> {step: share of lr}, with a warmup of 10 steps, a decay over the last 20 and a tenth left at the end
SHARES = {
    "cosine": {0: 0.1, 4: 0.5, 9: 1.0, 54: 0.55, 99: 0.1, 150: 0.1},
    "linear": {0: 0.1, 9: 1.0, 54: 0.55, 98: 0.11, 99: 0.1, 150: 0.1},
    "wsd": {0: 0.1, 9: 1.0, 54: 1.0, 79: 1.0, 84: 0.55, 99: 0.1, 150: 0.1},
    "constant": {0: 0.1, 9: 1.0, 54: 1.0, 99: 1.0, 150: 1.0},
}


@pytest.mark.parametrize("name", SHARES)
def test_the_rate_at_key_steps(name):
    rate = jax.jit(learning_rate(Schedule(name, warmup=10, decay=0.2, final=0.1), LR, STEPS))
    got = {step: float(rate(step)) / LR for step in SHARES[name]}
    assert got == pytest.approx(SHARES[name], rel=1e-5)
    assert rate(3).dtype == np.float32


@pytest.mark.parametrize("name", SHARES)
def test_without_warmup_the_rate_starts_full_and_never_rises(name):
    rates = np.asarray(
        [learning_rate(Schedule(name, final=0.1 if name == "constant" else 0.0), LR, STEPS)(k) for k in range(STEPS)]
    )
    assert rates[0] == np.float32(LR)
    assert np.all(np.diff(rates) <= 1e-9)
    assert rates[-1] == pytest.approx(LR if name == "constant" else 0.0, abs=1e-9)


def test_a_warmup_as_long_as_the_run_is_a_ramp():
    rate = learning_rate(Schedule("cosine", warmup=4), LR, 4)
    assert [float(rate(k)) / LR for k in range(4)] == pytest.approx([0.25, 0.5, 0.75, 1.0])


def test_a_warmup_longer_than_the_run_is_refused():
    with refuses("schedule.warmup", RecipeError):
        learning_rate(Schedule(warmup=11), LR, 10)
