"""One training step, compiled whole: loss, gradients, judgement, update.

The loss is a sum over tokens divided by the number of targets of the whole batch, so that a batch taken in parts
(`accumulate`) has the very gradient of the large one. The gradient is judged (train.health) before the update, which is
applied by a select: what is bad never reaches the weights, and a step dispatched behind a bad one changes nothing.

The weights are masters (f32, or bf16 with stochastic rounding); the step starts by copying them to the compute dtype.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from dovetail.core.mesh import Placement
from dovetail.core.spec import tree_map
from dovetail.core.types import Batch, Packed, Params
from dovetail.models.config import ModelConfig
from dovetail.models.decoder import block
from dovetail.models.mtp import mtp_hidden
from dovetail.models.trunk import kept, trunk
from dovetail.ops.loss import cross_entropy
from dovetail.ops.moe import RouterStats
from dovetail.train import health
from dovetail.train.optim import Rate, clip, ema_update, global_norm
from dovetail.train.rounding import apply
from dovetail.train.settings import Pretrain
from dovetail.train.state import DTYPES, TrainState, train_specs

Metrics = dict[str, jax.Array]
Step = Callable[[TrainState, Batch], tuple[TrainState, Metrics]]


def make_step(
    cfg: ModelConfig,
    settings: Pretrain,
    optimizer: optax.GradientTransformation,
    rate: Rate,
    placement: Placement,
    platform: str | None = None,
    documents: int | None = None,
) -> Step:
    """The step of a recipe whose open settings are derived (train.derive); jit it with the state donated.
    `documents` is the most that a row of its batches holds, where that is known."""
    layout = jax.tree.map(lambda at: at.spec, placement.shardings(train_specs(cfg, settings)))

    def step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        grads, metrics, loads = gradients(state.params, cfg, settings, batch, placement, platform, documents)
        norm = global_norm(grads)
        ok, checks = health.judge(state.health, metrics["loss"], norm, settings.health)
        updates, opt = optimizer.update(clip(grads, norm, settings.optimizer.clip), state.opt, state.params)
        key = jax.random.fold_in(jax.random.key(settings.seed), state.step)
        params = apply(state.params, updates, key)
        params = _balanced(params, loads, settings.loss.router_bias_rate)
        ema = ema_update(state.ema, params, settings.ema) if settings.ema else None
        new = TrainState(params, opt, state.step + 1, checks, ema)
        metrics |= {"grad_norm": norm, "lr": rate(state.step), "ok": ok}
        if placement.mesh.size > 1:  # a device alone is at fault itself
            metrics["checksums"] = health.checksums(grads, placement.mesh, layout)
        chosen = jax.tree.map(lambda a, b: jnp.where(ok, a, b), new, state)
        return dataclasses.replace(chosen, health=checks), metrics

    return step


def make_eval(cfg: ModelConfig, settings: Pretrain, placement: Placement, platform: str | None = None) -> Callable:
    """(params, batch) -> (sum of -log p, number of targets): added up over batches by the caller."""

    def evaluate(params: Params, batch: Batch) -> tuple[jax.Array, jax.Array]:
        compute = _compute_copy(params, cfg, settings)
        ctx = Packed(batch.segment_ids, platform, placement)
        hidden, _ = trunk(compute, cfg, batch.tokens, batch.positions, ctx, scan=bool(settings.scan))
        _, parts = _head_loss(compute, cfg, hidden, batch, placement, z=0.0, dtype=jnp.float32)
        return parts["nll"], batch.loss_mask.sum()

    return evaluate


# --- gradients --------------------------------------------------------------------------------------------------------


def gradients(
    params: Params,
    cfg: ModelConfig,
    settings: Pretrain,
    batch: Batch,
    placement: Placement,
    platform: str | None = None,
    documents: int | None = None,
) -> tuple[Params, Metrics, dict[int, jax.Array]]:
    """(gradient of the batch's loss, its parts, how many tokens each expert of each layer got)."""
    total = jnp.maximum(batch.loss_mask.sum(), 1.0)
    tokens = jnp.maximum((batch.segment_ids > 0).sum().astype(jnp.float32), 1.0)
    context = functools.partial(Packed, platform=platform, placement=placement, documents=documents)
    loss = functools.partial(_loss, cfg=cfg, settings=settings, context=context, total=total, tokens=tokens)
    one = jax.grad(loss, has_aux=True)
    parts = settings.accumulate or 1
    if parts == 1:
        grads, (sums, loads) = one(params, batch)
    else:
        grads, (sums, loads) = _accumulated(one, params, batch, parts)
    sums["loss"] = sums.pop("nll")
    sums["targets"] = batch.loss_mask.sum()
    return grads, sums | _router_metrics(loads), loads


def _accumulated(one: Callable, params: Params, batch: Batch, parts: int) -> tuple[Params, Any]:
    """Sums over the batch in parts: every parts-th row, so that no row leaves its device. Gradients add up in f32."""

    def split(x: jax.Array) -> jax.Array:
        return x.reshape(x.shape[0] // parts, parts, *x.shape[1:]).swapaxes(0, 1)

    def add(total: Any, part: Batch) -> tuple[Any, None]:
        return jax.tree.map(lambda a, b: a + b.astype(a.dtype), total, one(params, part)), None

    pieces = jax.tree.map(split, batch)
    shapes = jax.eval_shape(one, params, jax.tree.map(lambda x: x[0], pieces))
    zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, jnp.float32), shapes)
    total, _ = jax.lax.scan(add, zeros, pieces)
    return total


def _loss(
    params: Params,
    batch: Batch,
    *,
    cfg: ModelConfig,
    settings: Pretrain,
    context: Callable[[jax.Array], Packed],
    total: jax.Array,
    tokens: jax.Array,
) -> tuple[jax.Array, tuple[Metrics, dict[int, jax.Array]]]:
    """A part's share of the batch's loss, and of its metrics."""
    wanted, ctx = settings.loss, context(batch.segment_ids)
    placement = ctx.placement
    assert placement is not None
    compute = _compute_copy(params, cfg, settings)
    remat, scan = settings.remat or "none", bool(settings.scan)
    hidden, stats = trunk(compute, cfg, batch.tokens, batch.positions, ctx, remat=remat, scan=scan)
    dtype = DTYPES[settings.precision.logits or settings.precision.compute]
    loss, parts = _head_loss(compute, cfg, hidden, batch, placement, wanted.z, dtype)
    loss, metrics = loss / total, {name: value / total for name, value in parts.items()}
    if wanted.mtp:
        run = kept(block, remat)
        depths = mtp_hidden(compute, cfg, hidden, batch, ctx, run)
        further = sum(_head_loss(compute, cfg, h, later, placement, 0.0, dtype)[0] for h, later, _ in depths)
        further = further / (total * len(depths))
        loss, metrics["mtp_loss"] = loss + wanted.mtp * further, jax.lax.stop_gradient(further)
        stats = stats | {len(cfg.layers) + k: dealt for k, (_, _, dealt) in enumerate(depths) if dealt is not None}
    if stats and wanted.router_aux:
        imbalance = sum(dealt.imbalance() for dealt in stats.values()) / (tokens * len(stats))
        loss, metrics["router_imbalance"] = loss + wanted.router_aux * imbalance, jax.lax.stop_gradient(imbalance)
    return loss, (metrics, {i: _load(dealt) for i, dealt in stats.items()})


def _head_loss(
    compute: Params, cfg: ModelConfig, hidden: jax.Array, batch: Batch, placement: Placement, z: float, dtype: Any
):
    head = compute["embed"] if cfg.tied else compute["head"]
    return cross_entropy(
        hidden, head, batch.targets, batch.loss_mask, softcap=cfg.logit_softcap, z=z, dtype=dtype, placement=placement
    )


def _compute_copy(params: Params, cfg: ModelConfig, settings: Pretrain) -> Params:
    """What says its own dtype (a router's bias) keeps it. Projections are not joined as in serving: the backward pass
    would write their joined gradients once more, which costs more than the larger products save (measured)."""
    dtype = DTYPES[settings.precision.compute]
    return tree_map(lambda one, x: x if one.dtype else x.astype(dtype), train_specs(cfg, settings), params)


# --- routers ----------------------------------------------------------------------------------------------------------


def _load(dealt: RouterStats) -> jax.Array:
    """[E]: tokens of all rows."""
    return jax.lax.stop_gradient(dealt.load.sum(axis=0))


def _router_metrics(loads: dict[int, jax.Array]) -> Metrics:
    """The busiest expert's load as a multiple of the mean, and the share of experts that no token reached."""
    if not loads:
        return {}
    busiest = [load.max() / jnp.maximum(load.mean(), 1e-9) for load in loads.values()]
    idle = [(load == 0).mean() for load in loads.values()]
    return {"router_busiest": jnp.stack(busiest).max(), "router_idle": jnp.stack(idle).mean()}


def _balanced(params: Params, loads: dict[int, jax.Array], rate: float) -> Params:
    """Balance without a loss (DeepSeek-V3): the bias on an expert's choice rises where its load is below the mean."""
    if not rate:
        return params
    blocks = [*params["layers"], *(depth["block"] for depth in params.get("mtp", ()))]
    for i, load in loads.items():
        moe = blocks[i]["moe"]
        if "choice_bias" in moe:
            bias = moe["choice_bias"] + (rate * jnp.sign(load.mean() - load)).astype(moe["choice_bias"].dtype)
            blocks[i] = {**blocks[i], "moe": {**moe, "choice_bias": bias}}
    depth = len(params["layers"])
    new = {**params, "layers": tuple(blocks[:depth])}
    if "mtp" in params:
        new["mtp"] = tuple({**p, "block": b} for p, b in zip(params["mtp"], blocks[depth:], strict=True))
    return new
