"""Run block drafters (DFlash, DFlash 2, DSpark) on packed rows.

A block sees the hidden states of the tokens before its start, of the same document, and itself.

B rows, T tokens, A blocks of a row, W slots of a block, N draft tokens of it, D model dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

from dovetail.core.types import Batch, Params
from dovetail.models.config import ModelConfig
from dovetail.models.draft.block_attention import Anchored
from dovetail.models.draft.dflash import DFlash
from dovetail.models.draft.draft import Target
from dovetail.train.objective import StepContext
from dovetail.tune.draft.states import Seen, take


class Prepared(NamedTuple):
    """Hold what all blocks of a batch share."""

    context: jax.Array  # [B, T, D]
    embed: jax.Array  # the target's


@dataclass(frozen=True)
class TrainedBlocks:
    """Compute the hidden states of blocks (see objective.Trained)."""

    model: DFlash
    scales = False

    def prepare(self, params: Params, cfg: ModelConfig, batch: Batch, ctx: StepContext, seen: Seen) -> Prepared:
        """Return the context that keys and values are computed from."""
        return Prepared(self.model.context(params, seen.taps), jax.lax.stop_gradient(ctx.frozen["embed"]))

    def hidden(
        self, params: Params, prepared: Prepared, batch: Batch, ctx: StepContext, newest: jax.Array
    ) -> jax.Array:
        """Return the states [B, A, N, D] of the blocks that start with the newest tokens [B, A]."""
        (B, A), slots = newest.shape, self.model.block_size
        segment = take(batch.segment_ids, newest)
        before = jnp.arange(batch.tokens.shape[1]) < newest[..., None]
        anchored = Anchored(
            jnp.repeat(segment, slots, axis=1), ctx.platform, ctx.placement, context=prepared.context,
            positions=batch.positions, visible=before & (batch.segment_ids[:, None] == segment[..., None]),
        )  # fmt: skip
        target = Target({"embed": prepared.embed}, self.model.cfg)
        x = self.model.embed_blocks(target, take(batch.tokens, newest), slots, anchored)
        positions = (take(batch.positions, newest)[..., None] + jnp.arange(slots)).reshape(B, -1)
        rope = self.model.layers[0].attn.rope
        assert rope is not None
        hidden, _ = self.model.forward(params, x.reshape(B, A * slots, -1), rope.tables(positions), anchored)
        return hidden.reshape(B, A, slots, -1)[:, :, slots - self.model.most :]

    def pairs(self, params: Params, hidden: jax.Array, previous: jax.Array) -> tuple[jax.Array, jax.Array] | None:
        """Return what the tokens before add to the logits (see DFlash.pairs)."""
        return self.model.pairs(params, hidden, previous)
