"""Draw random weights with numpy: jax compiles a program for each shape, which takes 60 ms of CPU time."""

from __future__ import annotations

import functools


@functools.cache
def share() -> None:
    """Let this process draw the weights of models outside `jax.jit` with numpy."""
    import jax
    import numpy as np

    from dovetail.core import spec

    in_jax = spec._init_leaf

    def init_leaf(key, shape, dtype, kind, std, sharding=None):
        if isinstance(key, jax.core.Tracer) or kind == "sincos2d":
            return in_jax(key, shape, dtype, kind, std, sharding)
        rng = np.random.default_rng(np.asarray(jax.random.key_data(key)))
        name, _, number = kind.partition(":")
        leaf = {
            "normal": lambda: rng.normal(0, float(number or std), shape),
            "uniform": lambda: rng.uniform(-float(number or 0), float(number or 0), shape),
            "constant": lambda: np.full(shape, float(number or 0)),
            "zeros": lambda: np.zeros(shape),
            "ones": lambda: np.ones(shape),
        }[name]()
        leaf = leaf.astype(np.float32).astype(dtype)
        if sharding is None:
            return jax.device_put(leaf)
        return jax.make_array_from_callback(shape, sharding, lambda index: leaf[index])

    spec._init_leaf = init_leaf
