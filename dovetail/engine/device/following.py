"""The parts of a step that run a draft model: follow what the target computed, and propose draft tokens.

S rows, T tokens, D model dim, F width of a feature, K draft tokens.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from dovetail.core.types import Cache, Paged, Params
from dovetail.engine.request.params import MAX_LOGPROBS
from dovetail.models.config import ModelConfig
from dovetail.models.draft.draft import Carried, DraftCall, DraftModel, Target
from dovetail.ops.sample import SampleInputs, advance, sample


class Followed(NamedTuple):
    """Hold how far the draft model has followed each slot."""

    position: jax.Array  # [slots + 1] of the last token that the slot computed and kept
    features: jax.Array | None  # [slots + 1, F] of that token (see models.draft)


def with_draft(params: Params, draft: Params | None) -> Params:
    """Return the weights of a step: the target's, and under `draft` the draft model's."""
    return params if draft is None else {**params, "draft": draft}


def abstract_followed(draft: DraftModel | None, slots: int, dtype: Any, sharding: Any) -> Followed | None:
    """Return the abstract arrays of `slots` slots; None without a draft model."""
    if draft is None:
        return None
    features: Any = jax.ShapeDtypeStruct((slots + 1, draft.feature_dim), dtype, sharding=sharding)
    position: Any = jax.ShapeDtypeStruct((slots + 1,), jnp.int32, sharding=sharding)
    return Followed(position, features if draft.feature_dim else None)


def follow(
    draft: DraftModel,
    params: Params,
    cfg: ModelConfig,
    tokens: jax.Array,
    seen: jax.Array | None,
    ctx: Paged,
    cache: Cache,
    followed: Followed,
    slots: jax.Array,
    newest: jax.Array,
) -> tuple[Cache, Followed]:
    """Let the draft model follow a call of the target.

    Args:
        draft: The draft model; its weights are `params["draft"]`, its pages follow the target's in the cache.
        params: The weights.
        cfg: The target.
        tokens: [T].
        seen: [T, len(taps) * D], the outputs of the tapped layers; None without taps.
        ctx: The context of the call.
        cache: The pages.
        followed: The state after earlier calls.
        slots: [S], the rows' slots.
        newest: [S], the last of each row's tokens that is kept, among the T.

    Returns:
        The pages and the state with the new tokens.
    """
    own = len(cfg.layers)
    seen = jnp.zeros((tokens.shape[0], 0)) if seen is None else seen
    starts = ctx.kv_lens - jnp.diff(ctx.cu_q_lens)
    features, carried = followed.features, None
    if features is not None:
        carried = Carried(features[slots], followed.position[slots] == starts - 1)
    call = DraftCall(params["draft"], Target(params, cfg), tokens, ctx, cache[own:])
    pages, new = draft.absorb(call, seen, carried)
    if features is not None:
        assert new is not None
        features = features.at[slots].set(new[newest].astype(features.dtype))
    position = followed.position.at[slots].set(starts + newest - ctx.cu_q_lens[:-1])
    return (*cache[:own], *pages), Followed(position, features)


def propose(
    draft: DraftModel,
    params: Params,
    cfg: ModelConfig,
    tokens: jax.Array,
    ctx: Paged,
    cache: Cache,
    followed: Followed,
    slots: jax.Array,
    inputs: SampleInputs,
    history: jax.Array,
    count: int,
) -> tuple[jax.Array, Cache]:
    """Return draft tokens [count, S] and the draft model's pages.

    They are sampled as the target samples them, with the noise of the same seeds and positions: at a temperature, equal
    distributions then give equal tokens, and similar ones mostly do.

    Args:
        draft: The draft model.
        params: The weights, with the draft model's.
        cfg: The target.
        tokens: [S], the newest token of each row.
        ctx: The context of the verify step, whose rows have the newest token and room for draft tokens.
        cache: The pages, the target's and then the draft model's.
        followed: The state after earlier calls.
        slots: [S].
        inputs: The sampling parameters of the rows, for the position after the newest token.
        history: The counts of the penalties.
        count: K.
    """
    S, held, pages = tokens.shape[0], cache[: len(cfg.layers)], cache[len(cfg.layers) :]
    drafted = jnp.maximum(jnp.diff(ctx.cu_q_lens) - 1, 0)
    first = jnp.minimum(jnp.arange(S + 1), ctx.num_seqs[0])
    tables = _safe(ctx, pages[0]) if pages else ctx.block_tables
    rows = replace(ctx, block_tables=tables, kv_lens=ctx.kv_lens - drafted, cu_q_lens=first)
    bare = replace(inputs, top_logprobs=jnp.full_like(inputs.top_logprobs, -1))

    def pick(j: int, logits: jax.Array) -> jax.Array:
        return sample(logits, advance(bare, j), history, MAX_LOGPROBS, ctx.platform, ctx.placement)[0]

    carried = followed.features[slots] if followed.features is not None else None
    call = DraftCall(params["draft"], Target(params, cfg, held), tokens, rows, pages)
    return draft.draft(call, carried, count, pick)


def _safe(ctx: Paged, pages: jax.Array) -> jax.Array:
    """Return the rows' tables with the scratch page where a row has no page of its own.

    The table of a slot still has pages of earlier sequences there, which may belong to others now.
    """
    starts = jnp.arange(ctx.block_tables.shape[1]) * pages.shape[1]
    return jnp.where(starts < ctx.kv_lens[:, None], ctx.block_tables, pages.shape[0] - 1)
