"""Optimizers that know from the specs what each weight is, and where their state lies on a mesh.

An optimizer is optax-shaped, `init(params)` and `update(grads, state, params) -> (updates, state)`, and works in f32
whatever the dtype of the weights: moments of a bf16 model are f32, and `rounding.apply` brings the updates home.

adamw      betas and eps as usual
muon       the hidden matrices by train.muon, all else (embedding, head, norms, biases) by adamw, at one learning rate
adafactor  second moments as a row and a column a matrix, no first moment; the step is an Adam-like one, of rms 1 at
           most times lr, not relative to the weight's size: one learning rate serves all three. beta1, beta2, eps and
           momentum say nothing to it.

Weight decay is decoupled (lr * weight_decay * weight) and falls on what multiplies: matrices, the head, an embedding
that is the head too. Norms, biases and tables that are only looked up (most rows of which see no gradient in a step)
keep their size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec

from dovetail.core.spec import ParamSpec, leaves, tree_map
from dovetail.core.training import Optimizer
from dovetail.train.muon import is_hidden_matrix, scale_by_muon

Rate = Callable[[jax.typing.ArrayLike], jax.Array]


def make_optimizer(
    settings: Optimizer, rate: Rate, specs: Any, platform: str | None = None
) -> optax.GradientTransformation:
    """The optimizer of a recipe for weights declared by `specs`; `rate` gives the learning rate of a step (from 0).

    It does not clip: the step judges the gradient's norm first. `platform` is where it will run (None: jax's default).
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
    """The same with weights and gradients seen as f32, so that its state is f32."""

    def f32(tree: Any) -> Any:
        return jax.tree.map(lambda x: x.astype(jnp.float32), tree)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        return inner.update(f32(updates), state, f32(params))

    return optax.GradientTransformation(lambda params: inner.init(f32(params)), update)


# --- where the state lies ---------------------------------------------------------------------------------------------


def state_shardings(optimizer: optax.GradientTransformation, params: Any, shardings: Any) -> Any:
    """Shardings for the tree of `optimizer.init(params)`, from those of params (arrays or their shapes alone).

    What belongs to a weight, by the end of its path, lies as that weight does; a factor of it, which lacks one dim,
    as the dims it has; counters and all else on every device.
    """
    placed = {
        path: (leaf.shape, sharding)
        for (path, leaf), sharding in zip(
            jax.tree_util.tree_leaves_with_path(params), jax.tree.leaves(shardings), strict=True
        )
    }
    mesh = next(iter(placed.values()))[1].mesh

    def place(path: tuple, leaf: jax.ShapeDtypeStruct) -> NamedSharding:
        owner = next((placed[path[i:]] for i in range(len(path)) if path[i:] in placed), None)
        return NamedSharding(mesh, _partition(leaf.shape, *owner) if owner else PartitionSpec())

    return jax.tree_util.tree_map_with_path(place, jax.eval_shape(optimizer.init, params))


def _partition(shape: tuple[int, ...], of_shape: tuple[int, ...], sharding: NamedSharding) -> PartitionSpec:
    parts = (*sharding.spec, *(None,) * (len(of_shape) - len(sharding.spec)))
    if shape == of_shape:
        return sharding.spec
    for gone in range(len(of_shape)):
        if shape == of_shape[:gone] + of_shape[gone + 1 :]:
            return PartitionSpec(*parts[:gone], *parts[gone + 1 :])
    return PartitionSpec()


# --- gradients and averages -------------------------------------------------------------------------------------------


def global_norm(tree: Any) -> jax.Array:
    """The norm of all leaves taken as one vector, f32."""
    return jnp.sqrt(sum((jnp.sum(jnp.square(x.astype(jnp.float32))) for x in jax.tree.leaves(tree)), jnp.float32(0)))


def clip(grads: Any, norm: jax.Array, limit: float) -> Any:
    """Gradients of global norm `norm`, made no longer than `limit`; a limit of 0 leaves them alone."""
    if limit == 0:
        return grads
    scale = jnp.minimum(1.0, limit / (norm + 1e-6))
    return jax.tree.map(lambda g: (g.astype(jnp.float32) * scale).astype(g.dtype), grads)


def ema_update(ema: Any, params: Any, decay: float) -> Any:
    """The running average, in its own dtype (f32 where slow decays must not be lost), one step on."""
    return jax.tree.map(
        lambda e, p: (e + (1.0 - decay) * (p.astype(jnp.float32) - e.astype(jnp.float32))).astype(e.dtype), ema, params
    )
