"""Run EAGLE-3 and MTP drafters on packed rows, unrolled for several draft tokens.

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

from dovetail.core.errors import UnsupportedError
from dovetail.core.types import Batch, Packed, Params
from dovetail.models.attention import Attention
from dovetail.models.block import block, norm
from dovetail.models.config import Layer, ModelConfig
from dovetail.models.decoder import embed
from dovetail.models.draft.eagle3 import Eagle3
from dovetail.models.draft.mtp import Mtp
from dovetail.models.mtp import mtp_step
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
        if self.window is not None:
            visible &= at[:, None] + len(later) - at < self.window
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

    @property
    def scales(self) -> bool:
        """Return whether the logits are those of the target's head, with its scale."""
        return "head" in self.model.shared

    def prepare(self, params: Params, cfg: ModelConfig, batch: Batch, ctx: StepContext, seen: Seen) -> jax.Array:
        """Return the normed states [B, T, N, D] of the chains of all tokens."""
        model = _for_chains(self.model)
        table = jax.lax.stop_gradient(ctx.frozen["embed"])
        packed, rope = Packed(batch.segment_ids, ctx.platform, ctx.placement), model.layers[0].attn.rope
        assert rope is not None
        hidden, entry, found = model.features(params, seen.taps), None, []
        for j in range(self.steps):
            x = embed({"embed": table}, cfg, later(batch.tokens, j + 1), ctx.placement)
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

    def pairs(self, params: Params, hidden: jax.Array, previous: jax.Array) -> None:
        """Return nothing: a chain reads the tokens before itself."""


@dataclass(frozen=True)
class TrainedMtp:
    """Compute the hidden states of a layer of multi-token prediction that runs on its own output."""

    model: Mtp
    steps: int  # N
    scales = True

    def prepare(self, params: Params, cfg: ModelConfig, batch: Batch, ctx: StepContext, seen: Seen) -> jax.Array:
        """Return the states [B, T, N, D] of the chains of all tokens; they start with the target's final states."""
        (p,), table = params["mtp"], jax.lax.stop_gradient(ctx.frozen["embed"])
        packed, run = Packed(batch.segment_ids, ctx.platform, ctx.placement), self._block
        hidden, entry, found = seen.taps, None, []
        for j in range(self.steps):
            token = embed({"embed": table}, cfg, later(batch.tokens, j + 1), ctx.placement)
            hidden, entry, _ = mtp_step(p, cfg, token, hidden, batch.positions + j, packed, entry, run)
            found.append(hidden)
        return jnp.stack(found, axis=2)

    hidden, pairs = TrainedChains.hidden, TrainedChains.pairs

    def _block(self, *given: Any, cfg: ModelConfig, layer: Layer) -> Any:
        return block(*given, cfg=cfg, layer=_chained(layer) if self.steps > 1 else layer)


def later(tokens: jax.Array, count: int) -> jax.Array:
    """Return at each place [B, T] the token so many places later; 0 past the end."""
    return jnp.pad(tokens[:, count:], ((0, 0), (0, count)))


def check_chain(layer: Layer, steps: int, param: str) -> None:
    """Refuse to unroll a layer whose attention is not supported in chains.

    Raises:
        UnsupportedError: `steps` is above 1 and the layer has latents, sinks, a soft cap or a recurrent state.
    """
    attn = layer.attn
    if steps > 1 and (type(attn) is not Attention or attn.sinks or attn.softcap is not None):
        raise UnsupportedError(
            f"`{param}` must be 1 for a model whose last layer has no plain attention (latents, sinks, a soft cap), "
            f"got {steps}",
            param=param,
        )


def _chained(layer: Layer) -> Layer:
    """Return a layer with attention over chains."""
    fields = {f.name: getattr(layer.attn, f.name) for f in dataclasses.fields(layer.attn)}
    return dataclasses.replace(layer, attn=ChainAttention(**fields))


def _for_chains(model: Eagle3) -> Eagle3:
    """Return the model with attention over chains."""
    layers = tuple(map(_chained, model.cfg.layers))
    return dataclasses.replace(model, cfg=dataclasses.replace(model.cfg, layers=layers))
