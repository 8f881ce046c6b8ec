"""Softmax cross entropy and its gradient in one kernel for Hopper (Pallas, Mosaic GPU): a warpgroup per row.

A row is read twice: for the maximum and the sum, which each thread keeps for the words that it reads; and for the
gradient from its end, which is more often still in the cache.

R rows, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from dovetail.ops.kernels.gpu.mosaic.rows import filled, layout, load

WIDTH = 1024  # words of a load
LOADS = 4  # at a time
LOG2_E = 1.4426950408889634
LOWEST = float(jnp.finfo(jnp.float32).min)


def cross_entropy_rows(
    logits: jax.Array,  # [R, V], before the soft cap
    targets: jax.Array,  # [R]; no word: none is the target
    weight: jax.Array,  # [R] f32
    *,
    z: float,
    softcap: float | None,
    dtype: Any,
    width: int = WIDTH,
    loads: int = LOADS,
    interpret: Any = None,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Return (log p of the target, logsumexp, whether the target is the most probable, each [R]; the gradient [R, V]).

    The gradient is that of weight * (-log p + z lse^2) by the logits, in `dtype`.
    """
    R, V = logits.shape
    turns, rest = divmod(V, width * loads)
    tails = [width] * (rest // width) + [rest % width] * (rest % width > 0)

    def body(logits_ref, targets_ref, weight_ref, logp_ref, lse_ref, best_ref, grad_ref) -> None:
        row = lax.axis_index("row")
        target, weight = targets_ref[row], weight_ref[row]

        def capped(x: jax.Array) -> jax.Array:
            return softcap * jnp.tanh(x * (1 / softcap)) if softcap else x

        def read(start: Any, size: int) -> jax.Array:
            return capped(load(logits_ref, (row, pl.ds(start, size)), size))

        def add(i: Any, carry: tuple) -> tuple:
            top, total = carry
            parts = [read((i * loads + j) * width, width) for j in range(loads)]
            new = top
            for x in parts:
                new = jnp.maximum(new, x)
            total = total * jnp.exp2((top - new) * LOG2_E)
            for x in parts:
                total = total + jnp.exp2((x - new) * LOG2_E)
            return new, total

        top, total = lax.fori_loop(0, turns, add, (filled(width, LOWEST), filled(width, 0.0)))
        starts = [V - sum(tails[i:]) for i in range(len(tails))]
        ends = [read(start, size) for start, size in zip(starts, tails, strict=True)]
        most = jnp.max(top)
        for x in ends:
            most = jnp.maximum(most, jnp.max(x))
        sums = jnp.sum(total * jnp.exp2((top - most) * LOG2_E))
        for x in ends:
            sums = sums + jnp.sum(jnp.exp2((x - most) * LOG2_E))
        lse = most + jnp.log(sums)
        is_word = (target >= 0) & (target < V)
        at = jnp.where(is_word, target, 0)
        chosen = jnp.where(is_word, capped(logits_ref[row, at].astype(jnp.float32)), 0.0)
        logp_ref[row] = chosen - lse
        lse_ref[row] = lse
        best_ref[row] = jnp.where(chosen >= most, 1.0, 0.0)
        factor = weight * (1.0 + 2.0 * z * lse)

        def write(start: Any, x: jax.Array, size: int) -> None:
            words = plgpu.layout_cast(lax.broadcasted_iota(jnp.int32, (size,), 0), layout(size)) + start
            grad = jnp.exp2((x - lse) * LOG2_E) * factor - jnp.where(words == target, weight, 0.0)
            if softcap:
                grad = grad * (1.0 - (x / softcap) * (x / softcap))
            grad_ref[row, pl.ds(start, size)] = grad.astype(grad_ref.dtype)

        for start, size, x in zip(starts, tails, ends, strict=True):
            write(start, x, size)

        def turn(i: Any, _: None) -> None:
            base = (turns - 1 - i) * loads
            parts = [((base + j) * width, read((base + j) * width, width)) for j in range(loads)]
            for start, x in parts:
                write(start, x, width)

        lax.fori_loop(0, turns, turn, None)

    body.__name__ = "cross_entropy_rows"
    numbers = jax.ShapeDtypeStruct((R,), jnp.float32)
    logp, lse, best, grad = plgpu.kernel(
        body,
        out_type=[numbers, numbers, numbers, jax.ShapeDtypeStruct((R, V), dtype)],
        grid=(R,),
        grid_names=("row",),
        interpret=interpret,
    )(logits, targets, weight)
    return logp, lse, best > 0, grad
