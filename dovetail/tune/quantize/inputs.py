"""Observe the inputs of a layer's weights: the sums of their outer products, one matrix per weight.

D model dim, I a weight's input, E experts.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from dovetail.core.compute import Compute
from dovetail.core.errors import UnsupportedError
from dovetail.core.spec import path_name
from dovetail.core.types import Packed, Params
from dovetail.models.block import Residual, block
from dovetail.models.config import Layer, ModelConfig
from dovetail.ops.linear import grouped, joined_name, matmul, per_head

Grams = dict[str, jax.Array]  # by the paths in the layer of the weights that share an input: [I, I]; experts [E, I, I]
_BY_GROUP = lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), [0], [])


class _Seen:
    """Collect the grams of inputs while a layer is traced; weights with the same input share one."""

    def __init__(self) -> None:
        self._found: list[tuple[jax.Array, list[str], jax.Array]] = []

    def add(self, name: str, x: jax.Array, gram: Callable[[], jax.Array]) -> None:
        names = next((names for given, names, _ in self._found if given is x), None)
        if names is None:
            self._found.append((x, [name], gram()))
        else:
            names.append(name)

    def grams(self) -> Grams:
        return {joined_name(dict.fromkeys(names, 0)): gram for _, names, gram in self._found}


class ObservedWeight:
    """Multiply as a weight does (ops.linear.Weight), and record its input."""

    def __init__(self, weight: jax.Array, name: str, seen: _Seen):
        self._weight, self._name, self._seen = weight, name, seen
        self.shape, self.dtype = weight.shape, weight.dtype

    def matmul(self, x: jax.Array, dims: int, out_dtype: Any) -> jax.Array:
        """Multiply as ops.linear.matmul does."""

        def gram() -> jax.Array:
            rows = x.reshape(-1, math.prod(self.shape[-dims:])).astype(jnp.float32)
            return rows.T @ rows

        self._seen.add(self._name, x, gram)
        return matmul(x, self._weight, dims=dims, out_dtype=out_dtype)

    def per_head(self, x: jax.Array, transposed: bool) -> jax.Array:
        """Multiply as ops.linear.per_head does; its input is not recorded."""
        return per_head(x, self._weight, transposed)

    def grouped(self, rows: jax.Array, sizes: jax.Array, platform: str | None) -> jax.Array:
        """Multiply as ops.linear.grouped does."""

        def gram() -> jax.Array:
            given = rows.astype(jnp.float32)
            return lax.ragged_dot_general(given, given, sizes, _BY_GROUP)

        self._seen.add(self._name, rows, gram)
        return grouped(rows, self._weight, sizes, platform)


def check_layers(cfg: ModelConfig) -> None:
    """Refuse models whose layers cannot be run one by one."""
    if cfg.vision or cfg.layers[0].per_layer_dim or any(layer.attn.kv_from is not None for layer in cfg.layers):
        raise UnsupportedError(
            f"models of {cfg.family} cannot be calibrated: their layers have inputs besides the layer before; use "
            "--method rtn",
            param="method",
        )


@functools.partial(jax.jit, static_argnames=("cfg", "layer", "names", "compute"))
def observe(
    p: Params, x: jax.Array, *, cfg: ModelConfig, layer: Layer, names: tuple[str, ...], compute: Compute
) -> Grams:
    """Return the grams of the weights `names` of a layer on hidden states x [B, T, D]."""
    seen = _Seen()

    def watched(path: tuple, weight: Any) -> Any:
        name = path_name(path)
        return ObservedWeight(weight, name, seen) if name in names else weight

    with compute.products():  # not the jitted block, which could not give back what is observed
        _run(inspect.unwrap(block), jax.tree_util.tree_map_with_path(watched, p), x, cfg, layer)
    return seen.grams()


@functools.partial(jax.jit, static_argnames=("cfg", "layer", "compute"))
def outputs(p: Params, x: jax.Array, *, cfg: ModelConfig, layer: Layer, compute: Compute) -> jax.Array:
    """Return the hidden states after a layer."""
    with compute.products():
        return _run(block, p, x, cfg, layer)


def _run(run: Callable, p: Params, x: jax.Array, cfg: ModelConfig, layer: Layer) -> jax.Array:
    positions = jnp.broadcast_to(jnp.arange(x.shape[1]), x.shape[:2])
    table = layer.attn.rope.tables(positions, False) if layer.attn.rope else ()
    ctx = Packed(jnp.ones(x.shape[:2], jnp.int32))
    return run(p, Residual(x), table, ctx, None, None, None, cfg=cfg, layer=layer)[0].x
