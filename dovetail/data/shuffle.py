"""Orders that depend on numbers alone: the same on every machine, with every version of numpy, from any start."""

from __future__ import annotations

import numpy as np

_GOLDEN, _FIRST, _SECOND = (np.uint64(x) for x in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def mix(x: np.ndarray) -> np.ndarray:
    """splitmix64: uint64 -> uint64, one to one, so distinct numbers never tie."""
    with np.errstate(over="ignore"):
        x = x + _GOLDEN
        x = (x ^ (x >> np.uint64(30))) * _FIRST
        x = (x ^ (x >> np.uint64(27))) * _SECOND
        return x ^ (x >> np.uint64(31))


def key(*parts: int) -> int:
    """One number of 64 bits for several small ones, such as (seed, epoch)."""
    out = np.zeros(1, np.uint64)
    for part in parts:
        out = mix(out ^ np.uint64(part))
    return int(out[0])


def ranks(count: int, *parts: int) -> np.ndarray:
    """[count] distinct uint64s that look random; item i's is the same however many items follow it."""
    return mix(mix(np.arange(count, dtype=np.uint64)) ^ np.uint64(key(*parts)))


def permutation(count: int, *parts: int) -> np.ndarray:
    """The numbers below `count` in an order of (parts)'s own: for orders that have to be laid out whole."""
    return np.argsort(ranks(count, *parts))


def place(index: int, count: int, *parts: int) -> int:
    """Where `index` goes in a permutation of `count`, without laying it out: Grain's cipher, a few microseconds."""
    from grain.experimental import index_shuffle

    return index_shuffle(index, max_index=count - 1, seed=key(*parts) & 0xFFFFFFFF, rounds=4)
