"""Sleep: the runner's device memory is given back for a while (to a trainer in the same process, say), and taken again.

Freed memory goes back to jax. Whether other processes can have it is for jax's allocator: on GPUs it keeps what it has,
unless XLA_PYTHON_CLIENT_ALLOCATOR=platform.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from dovetail.core.types import Params, Weights
from dovetail.engine.runner import Runner
from dovetail.engine.weights import form_of, is_form, placed


@dataclass(frozen=True)
class Asleep:
    level: int
    host: Params | None  # level 1 keeps the weights here; 2 drops them


def put_to_sleep(runner: Runner, level: int) -> Asleep:
    """Drop the pages; move the weights to the host, or drop them too. No step may be under way. The runner keeps the
    forms of both: steps may be compiled meanwhile."""
    weights = runner.weights
    host = jax.device_get(weights.params) if level == 1 and not is_form(weights.params) else None
    pages, runner.cache = runner.cache, form_of(runner.cache)
    for array in jax.tree.leaves(pages):
        array.delete()  # at once: no other reference to them is of use
    drop_weights(runner)
    return Asleep(level, host)


def drop_weights(runner: Runner) -> None:
    runner.weights = Weights(form_of(runner.weights.params), runner.weights.version)


def wake_up(runner: Runner, asleep: Asleep) -> None:
    """Empty pages again, and the weights back from the host, unless new ones have come meanwhile."""
    weights = runner.weights
    if asleep.host is not None and is_form(weights.params):
        runner.weights = Weights(placed(asleep.host, weights.params), weights.version)
    runner.cache = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype, device=x.sharding), runner.cache)
