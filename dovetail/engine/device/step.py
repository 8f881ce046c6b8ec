"""The functions of a step that are compiled: decode steps, several per dispatch, or a ragged batch with prompts.

S rows, T tokens, D model dim, V vocabulary, M pages that a slot may hold.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from dovetail.core.compute import Compute
from dovetail.core.mesh import Placement, constrain
from dovetail.core.types import Cache, Embeds, Paged, Params
from dovetail.engine.device.batch import Shape, StepArrays, sample_inputs, unpack
from dovetail.engine.device.following import Followed, follow, propose
from dovetail.engine.request.params import MAX_LOGPROBS
from dovetail.engine.schedule.plan import REJECTED, UNKNOWN
from dovetail.models.config import ModelConfig
from dovetail.models.decoder import tapped, unembed
from dovetail.models.draft.draft import DraftModel
from dovetail.ops.adapter import choose
from dovetail.ops.paged import token_rows
from dovetail.ops.sample import SampleInputs, advance, count_tokens, logprobs, sample


class DeviceState(NamedTuple):
    """Hold the arrays that each step is given (donated) and returns for the next one."""

    cache: Cache
    last: jax.Array  # [slots + 1] the last token that each slot sampled; the last slot is padding's
    tables: jax.Array  # [slots + 1, M] each slot's pages
    history: jax.Array  # [slots, V]: see ops.sample.count_tokens
    followed: Followed | None = None  # by a draft model


class StepOutput(NamedTuple):
    """Hold the results of a step."""

    tokens: jax.Array  # [steps, S]
    logprobs: tuple[jax.Array, ...]  # [steps, S, ...]: see ops.sample.logprobs
    hidden: jax.Array | None = None  # [T, D], if the shape keeps them


class Unsampled(NamedTuple):
    """Hold the sampler's inputs after a step with prompts; they do not depend on its number of tokens."""

    logits: jax.Array  # [S, V] f32
    slots: jax.Array  # [S] where the token is stored; padding's slot for rows that do not sample
    numbers: jax.Array  # [NUMBERS, S] the rows' sampling parameters


NO_DRAFT = -1  # of a row with fewer draft tokens than the shape has
STATIC = ("cfg", "shape", "compute", "draft", "platform", "placement")


@functools.partial(jax.jit, static_argnames=STATIC, donate_argnames=("state",))
def run_decode(
    params: Params,
    state: DeviceState,
    flat: jax.Array,
    asked: dict[str, jax.Array],
    *,
    cfg: ModelConfig,
    shape: Shape,
    compute: Compute,
    draft: DraftModel | None = None,
    platform: str | None = None,
    placement: Placement | None = None,
) -> tuple[StepOutput, DeviceState]:
    """Run one decode step, or several in a row that each take the tokens that the previous one sampled.

    Args:
        params: The weights.
        state: Donated.
        flat: The step's vector (see device.batch).
        asked: The arrays of SampleInputs with more than a number per row.
        cfg: The model's config.
        shape: The step's shape.
        compute: The types to compute in.
        draft: The draft model, whose weights are `params["draft"]`.
        platform: The device's platform if it is not jax's default.
        placement: The mesh and its rules; None for one device.
    """
    batch = unpack(flat, shape)
    tables = _with_new_pages(state.tables, batch)
    rows = tables[batch.slots]
    # the host may give tokens to the first step; later ones take the sampled tokens
    known = jnp.where(batch.tokens == UNKNOWN, state.last[batch.slots], batch.tokens)
    last = state.last.at[batch.slots].set(known)
    params = choose(params, batch.adapters)

    def one(i, cache, last, history, followed):
        """Run step i: feed tokens, sample, store."""
        kv_lens = batch.kv_lens + jnp.where(jnp.arange(shape.rows) < batch.num_seqs[0], i, 0)
        ctx = Paged(rows, kv_lens, batch.cu_q_lens, batch.num_seqs, platform, placement)
        row, positions, _ = token_rows(ctx, shape.tokens)
        with compute.products(platform):
            tokens, rotary = last[batch.slots], _rotary(batch, row, positions)
            hidden, cache, seen = tapped(params, cfg, tokens, rotary, ctx, cache, taps=_taps(draft))
            logits = unembed(params, cfg, hidden)
            if draft is not None:
                assert cache is not None
                newest = jnp.arange(shape.rows)
                cache, followed = follow(
                    draft, params, cfg, tokens, seen, ctx, cache, followed, batch.slots, newest
                )  # fmt: skip
        inputs = advance(sample_inputs(batch.numbers, asked), i)
        out, last, history = _sample(logits, batch.slots, inputs, last, history, platform, placement)
        return out, (cache, last, history, followed)

    carry = state.cache, last, state.history, state.followed
    out, (cache, last, history, followed) = _repeat(one, carry, shape.steps)
    return StepOutput(*out), DeviceState(cache, last, tables, history, followed)


def _taps(draft: DraftModel | None) -> tuple[int, ...]:
    return draft.taps if draft else ()


def _repeat(one: Callable, carry: tuple, steps: int) -> tuple[Any, tuple]:
    """Call one(i, *carry) -> (out, carry) `steps` times; the outputs get a leading dim of the steps."""
    if steps == 1:
        out, carry = one(0, *carry)
        return jax.tree.map(lambda x: x[None], out), carry
    shapes, _ = jax.eval_shape(one, 0, *carry)
    out = jax.tree.map(lambda x: jnp.zeros((steps, *x.shape), x.dtype), shapes)

    def body(i, carry):
        out, carry = carry
        new, carry = one(i, *carry)
        return jax.tree.map(lambda buffer, x: buffer.at[i].set(x), out, new), carry

    return jax.lax.fori_loop(0, steps, body, (out, carry))


@functools.partial(jax.jit, static_argnames=STATIC, donate_argnames=("state",))
def run_verify(
    params: Params,
    state: DeviceState,
    flat: jax.Array,
    asked: dict[str, jax.Array],
    *,
    cfg: ModelConfig,
    shape: Shape,
    compute: Compute,
    draft: DraftModel | None = None,
    platform: str | None = None,
    placement: Placement | None = None,
) -> tuple[StepOutput, DeviceState]:
    """Run a verify step: feed each row's newest token and its draft tokens, and sample after each of them.

    Every position is sampled as a decode step would sample it, with its own seed, position and mask, and with the
    accepted tokens before it in the counts of the penalties. A draft token is accepted if it equals the token sampled
    in its place, so that the output is the one without draft tokens. The arguments are those of `run_decode`; the mask
    of `asked` is [1 + drafts, S, W].

    A draft token that is UNKNOWN is proposed here by the draft model. A row whose length is not known to the host goes
    on from the last token that its slot kept.

    Returns:
        The output with tokens and log-probabilities of [1 + drafts, S]; tokens after a rejected draft token are
        REJECTED, and their log-probabilities meaningless.
    """
    batch, inputs = _known(unpack(flat, shape), state.last, state.followed, asked)
    tables = _with_new_pages(state.tables, batch)
    ctx = Paged(tables[batch.slots], batch.kv_lens, batch.cu_q_lens, batch.num_seqs, platform, placement)
    row, positions, _ = token_rows(ctx, shape.tokens)
    params = choose(params, batch.adapters[row])
    tokens, cache, rotary = batch.tokens, state.cache, _rotary(batch, row, positions)
    with compute.products(platform):
        if draft is not None:
            assert state.followed is not None
            own, inputs_at = len(cfg.layers), replace(inputs, mask=inputs.mask[0])
            proposed, pages = propose(
                draft, params, cfg, tokens[batch.cu_q_lens[:-1]], ctx, cache, state.followed, batch.slots,
                inputs_at, state.history, shape.drafts,
            )  # fmt: skip
            cache = (*cache[:own], *pages)
            offset = jnp.clip(jnp.arange(shape.tokens) - batch.cu_q_lens[row] - 1, 0, shape.drafts - 1)
            tokens = jnp.where(tokens == UNKNOWN, proposed[offset, row], tokens)
        hidden, cache, seen = tapped(params, cfg, tokens, rotary, ctx, cache, taps=_taps(draft))
        logits = constrain(unembed(params, cfg, hidden), placement, None, "vocab")  # [T, V]
    assert cache is not None
    # one row per position [1 + drafts, S]; a row with fewer draft tokens repeats its last position, which is not kept
    counts, order = batch.cu_q_lens[1:] - batch.cu_q_lens[:-1], jnp.arange(1 + shape.drafts)[:, None]
    at = batch.cu_q_lens[:-1] + jnp.minimum(order, jnp.maximum(counts - 1, 0))
    drafts = jnp.where(order + 1 < counts, tokens[jnp.minimum(at + 1, shape.tokens - 1)], NO_DRAFT)[:-1]
    each, table = _each_position(inputs, state.history, drafts)
    table = constrain(table, placement, None, "vocab")
    sampled = sample(logits[at.reshape(-1)], each, table, MAX_LOGPROBS, platform, placement)
    found, scores = jax.tree.map(lambda x: x.reshape(*at.shape, *x.shape[1:]), sampled)
    kept = jnp.cumprod(found[:-1] == drafts, axis=0)  # [drafts, S]
    kept = jnp.concatenate([jnp.ones_like(kept[:1]), kept])
    slots = jnp.where(kept == 1, inputs.slot, state.history.shape[0])
    history = constrain(count_tokens(state.history, slots, found), placement, None, "vocab")
    newest = kept.sum(axis=0)[None] - 1
    last = state.last.at[batch.slots].set(jnp.take_along_axis(found, newest, axis=0)[0])
    followed = state.followed
    if draft is not None:
        with compute.products(platform):
            assert followed is not None
            end = jnp.take_along_axis(at, newest, axis=0)[0]
            cache, followed = follow(draft, params, cfg, tokens, seen, ctx, cache, followed, batch.slots, end)
    output = StepOutput(jnp.where(kept == 1, found, REJECTED), scores)
    return output, DeviceState(cache, last, tables, history, followed)


@functools.partial(jax.jit, static_argnames=STATIC, donate_argnames=("pages", "tables"))
def run_proposal(
    params: Params,
    held: Cache,
    pages: Cache,
    tables: jax.Array,
    last: jax.Array,
    history: jax.Array,
    followed: Followed,
    flat: jax.Array,
    asked: dict[str, jax.Array],
    *,
    cfg: ModelConfig,
    shape: Shape,
    compute: Compute,
    draft: DraftModel,
    platform: str | None = None,
    placement: Placement | None = None,
) -> tuple[jax.Array, tuple[Cache, jax.Array]]:
    """Propose the draft tokens of a verify step, for the host to compute the masks that depend on them.

    The arguments are those of `run_verify`, with the parts of the state that a draft model reads: `held` are the
    target's pages and `pages` its own. The mask of `asked` is [S, W].

    Returns:
        (the draft tokens [drafts, S], (pages, tables)).
    """
    batch, inputs = _known(unpack(flat, shape), last, followed, asked)
    tables = _with_new_pages(tables, batch)
    ctx = Paged(tables[batch.slots], batch.kv_lens, batch.cu_q_lens, batch.num_seqs, platform, placement)
    with compute.products(platform):
        found, pages = propose(
            draft, params, cfg, batch.tokens[batch.cu_q_lens[:-1]], ctx, (*held, *pages), followed, batch.slots,
            inputs, history, shape.drafts,
        )  # fmt: skip
    return found, (pages, tables)


def _known(
    batch: StepArrays, last: jax.Array, followed: Followed | None, asked: dict[str, jax.Array]
) -> tuple[StepArrays, SampleInputs]:
    """Return the vector of a verify step and the sampling parameters, with what only the device knows."""
    inputs, starts = sample_inputs(batch.numbers, asked), batch.cu_q_lens[:-1]
    newest = jnp.where(batch.tokens[starts] == UNKNOWN, last[batch.slots], batch.tokens[starts])
    real = jnp.where(jnp.arange(starts.shape[0]) < batch.num_seqs[0], starts, batch.tokens.shape[0])
    batch = replace(batch, tokens=batch.tokens.at[real].set(newest, mode="drop"))
    if followed is None:
        return batch, inputs
    newest_at = followed.position[batch.slots] + 1
    ahead = batch.kv_lens < 0
    batch = replace(batch, kv_lens=jnp.where(ahead, newest_at - batch.kv_lens, batch.kv_lens))
    return batch, replace(inputs, position=jnp.where(ahead, newest_at + 1, inputs.position))


def _each_position(inputs: SampleInputs, history: jax.Array, drafts: jax.Array) -> tuple[SampleInputs, jax.Array]:
    """Return the inputs of every position of a verify step, each as a row of its own, and their table of counts.

    Position j of a row counts the row's history [N, V] and its first j draft tokens [drafts, S].
    """
    (count, S), (N, V) = drafts.shape, history.shape
    rows = history.at[inputs.slot].get(mode="fill", fill_value=0)
    table = jnp.broadcast_to(rows, (1 + count, S, V))
    for j in range(count):
        table = table.at[j + 1 :, jnp.arange(S), jnp.where(drafts[j] == NO_DRAFT, V, drafts[j])].add(2, mode="drop")
    mine, order = jnp.arange((1 + count) * S).reshape(1 + count, S), jnp.arange(1 + count)[:, None]
    wide = {name: jnp.broadcast_to(x, (1 + count, *x.shape)) for name, x in vars(inputs).items() if name != "mask"}
    wide |= dict(mask=inputs.mask, position=inputs.position + order, slot=jnp.where(inputs.slot < N, mine, mine.size))
    return SampleInputs(**{name: x.reshape(-1, *x.shape[2:]) for name, x in wide.items()}), table.reshape(-1, V)


@functools.partial(jax.jit, static_argnames=STATIC, donate_argnames=("cache", "tables", "followed"))
def run_prompts(
    params: Params,
    cache: Cache,
    tables: jax.Array,
    last: jax.Array,
    flat: jax.Array,
    followed: Followed | None,
    features: jax.Array | None = None,
    *,
    cfg: ModelConfig,
    shape: Shape,
    compute: Compute,
    draft: DraftModel | None = None,
    platform: str | None = None,
    placement: Placement | None = None,
) -> tuple[tuple[Unsampled, jax.Array | None], tuple[Cache | None, jax.Array, Followed | None]]:
    """Run a step over a ragged batch up to its logits; the arguments are those of `run_decode`, and `features`.

    `features` [rows, width] is the encoder's buffer (see device.encoder), which only a step with images reads.

    Sampling is a program of its own (`run_sampler`), compiled once per number of rows instead of also per number of
    tokens.

    Returns:
        ((the sampler's inputs, the hidden states), (cache, tables, followed)).
    """
    batch = unpack(flat, shape)
    tables = _with_new_pages(tables, batch)
    rows = tables[batch.slots]
    ctx = Paged(rows, batch.kv_lens, batch.cu_q_lens, batch.num_seqs, platform, placement)
    row, positions, _ = token_rows(ctx, shape.tokens)
    tokens = jnp.where(batch.tokens == UNKNOWN, last[batch.slots[row]], batch.tokens)
    ends = jnp.maximum(batch.cu_q_lens[1:] - 1, 0)
    params = choose(params, batch.adapters[row])
    embeds, masked = None, ctx
    if features is not None and batch.index is not None and batch.last_seen is not None:
        embeds = Embeds(features, batch.index)
        if cfg.vision and cfg.vision.block_mask:
            masked = replace(ctx, last_seen=jnp.maximum(positions, batch.last_seen))
    with compute.products(platform):
        every = shape.keeps_hidden or any(tap >= len(cfg.layers) - 1 for tap in _taps(draft))
        wanted = None if every else ends  # of a prompt, only its last token
        rotary = _rotary(batch, row, positions)
        hidden, new_cache, seen = tapped(params, cfg, tokens, rotary, masked, cache, wanted, _taps(draft), embeds)
        logits = unembed(params, cfg, hidden[ends] if every else hidden)
        if draft is not None:
            assert new_cache is not None and followed is not None
            new_cache, followed = follow(
                draft, params, cfg, tokens, seen, ctx, new_cache, followed, batch.slots, ends
            )  # fmt: skip
        # keep the vocabulary split first: with a replicated result XLA gathers the weights instead of the logits
        logits = constrain(logits, placement, None, "vocab")
    slots = jnp.where(batch.samples == 1, batch.slots, last.shape[0] - 1)
    left = [constrain(x, placement, None, *(None,) * (x.ndim - 1)) for x in (logits, slots, batch.numbers)]
    return (Unsampled(*left), hidden if shape.keeps_hidden else None), (new_cache, tables, followed)


@functools.partial(jax.jit, static_argnames=("platform", "placement"), donate_argnames=("last", "history"))
def run_sampler(
    last: jax.Array,
    history: jax.Array,
    left: Unsampled,
    asked: dict[str, jax.Array],
    *,
    platform: str | None = None,
    placement: Placement | None = None,
) -> tuple[StepOutput, tuple[jax.Array, jax.Array]]:
    """Sample from the logits of a step with prompts; return its output and (last, history)."""
    inputs = sample_inputs(left.numbers, asked)
    out, last, history = _sample(left.logits, left.slots, inputs, last, history, platform, placement)
    return StepOutput(*jax.tree.map(lambda x: x[None], out)), (last, history)


def _sample(logits, slots, inputs: SampleInputs, last, history, platform, placement):
    """Return ((tokens [S], their log-probabilities), and `last` and `history` with them added)."""
    tokens, scores = sample(logits, inputs, history, MAX_LOGPROBS, platform, placement)
    # every program takes the table in this layout, whatever the compiler would choose for the sum
    history = constrain(count_tokens(history, inputs.slot, tokens), placement, None, "vocab")
    return (tokens, scores), last.at[slots].set(tokens), history


def _rotary(batch: StepArrays, row: jax.Array, positions: jax.Array) -> jax.Array:
    """Return the rotary positions, [T] or [T, 3], of tokens from their rows [T] and positions [T]."""
    if batch.offsets is None:
        return positions
    return positions[:, None] + batch.offsets if batch.offsets.ndim == 2 else positions + batch.offsets[row]


def _with_new_pages(tables: jax.Array, batch: StepArrays) -> jax.Array:
    slot, place, page = batch.new_pages
    return tables.at[slot, place].set(page)


@functools.partial(jax.jit, static_argnames=("cfg", "compute", "platform"))
def score(params: Params, hidden, targets, *, cfg: ModelConfig, compute: Compute, platform: str | None):
    """Return the log-probabilities (see ops.sample.logprobs) of targets [n] after hidden states [n, D]."""
    with compute.products(platform):
        logits = unembed(params, cfg, hidden)
    return logprobs(logits, targets, MAX_LOGPROBS)
