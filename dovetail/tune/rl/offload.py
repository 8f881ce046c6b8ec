"""The optimizer's state on the host while something else wants the device's memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import jax

from dovetail.train.state import Position


@contextmanager
def offloaded(at: Position, wanted: bool = True) -> Iterator[None]:
    """It is where it was afterwards, bit for bit."""
    if not wanted:
        yield
        return
    opt = at.state.opt
    places = jax.tree.map(lambda x: x.sharding, opt)
    host = jax.device_get(opt)
    for leaf in jax.tree.leaves(opt):
        leaf.delete()  # at once: the engine takes its place
    try:
        yield
    finally:
        at.state = replace(at.state, opt=jax.tree.map(jax.device_put, host, places))
