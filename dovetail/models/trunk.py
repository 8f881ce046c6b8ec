"""The layers for training: `decoder.forward`'s loop, with what the backward pass keeps and equal layers folded.

Remat says what is kept for the backward pass, by name:

none       everything
dots       what weights' products give, and attention's output: the rest is cheap to compute again
attention  attention's output and each layer's input
full       each layer's input alone

With `scan`, runs of equal layers (or of equal groups: five local layers and a global one, say) are stacked and compiled
once. The weights stay a tuple in the state; they are stacked where they are cast to the compute dtype, which copies
them anyway.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from dovetail.core.types import Packed, Params
from dovetail.models.config import ModelConfig
from dovetail.models.decoder import block, enter, leave
from dovetail.ops.moe import RouterStats

LONGEST_UNIT = 8  # layers of a repeated group


@dataclass(frozen=True)
class Run:
    """Layers `start` to `start + period * repeats`: a group of `period` layers, `repeats` times over."""

    start: int
    period: int
    repeats: int


def trunk(
    params: Params,
    cfg: ModelConfig,
    tokens: jax.Array,
    positions: jax.Array,
    ctx: Packed,
    *,
    remat: str = "none",
    scan: bool = False,
) -> tuple[jax.Array, dict[int, RouterStats]]:
    """tokens and positions [B, T] -> (hidden states [B, T, D], the statistics of each layer that has a router)."""
    x, extra, tables = enter(params, cfg, tokens, positions, ctx)
    entries: dict[int, Any] = {}  # of layers whose keys and values others read
    stats: dict[int, RouterStats] = {}

    def one(p: Params, x: jax.Array, i: int) -> tuple[jax.Array, RouterStats | None]:
        layer = cfg.layers[i]
        source = getattr(layer.attn, "kv_from", None)
        entry = entries[source] if source is not None else None
        own = extra[..., i, :] if extra is not None else None
        run = kept(functools.partial(block, cfg=cfg, layer=layer), remat, in_scan=scan)
        x, _, entries[i], dealt = run(p, x, None, tables[layer.attn.rope], ctx, entry, own)
        return x, dealt

    for run in runs(cfg) if scan and not _linked(cfg) else [Run(i, 1, 1) for i in range(len(cfg.layers))]:
        x, dealt = _folded(one, params["layers"], x, run) if run.repeats > 1 else _plain(one, params["layers"], x, run)
        stats |= dealt
    return leave(params, cfg, x, None, ctx), stats


def runs(cfg: ModelConfig) -> list[Run]:
    """The model as repeated groups, from its first layer to its last; what repeats nothing stands alone."""
    found, start = [], 0
    while start < len(cfg.layers):
        best = max(_repeats(cfg, start), key=lambda run: (run.period * run.repeats, -run.period))
        found.append(best)
        start += best.period * best.repeats
    return found


def _repeats(cfg: ModelConfig, start: int) -> Iterator[Run]:
    layers = cfg.layers
    yield Run(start, 1, 1)
    for period in range(1, LONGEST_UNIT + 1):
        unit, count = layers[start : start + period], 1
        while layers[start + count * period : start + (count + 1) * period] == unit:
            count += 1
        if count > 1:
            yield Run(start, period, count)


def _linked(cfg: ModelConfig) -> bool:
    """Whether layers read what others made, so that equal ones are not alike (Gemma 4)."""
    return any(getattr(layer.attn, "kv_from", None) is not None or layer.per_layer_dim for layer in cfg.layers)


def _plain(one: Callable, layers: tuple, x: jax.Array, run: Run) -> tuple[jax.Array, dict[int, RouterStats]]:
    x, dealt = one(layers[run.start], x, run.start)
    return x, {run.start: dealt} if dealt is not None else {}


def _folded(one: Callable, layers: tuple, x: jax.Array, run: Run) -> tuple[jax.Array, dict[int, RouterStats]]:
    """A scan over the repeats; the layers of a group follow each other in its body."""
    places = range(run.start, run.start + run.period)
    stacked = [_stack(layers[i : i + run.period * run.repeats : run.period]) for i in places]

    def group(x: jax.Array, weights: list[Params]) -> tuple[jax.Array, list[RouterStats | None]]:
        dealt = []
        for i, p in zip(places, weights, strict=True):
            x, found = one(p, x, i)
            dealt.append(found)
        return x, dealt

    x, dealt = jax.lax.scan(group, x, stacked)
    return x, {
        i + turn * run.period: jax.tree.map(lambda a, turn=turn: a[turn], found)
        for i, found in zip(places, dealt, strict=True)
        for turn in range(run.repeats)
        if found is not None
    }


def _stack(layers: tuple[Params, ...]) -> Params:
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers)


def kept(run: Callable, remat: str, in_scan: bool = False) -> Callable:
    """`run` with what its backward pass keeps, by the names above."""
    if remat == "none":
        return run
    keep = jax.checkpoint_policies
    attention = keep.save_only_these_names("attention")
    policy = {
        "dots": keep.save_from_both_policies(keep.dots_with_no_batch_dims_saveable, attention),
        "attention": attention,
        "full": keep.nothing_saveable,
    }[remat]

    def again(*args: Any, **static: Any) -> Any:
        return jax.checkpoint(functools.partial(run, **static), policy=policy, prevent_cse=not in_scan)(*args)

    return again
