"""The learning rate of each step: a linear warmup, then the named curve.

The k-th update (k from 1, so step k - 1) of a run of n, with w of warmup, gets lr * k / w until it is whole, and then
lr * share, where x goes from 0 at the curve's start (without a warmup, the first update) to 1 at the last update:

    cosine    final + (1 - final) * (1 + cos(pi x)) / 2
    linear    final + (1 - final) * (1 - x)
    wsd       1, then final + (1 - final) * (1 - sqrt(x)) over the last `decay` of the run
    constant  1 (`final` is 1 by definition)

The fall of wsd is 1 - sqrt: it ends lower than a linear one (Haegele et al. 2024, arXiv 2405.18392).
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from dovetail.core.errors import UserError
from dovetail.core.training import Schedule


def learning_rate(schedule: Schedule, lr: float, total_steps: int) -> Callable[[jax.typing.ArrayLike], jax.Array]:
    """step (from 0) -> the rate of that step's update, f32; past the end it stays where the run left it."""
    warmup = schedule.warmup
    if warmup > total_steps:
        raise UserError(
            f"warmup must end within the run: it is {warmup:,} steps and the run has {total_steps:,}; "
            "lower schedule.warmup or train longer"
        )
    start = _curve_start(schedule, total_steps)

    def rate(step: jax.typing.ArrayLike) -> jax.Array:
        k = jnp.asarray(step, jnp.float32) + 1.0
        x = jnp.clip((k - start) / max(total_steps - start, 1), 0.0, 1.0)
        share = jnp.minimum(k / max(warmup, 1), 1.0) * _share(schedule, x)
        return jnp.asarray(lr * share, jnp.float32)

    return rate


def _curve_start(schedule: Schedule, total_steps: int) -> int:
    """Return the last update at the full rate: the end of the warmup (without one, the first update), or of wsd's
    stable stretch."""
    first = max(schedule.warmup, 1)
    return first if schedule.name != "wsd" else max(first, total_steps - round(schedule.decay * total_steps))


def _share(schedule: Schedule, x: jax.Array) -> jax.Array:
    if schedule.name == "constant":
        return jnp.ones_like(x)
    fall = {"cosine": lambda x: (1.0 + jnp.cos(jnp.pi * x)) / 2, "linear": lambda x: 1.0 - x, "wsd": _one_minus_sqrt}
    return schedule.final + (1.0 - schedule.final) * fall[schedule.name](x)


def _one_minus_sqrt(x: jax.Array) -> jax.Array:
    return 1.0 - jnp.sqrt(x)
