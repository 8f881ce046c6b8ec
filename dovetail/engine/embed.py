"""Embeddings: a prompt's final hidden states, pooled and of length 1. A forward of its own, between the engine's steps:
it touches no pages.

T tokens of a prompt, padded to one of a few sizes; D model dim.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from collections.abc import Sequence as Many
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np

from dovetail.core.compute import Compute
from dovetail.core.types import Packed, Params
from dovetail.engine.engine import Engine
from dovetail.engine.weights import form_of
from dovetail.models.config import ModelConfig
from dovetail.models.decoder import forward
from dovetail.ops.adapter import choose

Pooling = Literal["mean", "last"]
LEAST = 16


class Embedder:
    """Compiles on the caller's thread and runs a prompt at a time through `do`, which calls a function with the engine
    where the engine may be used: an EngineLoop's thread, say, so that streams go on beside it."""

    def __init__(self, engine: Engine, do: Callable[[Callable[[Engine], Any]], Any]):
        self._engine, self._do = engine, do
        self._compiled, self._lock = {}, threading.Lock()

    def embed(
        self, prompts: Many[Many[int]], pooling: Pooling = "mean", adapter: str | None = None
    ) -> list[list[float]]:
        """One vector [D] a prompt; ValueError for a bad one, before any is computed."""
        engine = self._engine
        if pooling not in get_args(Pooling):
            raise ValueError(f"pooling is mean or last; got {pooling!r}")
        for prompt in prompts:
            engine.intake.check_tokens(list(prompt))
        number = engine.runner.adapters.find(adapter).number if adapter else 0
        return [self._one(engine, prompt, pooling, number) for prompt in prompts]

    def _one(self, engine: Engine, prompt: Many[int], pooling: Pooling, adapter: int) -> list[float]:
        size = min(max(LEAST, 1 << (len(prompt) - 1).bit_length()), engine.scheduler.config.max_model_len)
        tokens = np.zeros((1, size), np.int32)
        tokens[0, : len(prompt)] = prompt
        run = self._ready(engine, size, pooling)
        vector = self._do(lambda engine: run(_weights(engine), tokens, np.int32(len(prompt)), np.int32(adapter)))
        return np.asarray(vector).tolist()  # fetched here: the engine's thread has not waited for it

    def _ready(self, engine: Engine, size: int, pooling: Pooling) -> Any:
        with self._lock:
            if (size, pooling) not in self._compiled:
                context = functools.partial(Packed, platform=engine.runner.platform, placement=engine.runner.placement)
                static = dict(cfg=engine.cfg, pooling=pooling, context=context, compute=engine.runner.compute)
                run = jax.jit(functools.partial(_embed, **static))
                tokens, count = jax.ShapeDtypeStruct((1, size), jnp.int32), jax.ShapeDtypeStruct((), jnp.int32)
                form = form_of(engine.runner.params)
                self._compiled[size, pooling] = run.lower(form, tokens, count, count).compile()
            return self._compiled[size, pooling]


def _weights(engine: Engine) -> Params:
    if engine.weightless:
        raise ValueError(engine.weightless)
    return engine.runner.params


def _embed(
    params: Params, tokens, count, adapter, *, cfg: ModelConfig, pooling: Pooling, context: Any, compute: Compute
) -> jax.Array:
    """tokens [1, T], of which `count` are the prompt's -> [D] f32. `adapter`: its number, or 0."""
    positions = jnp.arange(tokens.shape[1])[None]
    real = positions < count
    ctx = context(real.astype(jnp.int32))
    with compute.products(ctx.platform):
        hidden, _ = forward(choose(params, jnp.full_like(tokens, adapter)), cfg, tokens, positions, ctx)
    hidden = hidden[0].astype(jnp.float32)
    pooled = hidden[count - 1] if pooling == "last" else (hidden * real[0, :, None]).sum(0) / count
    return pooled / jnp.maximum(jnp.linalg.norm(pooled), 1e-12)
