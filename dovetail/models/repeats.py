"""Find repeated groups of layers (one, or five local layers and a global one), to compile each once and scan over it.

Compile time then stays flat in depth.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from dovetail.core.types import Params
from dovetail.models.config import ModelConfig

LONGEST_UNIT = 8  # layers of a repeated group


@dataclass(frozen=True)
class Repeat:
    """Describe layers `start` to `start + period * times`: a group of `period` layers, repeated `times` times."""

    start: int
    period: int
    times: int


def repeats(cfg: ModelConfig, scan: bool = True) -> list[Repeat]:
    """Return the model as groups from its first layer to its last; a layer that is not repeated or scanned is alone."""
    found, start = [], 0
    while start < len(cfg.layers):
        choices = _starting_at(cfg, start) if scan and not _linked(cfg) else [Repeat(start, 1, 1)]
        best = max(choices, key=lambda one: (one.period * one.times, -one.period))
        found.append(best)
        start += best.period * best.times
    return found


def _starting_at(cfg: ModelConfig, start: int) -> Iterator[Repeat]:
    layers = cfg.layers
    yield Repeat(start, 1, 1)
    for period in range(1, LONGEST_UNIT + 1):
        unit, count = layers[start : start + period], 1
        while layers[start + count * period : start + (count + 1) * period] == unit:
            count += 1
        if count > 1:
            yield Repeat(start, period, count)


def _linked(cfg: ModelConfig) -> bool:
    """Return whether layers read values of others, so that equal ones are not interchangeable (Gemma 4)."""
    return any(layer.attn.kv_from is not None or layer.per_layer_dim for layer in cfg.layers)


def fold(one: Callable, layers: tuple, carry: Any, repeat: Repeat) -> tuple[Any, dict[int, Any]]:
    """Run the layers of `repeat`; a repeated group is a scan.

    Args:
        one: one(weights, carry, i) -> (carry, output or None).
        layers: The weights of all layers.
        carry: The carry before the first layer.
        repeat: The layers to run.

    Returns:
        The carry, and the outputs by layer.
    """
    places = range(repeat.start, repeat.start + repeat.period)
    if repeat.times == 1:
        carry, given = one(layers[repeat.start], carry, repeat.start)
        return carry, {repeat.start: given} if given is not None else {}
    stacked = [_stack(layers[i : i + repeat.period * repeat.times : repeat.period]) for i in places]

    def group(carry: Any, weights: list[Params]) -> tuple[Any, list[Any]]:
        all_given = []
        for i, p in zip(places, weights, strict=True):
            carry, given = one(p, carry, i)
            all_given.append(given)
        return carry, all_given

    carry, all_given = jax.lax.scan(group, carry, stacked)
    return carry, {
        i + turn * repeat.period: jax.tree.map(lambda a, turn=turn: a[turn], given)
        for i, given in zip(places, all_given, strict=True)
        for turn in range(repeat.times)
        if given is not None
    }


def _stack(layers: tuple[Params, ...]) -> Params:
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers)
