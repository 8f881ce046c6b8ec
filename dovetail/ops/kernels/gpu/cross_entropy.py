"""Softmax cross entropy and its gradient in one kernel for NVIDIA GPUs (Pallas, Triton).

XLA reads the logits three times: for the maximum, the sum and the gradient. Here a row is read twice: once for both,
with the sum rescaled as the maximum rises, and again, partly still in the cache, for the gradient.

R rows, V vocabulary.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

BLOCK = 4096  # words at a time
LOG2_E = 1.4426950408889634


def cross_entropy_rows(
    logits: jax.Array,  # [R, V], before the soft cap
    targets: jax.Array,  # [R]; no word: none is the target
    weight: jax.Array,  # [R] f32
    *,
    z: float,
    softcap: float | None,
    dtype: Any,
    block: int = BLOCK,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Return (log p of the target, logsumexp, whether the target is the most probable, each [R]; the gradient [R, V]).

    The gradient is that of weight * (-log p + z lse^2) by the logits, in `dtype`.
    """
    R, V = logits.shape
    numbers = jax.ShapeDtypeStruct((R,), jnp.float32)
    logp, lse, best, grad = pl.pallas_call(
        functools.partial(_kernel, block=min(block, 1 << (V - 1).bit_length()), z=z, softcap=softcap),
        grid=(R,),
        out_shape=[numbers, numbers, numbers, jax.ShapeDtypeStruct((R, V), dtype)],
        compiler_params=plgpu.CompilerParams(num_warps=8, num_stages=2),
        interpret=interpret,
        name="cross_entropy_rows",
    )(logits, targets, weight)
    return logp, lse, best > 0, grad


def _kernel(logits_ref, targets_ref, weight_ref, logp_ref, lse_ref, best_ref, grad_ref, *, block, z, softcap):
    row, words = pl.program_id(0), logits_ref.shape[1]
    turns, lanes = pl.cdiv(words, block), jnp.arange(block)
    target, weight = targets_ref[row], weight_ref[row]
    lowest = float(jnp.finfo(jnp.float32).min)

    def capped(x):
        x = x.astype(jnp.float32)
        return softcap * jnp.tanh(x / softcap) if softcap else x

    def read(i):
        at = i * block + lanes
        x = plgpu.load(logits_ref.at[row, at], mask=at < words, other=0.0)
        return at, jnp.where(at < words, capped(x), lowest)

    def add(i, carry):
        top, total = carry
        _, x = read(i)
        new_top = jnp.maximum(top, jnp.max(x))
        return new_top, total * jnp.exp2((top - new_top) * LOG2_E) + jnp.exp2((x - new_top) * LOG2_E)

    top, totals = jax.lax.fori_loop(0, turns, add, (jnp.float32(lowest), jnp.zeros(block, jnp.float32)))
    lse = top + jnp.log(jnp.sum(totals))
    is_word = (target >= 0) & (target < words)
    chosen = jnp.where(is_word, capped(logits_ref[row, jnp.where(is_word, target, 0)]), 0.0)
    logp_ref[row], lse_ref[row] = chosen - lse, lse
    best_ref[row] = jnp.where(chosen >= top, 1.0, 0.0)

    def write(i, _):
        at, x = read(i)
        grad = jnp.exp2((x - lse) * LOG2_E) * (1.0 + 2.0 * z * lse) - jnp.where(at == target, 1.0, 0.0)
        if softcap:
            grad = grad * (1.0 - (x / softcap) * (x / softcap))
        plgpu.store(grad_ref.at[row, at], (grad * weight).astype(grad_ref.dtype), mask=at < words)

    jax.lax.fori_loop(0, turns, write, None)
