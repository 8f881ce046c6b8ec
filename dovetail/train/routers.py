"""How routers dealt tokens out to experts: what a step says of it, and balance without a loss."""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from dovetail.core.types import Params
from dovetail.ops.moe import RouterStats


def loads_of(stats: Mapping[int, RouterStats]) -> dict[int, jax.Array]:
    """Layer -> [E] tokens of all rows."""
    return {i: jax.lax.stop_gradient(dealt.load.sum(axis=0)) for i, dealt in stats.items()}


def router_metrics(loads: Mapping[int, jax.Array]) -> dict[str, jax.Array]:
    """The busiest expert's load as a multiple of the mean, and the share of experts that no token reached."""
    if not loads:
        return {}
    busiest = [load.max() / jnp.maximum(load.mean(), 1e-9) for load in loads.values()]
    idle = [(load == 0).mean() for load in loads.values()]
    return {"router_busiest": jnp.stack(busiest).max(), "router_idle": jnp.stack(idle).mean()}


def balanced(params: Params, loads: Mapping[int, jax.Array], rate: float) -> Params:
    """Balance without a loss (DeepSeek-V3): the bias on an expert's choice rises where its load is below the mean.
    Layers of multi-token prediction are numbered after the last."""
    if not rate:
        return params
    blocks = [*params["layers"], *(depth["block"] for depth in params.get("mtp", ()))]
    for i, load in loads.items():
        moe = blocks[i]["moe"]
        if "choice_bias" in moe:
            bias = moe["choice_bias"] + (rate * jnp.sign(load.mean() - load)).astype(moe["choice_bias"].dtype)
            blocks[i] = {**blocks[i], "moe": {**moe, "choice_bias": bias}}
    depth = len(params["layers"])
    new = {**params, "layers": tuple(blocks[:depth])}
    if "mtp" in params:
        new["mtp"] = tuple({**p, "block": b} for p, b in zip(params["mtp"], blocks[depth:], strict=True))
    return new
