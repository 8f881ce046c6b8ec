"""Define the training state, its shardings and its initial values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec

from dovetail.core.compute import compute_of
from dovetail.core.mesh import Placement, state_shardings
from dovetail.core.spec import abstract, init
from dovetail.core.training import Training
from dovetail.core.types import Params
from dovetail.models.config import ModelConfig
from dovetail.train.guard import health


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """Everything that a run carries from step to step."""

    params: Params  # master weights, in the tree of models.spec
    opt: Any
    step: jax.Array  # [] int32: number of applied updates
    health: health.HealthState
    ema: Params | None = None  # f32
    reference: Params | None = None  # f32: see core.training.StepModels.reference
    companion: Any = None  # see train.objective.Companion; a step does not read it
    copy: Any = None  # `params` in the compute dtype (train.step.kept_copy): made of them, never saved


def abstract_state(
    specs: Any, settings: Training, optimizer: optax.GradientTransformation, placement: Placement
) -> TrainState:
    """Return the state as shapes with shardings, for restoring a checkpoint and compiling a step.

    Args:
        specs: Specs of the trained weights.
        settings: The recipe.
        optimizer: The optimizer.
        placement: The mesh and its rules.
    """
    params = abstract(specs, compute_of(settings.precision.params).dtype)
    shardings = placement.shardings(specs)
    everywhere = NamedSharding(placement.mesh, PartitionSpec())
    opt = jax.eval_shape(optimizer.init, params)
    step: Any = jax.ShapeDtypeStruct((), jnp.int32, sharding=everywhere)
    checks = jax.eval_shape(health.init)
    return TrainState(
        params=_placed(params, shardings),
        opt=_placed(opt, state_shardings(optimizer, params, shardings)),
        step=step,
        health=_placed(checks, jax.tree.map(lambda _: everywhere, checks)),
        ema=_placed(abstract(specs, jnp.float32), shardings) if settings.ema else None,
        reference=_placed(abstract(specs, jnp.float32), shardings) if settings.step_models.reference else None,
    )


def _placed(shapes: Any, shardings: Any) -> Any:
    return jax.tree.map(lambda s, at: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=at), shapes, shardings)


def init_state(
    cfg: ModelConfig,
    specs: Any,
    settings: Training,
    optimizer: optax.GradientTransformation,
    placement: Placement,
    params: Params | None = None,
) -> TrainState:
    """Return the state of a new run.

    Weights come from `params`, in their final dtype and sharding; missing ones (layers of multi-token prediction) are
    random by `settings.seed`.
    """
    places = jax.tree.map(lambda leaf: leaf.sharding, abstract_state(specs, settings, optimizer, placement))
    given = params or {}
    missing = {name: part for name, part in specs.items() if name not in given}
    std = float(cfg.text_hf().get("initializer_range") or 0.02)
    key, dtype = jax.random.key(settings.seed), compute_of(settings.precision.params).dtype
    params = {**given, **init(missing, key, dtype, std, {name: places.params[name] for name in missing})}
    # jitted, so that every process creates its own part, and no two fields share a buffer (they are donated)
    opt = jax.jit(optimizer.init, out_shardings=places.opt)(params)
    rest = jax.jit(lambda: (jnp.zeros((), jnp.int32), health.init()), out_shardings=(places.step, places.health))
    step, checks = rest()
    ema = jax.jit(_as_f32, out_shardings=places.ema)(params) if settings.ema else None
    reference = jax.jit(_as_f32, out_shardings=places.reference)(params) if settings.step_models.reference else None
    return TrainState(params, opt, step, checks, ema, reference)


def _as_f32(params: Params) -> Params:
    # the addition copies an f32 leaf, where a cast would return the same buffer
    return jax.tree.map(lambda x: x.astype(jnp.float32) + 0.0, params)


@dataclass
class Position:
    """Hold the position of a run: its state after an update, and the next batch."""

    state: TrainState
    step: int = 0  # the last update
    cursor: int = 0  # the number of the next batch
    saved: int | None = None  # the cursor of the last intact checkpoint
