"""The simplest use of `forward` with pages: decode one prompt greedily, token by token."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp

from dovetail.core.compute import Compute
from dovetail.core.errors import UserError
from dovetail.core.types import Cache, Paged, Params
from dovetail.models.config import ModelConfig
from dovetail.models.decoder import forward, init_cache, unembed
from dovetail.ops.paged import token_rows

PAGE = 16
CHUNK = 64  # prompts go in by chunks of one size, so that there are two compiled shapes: a chunk and one token


@functools.partial(jax.jit, static_argnames=("cfg", "compute"), donate_argnames="cache")
def step(
    params: Params,
    cfg: ModelConfig,
    tokens: jax.Array,
    length: jax.Array,
    count: jax.Array,
    cache: Cache,
    compute: Compute,
):
    """Feed `count` of tokens [T] after `length` earlier ones; return the most probable next token and the cache."""
    pages = jnp.arange(cache_pages(cache), dtype=jnp.int32)[None]
    ctx = Paged(pages, (length + count)[None], jnp.stack([jnp.int32(0), count]), jnp.ones(1, jnp.int32))
    _, positions, _ = token_rows(ctx, tokens.shape[0])
    with compute.products():
        hidden, new_cache = forward(params, cfg, tokens, positions, ctx, cache)
        return jnp.argmax(unembed(params, cfg, hidden[count - 1])).astype(jnp.int32), new_cache


def cache_pages(cache: Cache) -> int:
    """Return the number of pages of a cache."""
    return next(entry.shape[0] for entry in cache if entry is not None)


def greedy(
    params: Params, cfg: ModelConfig, ids: Sequence[int], max_new_tokens: int, compute: Compute
) -> Iterator[int]:
    """Yield tokens until the model's end token (which is not yielded) or the limit."""
    if not ids:
        raise UserError("the prompt is empty: give at least one token")
    room = min(len(ids) + max_new_tokens, cfg.max_len)
    if len(ids) >= cfg.max_len:
        raise UserError(f"the prompt has {len(ids)} tokens; the model takes at most {cfg.max_len - 1}")
    cfg = cfg.within(room)
    cache = init_cache(cfg, -(-room // PAGE), PAGE, params["embed"].dtype)
    length, token = 0, jnp.int32(0)  # replaced by the prompt's last step
    while length < len(ids):
        part = list(ids[length : length + CHUNK])
        padded = jnp.asarray(part + [0] * (CHUNK - len(part)), jnp.int32)
        token, cache = step(params, cfg, padded, jnp.int32(length), jnp.int32(len(part)), cache, compute)
        length += len(part)
    while True:
        value = int(token)
        if value in cfg.eos_ids:
            return
        yield value
        length += 1
        if length >= room:
            return
        token, cache = step(params, cfg, token[None], jnp.int32(length - 1), jnp.int32(1), cache, compute)
