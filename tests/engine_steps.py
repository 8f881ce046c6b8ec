"""Engine steps traced from abstract arrays."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from dovetail.engine.device.batch import Shape
from dovetail.engine.device.sampler import MAX_BIAS
from dovetail.engine.device.step import DeviceState, run_decode, run_prompts


def ints(*dims: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(dims, jnp.int32)


def asked(vocab: int, rows: int) -> dict[str, jax.ShapeDtypeStruct]:
    """What rows ask of the sampler beyond numbers."""
    bias = jax.ShapeDtypeStruct((rows, MAX_BIAS), jnp.float32)
    mask = jax.ShapeDtypeStruct((rows, -(-vocab // 32)), jnp.uint32)
    return dict(bias_ids=ints(rows, MAX_BIAS), bias=bias, mask=mask)


def trace_step(params, cache, cfg, shape: Shape, compute, platform: str) -> jax.stages.Traced:
    static = dict(cfg=cfg, shape=shape, compute=compute, platform=platform)
    last, tables, flat = ints(shape.rows + 1), ints(shape.rows + 1, shape.pages), ints(shape.size)
    if not shape.is_decode:
        return run_prompts.trace(params, cache, tables, last, flat, None, **static)
    state = DeviceState(cache, last, tables, ints(shape.rows, cfg.vocab))  # type: ignore[arg-type]
    return run_decode.trace(params, state, flat, asked(cfg.vocab, shape.rows), **static)
