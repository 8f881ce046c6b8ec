"""A critic: a second model beside the policy, with a value in the place of words."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from dovetail.core.compute import compute_of
from dovetail.core.spec import ParamSpec, Stored, init
from dovetail.core.types import Batch, Params
from dovetail.models.config import ModelConfig
from dovetail.ops.linear import matmul
from dovetail.train.objective import StepContext, hidden_states
from dovetail.train.saves import weights_of_folder
from dovetail.tune.policy import Policy
from dovetail.tune.settings import Tuning

ACTOR, CRITIC, SCORE = "actor", "critic", "score"  # what the trained tree calls them


def both_specs(policy: Policy) -> Callable[[ModelConfig], Any]:
    def specs(cfg: ModelConfig) -> dict[str, Any]:
        own, shape = policy.specs(cfg), (1, cfg.dim)
        score = ParamSpec(shape, (None, "embed"), Stored(("score.weight",), shape))
        return {ACTOR: own, CRITIC: {**_without_head(own), SCORE: score}}

    return specs


def both_initial(ready: Any, policy: Policy, settings: Tuning) -> Params:
    """Both begin as the model does, and the critic expects 0 of everything."""
    dtype, places = (
        compute_of(settings.precision.params).dtype,
        jax.tree.map(lambda x: x.sharding, ready.abstract_state.params),
    )
    score = jax.device_put(jnp.zeros((1, ready.cfg.dim), dtype), places[CRITIC][SCORE])
    if settings.lora:
        make = functools.partial(init, ready.specs[ACTOR], dtype=dtype, shardings=places[ACTOR])
        actor, critic = make(jax.random.key(settings.seed)), make(jax.random.key(settings.seed + 1))
    else:
        actor = weights_of_folder(ready)
        critic = jax.tree.map(jnp.copy, _without_head(actor))
    return {ACTOR: actor, CRITIC: {**critic, SCORE: score}}


def values_of(critic: Params, policy: Policy, cfg: ModelConfig, batch: Batch, ctx: StepContext) -> jax.Array:
    """[B, T] f32: the reward that a critic expects from each token on."""
    own = {name: part for name, part in critic.items() if name != SCORE}
    hidden, _ = hidden_states(policy.params(own, ctx), cfg, batch, ctx)
    return matmul(hidden, critic[SCORE], out_dtype=jnp.float32)[..., 0]


def _without_head(tree: Any) -> Any:
    return {name: part for name, part in tree.items() if name != "head"}
