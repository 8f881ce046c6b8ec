"""Run EAGLE-3 drafters on packed rows, unrolled for several draft tokens.

The chain of token q starts with the target's hidden states at q. Its first step sees the first steps of all tokens up
to q, its later steps also the chain's own steps before them: what serving finds in the pages.

B rows, T tokens, A chains, N steps, D model dim, G = heads / key heads, K key heads, H head dim.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from dovetail.core.types import Batch, Packed, Params
from dovetail.models.attention import Attention
from dovetail.models.block import norm
from dovetail.models.config import ModelConfig
from dovetail.models.decoder import embed
from dovetail.models.draft.eagle3 import Eagle3
from dovetail.ops.packed import MASKED
from dovetail.train.objective import StepContext
from dovetail.tune.draft.states import Seen, take


@dataclass(frozen=True)
class ChainAttention(Attention):
    """Attend from the steps of chains; the entry holds keys and values of the chains' earlier steps."""

    def __call__(
        self, p: Params, x: jax.Array, table: tuple, ctx: Any, entry: Any, eps: float, offset: float
    ) -> tuple[jax.Array, Any]:
        """Map x [B, T, ...], a step of all chains, to every head's output [B, T, N, H] and the entry with this step."""
        q, own = self.project_and_store(p, x, table, ctx, None, eps, offset)
        steps = (*(entry or ()), own)
        (k, v), later = steps[0], steps[1:]
        B, T, K, H = k.shape
        q = q.reshape(B, T, K, -1, H)
        at = jnp.arange(T)
        visible = (at[:, None] >= at) & (ctx.segment_ids[:, :, None] == ctx.segment_ids[:, None])
        scores = jnp.einsum("btkgh,bskh->bkgts", q, k, preferred_element_type=jnp.float32) * self.scale
        scores = [jnp.where(visible[:, None, None], scores, MASKED)]
        for step_k, _ in later:
            one = jnp.einsum("btkgh,btkh->bkgt", q, step_k, preferred_element_type=jnp.float32) * self.scale
            scores.append(one[..., None])
        weights = jax.nn.softmax(jnp.concatenate(scores, axis=-1)).astype(v.dtype)
        out = jnp.einsum("bkgts,bskh->btkgh", weights[..., :T], v)
        for i, (_, step_v) in enumerate(later):
            out += jnp.einsum("bkgt,btkh->btkgh", weights[..., T + i], step_v)
        return out.reshape(B, T, self.heads, H), steps


@dataclass(frozen=True)
class TrainedChains:
    """Compute the hidden states of chains (see objective.Trained)."""

    model: Eagle3
    steps: int  # N

    def prepare(self, params: Params, cfg: ModelConfig, batch: Batch, ctx: StepContext, seen: Seen) -> jax.Array:
        """Return the normed states [B, T, N, D] of the chains of all tokens."""
        model = _for_chains(self.model)
        table = jax.lax.stop_gradient(ctx.frozen["embed"])
        packed, rope = Packed(batch.segment_ids, ctx.platform, ctx.placement), model.layers[0].attn.rope
        assert rope is not None
        hidden, entry, found = model.features(params, seen.taps), None, []
        for j in range(self.steps):
            token = jnp.pad(batch.tokens[:, j + 1 :], ((0, 0), (0, j + 1)))
            x = embed({"embed": table}, cfg, token, ctx.placement)
            turns = rope.tables(batch.positions + j)
            stream, entry = model.first_layer(params["layers"][0], x, hidden, turns, packed, entry)
            hidden = stream.x if stream.pending is None else stream.x + stream.pending
            found.append(norm(params["norm"], model.cfg, hidden))
        return jnp.stack(found, axis=2)

    def hidden(
        self, params: Params, prepared: jax.Array, batch: Batch, ctx: StepContext, newest: jax.Array
    ) -> jax.Array:
        """Return the states [B, A, N, D]: a draft after the newest token is the chain of the token before it."""
        return take(prepared, jnp.maximum(newest - 1, 0))


def _for_chains(model: Eagle3) -> Eagle3:
    """Return the model with attention over chains."""
    layers = []
    for layer in model.cfg.layers:
        fields = {f.name: getattr(layer.attn, f.name) for f in dataclasses.fields(layer.attn)}
        layers.append(dataclasses.replace(layer, attn=ChainAttention(**fields)))
    return dataclasses.replace(model, cfg=dataclasses.replace(model.cfg, layers=tuple(layers)))
