"""Build the training step from an objective: loss, gradients, health check and update in one program.

A batch may be taken in parts (`accumulate`): the objective divides by the weight of the whole batch, so the gradients
of the parts add up to that of the whole. The gradient is judged (train.guard.health) before the update, which is
applied by a select: a bad gradient never reaches the weights, and a step launched behind a bad one changes nothing.

The weights are master weights (f32, or bf16 with stochastic rounding), which a step reads in the compute dtype. A state
may carry that copy (`TrainState.copy`): the update then writes it, and no step reads the masters to make it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from dovetail.core.compute import Compute
from dovetail.core.spec import ParamSpec, tree_map
from dovetail.core.training import Training
from dovetail.core.types import Batch, Params
from dovetail.models.config import ModelConfig
from dovetail.train.guard import health
from dovetail.train.objective import Loads, Metrics, Objective, StepContext, router_metrics
from dovetail.train.optim import Rate, apply, clip, ema_update, global_norm
from dovetail.train.state import TrainState

Step = Callable[[TrainState, Batch], tuple[TrainState, Metrics]]  # plus frozen weights, if the objective has any
Evaluate = Callable[
    [Params, Batch, Params | None], tuple[Metrics, jax.Array]
]  # the last argument is the state's reference
DROPOUT = 1  # folded into the key, so that dropout and rounding differ


def make_step(
    cfg: ModelConfig,
    settings: Training,
    objective: Objective,
    optimizer: optax.GradientTransformation,
    rate: Rate,
    ctx: StepContext,
) -> Step:
    """Return the step of a recipe whose open keys are derived (plan.derive); jit it with the state donated."""
    mesh, specs = ctx.placement.mesh, objective.specs(cfg)
    layout = jax.tree.map(lambda at: at.spec, ctx.placement.shardings(specs))

    def step(state: TrainState, batch: Batch, frozen: Any = None) -> tuple[TrainState, Metrics]:
        key = jax.random.fold_in(jax.random.key(settings.seed), state.step)
        beside = reference_copy(state.reference, specs, ctx.compute)
        own = dataclasses.replace(ctx, frozen=frozen, reference=beside, key=jax.random.fold_in(key, DROPOUT))
        parts = settings.accumulate or 1
        grads, metrics, loads = gradients(state.params, cfg, objective, batch, own, parts, state.copy)
        norm = global_norm(grads)
        ok, checks = health.judge(state.health, metrics["loss"], norm, settings.health)
        updates, opt = optimizer.update(clip(grads, norm, settings.optimizer.max_grad_norm), state.opt, state.params)
        params = objective.after_update(apply(state.params, updates, key), loads)
        ema = ema_update(state.ema, params, settings.ema) if settings.ema else None
        reference = synced(state.reference, params, state.step + 1, settings.step_models.reference)
        new = TrainState(params, opt, state.step + 1, checks, ema, reference, state.companion)
        metrics |= {"grad_norm": norm, "lr": rate(state.step), "ok": ok}
        if mesh.size > 1:  # a single device has nothing to compare with
            metrics["checksums"] = health.checksums(grads, mesh, layout)
        chosen = jax.tree.map(lambda a, b: jnp.where(ok, a, b), new, dataclasses.replace(state, copy=None))
        copy = None if state.copy is None else kept_copy(chosen.params, specs, ctx.compute)
        return dataclasses.replace(chosen, health=checks, copy=copy), metrics

    return step


def synced(reference: Params | None, params: Params, step: jax.Array, settings: Any) -> Params | None:
    """Return the reference after update `step`.

    Every `sync_every` updates it becomes alpha params + (1 - alpha) reference (tune.sections.ReferenceSettings).
    """
    if reference is None or not settings.sync_every:
        return reference
    share = jnp.where(step % settings.sync_every == 0, settings.mixup_alpha, 0.0)
    return jax.tree.map(lambda old, new: (1 - share) * old + share * new.astype(jnp.float32), reference, params)


def reference_copy(reference: Params | None, specs: Any, compute: Compute) -> Params | None:
    """Return the reference in the compute dtype, if there is one."""
    return None if reference is None else compute_copy(reference, specs, compute)


def make_eval(cfg: ModelConfig, objective: Objective, ctx: StepContext) -> Callable[..., tuple[Metrics, jax.Array]]:
    """Return (params, batch, frozen, reference) -> (sums, their divisor); the caller adds both up over batches."""
    plain = dataclasses.replace(ctx, remat="none", documents=None, logits=jnp.float32)

    specs = objective.specs(cfg)

    def evaluate(
        params: Params, batch: Batch, frozen: Any = None, reference: Params | None = None
    ) -> tuple[Metrics, jax.Array]:
        own = dataclasses.replace(plain, frozen=frozen, reference=reference_copy(reference, specs, ctx.compute))
        with ctx.compute.products(ctx.platform):
            return objective.held_out(compute_copy(params, specs, ctx.compute), cfg, batch, own)

    return evaluate


def gradients(
    params: Params, cfg: ModelConfig, objective: Objective, batch: Batch, ctx: StepContext, parts: int = 1,
    copy: Any = None,
) -> tuple[Params, Metrics, Loads]:  # fmt: skip
    """Return (gradient of the batch's loss, its metrics, the router loads); `copy` is `kept_copy` of the weights."""
    weight, specs = objective.weight(batch), objective.specs(cfg)
    weights = compute_copy(params, specs, ctx.compute, copy)

    def share(weights: Params, part: Batch, number: Any) -> tuple[jax.Array, tuple[Metrics, Loads]]:
        own = ctx if ctx.key is None else dataclasses.replace(ctx, key=jax.random.fold_in(ctx.key, number))
        found = objective.measure(weights, cfg, part, weight, own)
        reported = {"loss": jax.lax.stop_gradient(found.loss)} | found.metrics
        return found.loss, (reported, found.loads)

    def one(weights: Params, part: Batch, number: Any = 0) -> tuple[Params, tuple[Metrics, Loads]]:
        grads, rest = jax.grad(share, has_aux=True)(weights, part, number)
        return jax.tree.map(lambda g, x: g.astype(x.dtype), grads, params), rest

    with ctx.compute.products(ctx.platform):
        grads, (metrics, loads) = one(weights, batch) if parts == 1 else _accumulated(one, weights, batch, parts)
    metrics["targets"] = batch.loss_mask.sum()
    return grads, metrics | router_metrics(loads), loads


def _accumulated(one: Callable, params: Params, batch: Batch, parts: int) -> tuple[Params, Any]:
    """Sum over parts of the batch, each with every parts-th row, so that no row leaves its device; in f32."""

    def split(x: jax.Array) -> jax.Array:
        return x.reshape(x.shape[0] // parts, parts, *x.shape[1:]).swapaxes(0, 1)

    def add(total: Any, part: tuple[Batch, jax.Array]) -> tuple[Any, None]:
        return jax.tree_util.tree_map_with_path(_together, total, one(params, *part)), None

    pieces = jax.tree.map(split, batch)
    shapes = jax.eval_shape(one, params, jax.tree.map(lambda x: x[0], pieces))
    zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, jnp.float32), shapes)
    total, _ = jax.lax.scan(add, zeros, (pieces, jnp.arange(parts)))
    return total


def _together(path: tuple, a: jax.Array, b: jax.Array) -> jax.Array:
    """Combine two parts: the maximum for a metric named `*_max`, else the sum."""
    is_greatest = str(getattr(path[-1], "key", "")).endswith("_max")
    return jnp.maximum(a, b.astype(a.dtype)) if is_greatest else a + b.astype(a.dtype)


def compute_copy(params: Params, specs: Any, compute: Compute, copy: Any = None) -> Params:
    """Return the weights in the compute dtype; a spec with its own dtype (a router's bias) keeps it.

    Those in `copy`, a tree of `kept_copy`, are taken from there.

    Projections are not joined as in serving: the backward pass would write their joined gradients once more, which
    costs more than the larger products save (measured).
    """

    def cast(one: ParamSpec, x: jax.Array, kept: jax.Array | None = None) -> jax.Array:
        return kept if kept is not None else x if one.dtype else x.astype(compute.dtype)

    return tree_map(cast, specs, params) if copy is None else tree_map(cast, specs, params, copy)


def kept_copy(params: Params, specs: Any, compute: Compute) -> Any:
    """Return the weights in the compute dtype that a state keeps, and None in place of the others.

    Those are weights with a dtype of their own, masters in the compute dtype, and tables that are only looked up, whose
    masters are not read as a whole.
    """

    def copied(one: ParamSpec, x: jax.Array) -> jax.Array | None:
        is_read = not one.dtype and one.active > 0 and x.dtype != compute.dtype
        return x.astype(compute.dtype) if is_read else None

    return tree_map(copied, specs, params)
