"""Optimizers, stochastic rounding and learning rate schedules.

An optimizer is an optax GradientTransformation that works in f32 whatever the dtype of the weights: the moments of a
bf16 model are f32, and `apply` adds the updates with stochastic rounding. The specs say what each weight is.

adamw      betas and eps as usual
muon       hidden matrices by muon, all else (embedding, head, norms, biases) by adamw, at one learning rate
adafactor  factored second moments (a row and a column per matrix), no first moment. Steps have an rms of at most lr, as
           Adam's, and are not relative to the weight's size, so the same learning rate works for all three. It does not
           read beta1, beta2, eps and momentum.

Weight decay is decoupled (lr * weight_decay * weight) and applies to weights that multiply: matrices, the head, an
embedding that is also the head. Norms, biases and tables that are only looked up (most of their rows have no gradient
in a step) are not decayed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from dovetail.core.errors import RecipeError
from dovetail.core.spec import ParamSpec, leaves, tree_map
from dovetail.core.training import Optimizer, Schedule

Rate = Callable[[jax.typing.ArrayLike], jax.Array]


def make_optimizer(
    settings: Optimizer, rate: Rate, specs: Any, platform: str | None = None
) -> optax.GradientTransformation:
    """Return the optimizer of a recipe. It does not clip: the step judges the gradient's norm first.

    Args:
        settings: The recipe's optimizer.
        rate: Returns the learning rate of a step (from 0).
        specs: Specs of the trained weights.
        platform: Where it will run; None: jax's default.
    """
    if settings.name == "muon":
        return _in_f32(_muon(settings, rate, specs, platform))
    scale = _adafactor_scale() if settings.name == "adafactor" else _adam_scale(settings)
    return _in_f32(_decayed(scale, settings, rate, tree_map(_decays, specs)))


def _decays(spec: ParamSpec) -> bool:
    return len(spec.shape) >= 2 and spec.active > 0


def _adam_scale(settings: Optimizer) -> optax.GradientTransformation:
    return optax.scale_by_adam(settings.beta1, settings.beta2, settings.eps)


def _adafactor_scale() -> optax.GradientTransformation:
    return optax.chain(optax.scale_by_factored_rms(), optax.clip_by_block_rms(1.0))


def _muon(settings: Optimizer, rate: Rate, specs: Any, platform: str | None) -> optax.GradientTransformation:
    hidden = [spec for _, spec in leaves(specs) if is_hidden_matrix(spec)]
    decay = tree_map(_decays, specs)
    return optax.partition(
        {
            "muon": _decayed(scale_by_muon(hidden, settings.momentum, platform), settings, rate, decay),
            "adamw": _decayed(_adam_scale(settings), settings, rate, decay),
        },
        tree_map(lambda spec: "muon" if is_hidden_matrix(spec) else "adamw", specs),
    )


def _decayed(scale: optax.GradientTransformation, settings: Optimizer, rate: Rate, mask: Any):
    return optax.chain(
        scale, optax.add_decayed_weights(settings.weight_decay, mask), optax.scale_by_learning_rate(rate)
    )


def _in_f32(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """Return the optimizer with weights and gradients cast to f32, so that its state is f32."""

    def f32(tree: Any) -> Any:
        return jax.tree.map(lambda x: x.astype(jnp.float32), tree)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        return inner.update(f32(updates), state, f32(params))

    return optax.GradientTransformation(lambda params: inner.init(f32(params)), update)


# --- gradients and averages -------------------------------------------------------------------------------------------


def global_norm(tree: Any) -> jax.Array:
    """Return the f32 norm of all leaves taken as one vector."""
    return jnp.sqrt(sum((jnp.sum(jnp.square(x.astype(jnp.float32))) for x in jax.tree.leaves(tree)), jnp.float32(0)))


def clip(grads: Any, norm: jax.Array, limit: float) -> Any:
    """Return gradients of global norm `norm` scaled to at most `limit`; 0: no limit."""
    if limit == 0:
        return grads
    scale = jnp.minimum(1.0, limit / (norm + 1e-6))
    return jax.tree.map(lambda g: (g.astype(jnp.float32) * scale).astype(g.dtype), grads)


def ema_update(ema: Any, params: Any, decay: float) -> Any:
    """Return the exponential moving average after one step, in its own dtype."""
    return jax.tree.map(
        lambda e, p: (e + (1.0 - decay) * (p.astype(jnp.float32) - e.astype(jnp.float32))).astype(e.dtype), ema, params
    )


# --- muon -------------------------------------------------------------------------------------------------------------
#
# Muon steps along the polar factor U V^T of the momentum U S V^T, so every direction of the gradient changes by the
# same amount. Five steps of a Newton-Schulz iteration, products alone, compute the factor. Scaled by 0.2 sqrt(max(rows,
# columns)), its elements have the rms of an Adam step, about 0.2, so Adam's learning rate and weight decay carry over
# (Moonlight, arXiv 2502.16982).
#
# Weights of one shape and layout are orthogonalised together: a model of 32 layers has about 200 matrices of five
# shapes, and 200 small programs would take minutes to compile.


# An odd polynomial a x + b x^3 + c x^5 with the steepest slope at 0 that still brings [0, 1] near 1 (Keller Jordan's).
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
STEPS = 5
RMS = 0.2


class MuonState(NamedTuple):
    """Hold the state of muon."""

    momentum: Any


def is_hidden_matrix(spec: ParamSpec) -> bool:
    """Return whether the weight multiplies activations and is neither embedding nor head."""
    return len(spec.shape) >= 2 and spec.active > 0 and "vocab" not in spec.axes


def matrix_shape(spec: ParamSpec) -> tuple[int, ...]:
    """Return the shape [..., out, in] of a weight as a linear map: heads belong to out or in, experts are a batch."""
    if spec.axes[0] == "experts":
        return spec.shape
    if spec.shape[-1] == spec.stored.shape[-1]:  # [N, H, D], and a checkpoint keeps D last
        return math.prod(spec.shape[:-1]), spec.shape[-1]
    return spec.shape[0], math.prod(spec.shape[1:])


def scale_by_muon(
    specs: Sequence[ParamSpec], momentum: float, platform: str | None = None
) -> optax.GradientTransformation:
    """Return orthogonalised Nesterov momentum with the size of an Adam step (the learning rate adds the sign).

    Products are bf16, except on a CPU, where those are slow.

    Args:
        specs: The specs of the tree's leaves, in order.
        momentum: The decay of the momentum.
        platform: Where it will run; None: jax's default.
    """

    def init(params: Any) -> MuonState:
        return MuonState(jax.tree.map(jnp.zeros_like, params))

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, MuonState]:
        buffers = jax.tree.map(lambda m, g: momentum * m + g, state.momentum, updates)
        ahead, tree = jax.tree.flatten(jax.tree.map(lambda m, g: momentum * m + g, buffers, updates))
        dtype = jnp.float32 if (platform or jax.default_backend()) == "cpu" else jnp.bfloat16
        return tree.unflatten(_orthogonal_steps(ahead, specs, dtype)), MuonState(buffers)

    return optax.GradientTransformation(init, update)


def _orthogonal_steps(tensors: Sequence[jax.Array], specs: Sequence[ParamSpec], dtype: Any) -> list[jax.Array]:
    # Group by axes too: stacking differently sharded weights would move them between devices.
    groups: dict[tuple, list[int]] = {}
    for i, spec in enumerate(specs):
        groups.setdefault((matrix_shape(spec), spec.shape, spec.axes), []).append(i)
    out = list(tensors)
    for (shape, *_), members in groups.items():
        stacked = jnp.stack([tensors[i].reshape(shape) for i in members]).astype(dtype)
        steps = orthogonalize(stacked).astype(jnp.float32) * (RMS * math.sqrt(max(shape[-2:])))
        for i, step in zip(members, steps, strict=True):
            out[i] = step.reshape(specs[i].shape)
    return out


def orthogonalize(x: jax.Array) -> jax.Array:
    """Return approximately U V^T for each matrix U S V^T of x [..., rows, columns]; 0 stays 0."""
    wide = x.shape[-2] <= x.shape[-1]  # products over the smaller side are cheaper
    x = x if wide else x.mT
    x32 = x.astype(jnp.float32)
    x = (x32 / (jnp.sqrt(jnp.sum(x32 * x32, axis=(-2, -1), keepdims=True)) + 1e-20)).astype(x.dtype)
    a, b, c = NEWTON_SCHULZ
    for _ in range(STEPS):
        square = x @ x.mT
        x = a * x + (b * square + c * (square @ square)) @ x
    return x if wide else x.mT


# --- stochastic rounding ----------------------------------------------------------------------------------------------
#
# A bf16 weight has 8 bits of mantissa: an update below 1/512 of it would be rounded away in every step. Rounding up
# with a probability equal to the remainder preserves it in the mean.


def apply(params: Any, updates: Any, key: jax.Array) -> Any:
    """Return params + updates in each weight's dtype: bf16 with stochastic rounding, f32 exactly.

    The random bits depend only on the key and the element's place in the tree, not on the sharding.
    """
    flat, tree = jax.tree.flatten(params)
    seeds = jax.random.bits(key, (len(flat), 2), jnp.uint32)
    return tree.unflatten([_add(*each) for each in zip(flat, tree.flatten_up_to(updates), seeds, strict=True)])


def _add(param: jax.Array, update: jax.Array, seed: jax.Array) -> jax.Array:
    total = param.astype(jnp.float32) + update.astype(jnp.float32)
    return _round(total, seed) if param.dtype == jnp.bfloat16 else total.astype(param.dtype)


def _round(x: jax.Array, seed: jax.Array) -> jax.Array:
    """Round f32 to bf16 without bias: bf16 is the upper half of f32's bits, so add a random lower half and truncate."""
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32) + (_noise(x.shape, seed) >> 16)
    rounded = jax.lax.bitcast_convert_type((bits >> 16).astype(jnp.uint16), jnp.bfloat16)
    return jnp.where(jnp.isfinite(x), rounded, x.astype(jnp.bfloat16))  # a carry must not turn a NaN into a number


def _noise(shape: tuple[int, ...], seed: jax.Array) -> jax.Array:
    """Return random u32s: a hash of each element's index with two words of seed.

    Unlike jax.random.bits this fuses with the addition (no array of noise), and 300 weights compile at once where as
    many threefry generators take minutes.
    """
    index = jnp.zeros(shape, jnp.uint32)
    for dim, size in enumerate(shape):
        index = index * jnp.uint32(size) + jax.lax.broadcasted_iota(jnp.uint32, shape, dim)
    return _mix(_mix(index ^ seed[0]) + seed[1])


def _mix(x: jax.Array) -> jax.Array:
    """Mix the bits of x: every bit of the result depends on every bit of x (lowbias32)."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)


# --- learning rate ----------------------------------------------------------------------------------------------------
#
# Update k (from 1, so step k - 1) of a run of n updates with w of warmup has the rate lr * k / w during the warmup,
# then lr * share, where x goes from 0 at the curve's start (without a warmup, the first update) to 1 at the last
# update:
#
#     cosine    final + (1 - final) * (1 + cos(pi x)) / 2
#     linear    final + (1 - final) * (1 - x)
#     wsd       1, then final + (1 - final) * (1 - sqrt(x)) over the last `decay` of the run
#     constant  1 (`final` is 1 by definition)
#
# wsd decays as 1 - sqrt: it ends with a lower loss than a linear decay (Haegele et al. 2024, arXiv 2405.18392).


def learning_rate(schedule: Schedule, lr: float, total_steps: int) -> Callable[[jax.typing.ArrayLike], jax.Array]:
    """Return the function step (from 0) -> f32 rate of that update; after the end the last rate."""
    warmup = schedule.warmup
    if warmup > total_steps:
        raise RecipeError(
            f"`schedule.warmup` must be at most the run's {total_steps:,} steps, got {warmup:,}: lower it or train "
            "longer",
            param="schedule.warmup",
        )
    start = _curve_start(schedule, total_steps)

    def rate(step: jax.typing.ArrayLike) -> jax.Array:
        k = jnp.asarray(step, jnp.float32) + 1.0
        x = jnp.clip((k - start) / max(total_steps - start, 1), 0.0, 1.0)
        share = jnp.minimum(k / max(warmup, 1), 1.0) * _share(schedule, x)
        return jnp.asarray(lr * share, jnp.float32)

    return rate


def _curve_start(schedule: Schedule, total_steps: int) -> int:
    """Return the last update at the full rate: the end of the warmup, or of wsd's stable phase."""
    first = max(schedule.warmup, 1)
    return first if schedule.name != "wsd" else max(first, total_steps - round(schedule.decay * total_steps))


def _share(schedule: Schedule, x: jax.Array) -> jax.Array:
    if schedule.name == "constant":
        return jnp.ones_like(x)
    fall = {"cosine": lambda x: (1.0 + jnp.cos(jnp.pi * x)) / 2, "linear": lambda x: 1.0 - x, "wsd": _one_minus_sqrt}
    return schedule.final + (1.0 - schedule.final) * fall[schedule.name](x)


def _one_minus_sqrt(x: jax.Array) -> jax.Array:
    return 1.0 - jnp.sqrt(x)
