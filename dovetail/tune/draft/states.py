"""Give the training of a drafter what it reads of the target: hidden states, embedding and head.

The hidden states are columns of the rows (`hidden_states: disk`), or are computed in the step by a frozen target. In
both cases embedding and head are frozen weights.

B rows, T tokens, K taps, D model dim, V the target's vocabulary, U the drafter's.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dovetail.core.mesh import Placement
from dovetail.core.types import Batch, Column, Params
from dovetail.models.config import ModelConfig
from dovetail.models.decoder import tapped
from dovetail.train.objective import Frozen, StepContext
from dovetail.tune.policy import frozen_model, head_of
from dovetail.tune.settings import Draft

TAPS, FINAL = "taps", "final"


class Seen(NamedTuple):
    """Hold hidden states of the target."""

    taps: jax.Array  # [B, T, K * D]
    final: jax.Array  # [B, T, D]: the last norm's output


@dataclass(frozen=True)
class States:
    """Read hidden states, embedding and head of the target in a step."""

    layers: tuple[int, ...]  # the taps
    live: bool
    ids: tuple[int, ...]  # the target's tokens that the drafter knows, ascending; () for all

    def columns(self, cfg: ModelConfig) -> dict[str, Column]:
        """Return the columns that the rows must have."""
        if self.live:
            return {}
        return {TAPS: Column(width=len(self.layers) * cfg.dim), FINAL: Column(width=cfg.dim)}

    def of(self, cfg: ModelConfig, batch: Batch, ctx: StepContext) -> Seen:
        """Return the hidden states of a batch, in the compute dtype."""
        found = Seen(batch.columns[TAPS], batch.columns[FINAL]) if not self.live else run_target(
            ctx.frozen, cfg, self.layers, batch, ctx
        )  # fmt: skip
        return Seen(*(jax.lax.stop_gradient(x.astype(ctx.compute.dtype)) for x in found))

    def head(self, cfg: ModelConfig, ctx: StepContext) -> jax.Array:
        """Return the rows [U, D] of the target's head for the drafter's vocabulary."""
        whole = jax.lax.stop_gradient(head_of(ctx.frozen, cfg))
        return whole[np.asarray(self.ids)] if self.ids else whole

    def draft_token(self, tokens: jax.Array) -> jax.Array:
        """Return the drafter's numbers of the target's tokens; -1 for those that it does not know."""
        if not self.ids:
            return tokens
        at = jnp.searchsorted(self._ids, tokens).astype(jnp.int32)
        at = jnp.minimum(at, len(self.ids) - 1)
        return jnp.where(jnp.asarray(self._ids)[at] == tokens, at, -1)

    @cached_property
    def _ids(self) -> np.ndarray:
        return np.asarray(self.ids, np.int32)


def run_target(params: Params, cfg: ModelConfig, layers: tuple[int, ...], batch: Batch, ctx: StepContext) -> Seen:
    """Run the target on packed rows."""
    final, _, taps = tapped(params, cfg, batch.tokens, batch.positions, ctx.packed(batch), taps=layers)
    assert taps is not None
    return Seen(taps, final)


def take(x: jax.Array, at: jax.Array) -> jax.Array:
    """Return x [B, T, ...] at the tokens [B, ...]."""
    return jax.vmap(lambda row, index: row[index])(x, at)


def frozen_part(settings: Draft) -> Frozen:
    """Return the target's weights that a step reads: all of them, or embedding, last norm and head alone."""
    whole = frozen_model(settings.weights, settings.held, settings.precision.compute)
    if settings.drafter.hidden_states == "live":
        return whole

    def outer(tree: Any, cfg: ModelConfig) -> Any:
        return {name: tree[name] for name in ("embed", "norm", *(() if cfg.tied else ("head",)))}

    def abstract(cfg: ModelConfig, placement: Placement) -> Any:
        return outer(whole.abstract(cfg, placement), cfg)

    return Frozen(abstract, lambda cfg, placement: outer(whole.load(cfg, placement), cfg))
