"""DFlash and DSpark: drafters that propose a whole block of tokens in one forward pass.

The context's keys and values come from outputs of the target's layers (DFlash, arXiv 2602.06036):

    C = norm(fc(taps));  K = k_norm(W_k [C; norm(x)]),  V = W_v [C; norm(x)] in every layer

The block is the newest token and mask tokens after it; its slots see each other and the context. Embedding and head are
the target's. DSpark (arXiv 2607.05147) predicts from the newest token's slot too, and adds W2 W1[previous token] to the
logits, so that only this small product is sequential. DFlash 2 has convolutions and a selector: see draft.dflash2.

T tokens of a call, S sequences, W slots, D model dim, V the target's vocabulary, U the drafter's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from dovetail.core.spec import tree_map
from dovetail.core.types import Cache, Context, Paged, Params
from dovetail.models.block import Residual, block
from dovetail.models.config import Layer, ModelConfig
from dovetail.models.decoder import embed
from dovetail.models.draft.block_attention import Anchored, BlockAttention, whole_blocks
from dovetail.models.draft.declare import declare, declare_norm, declare_tokens, in_target_vocab, without_model
from dovetail.models.draft.dflash2 import CandidateSelector, DynamicConv, conv_block
from dovetail.models.draft.draft import Carried, DraftCall, Pick, Target
from dovetail.models.registry import FAMILIES
from dovetail.models.spec import layer_spec
from dovetail.ops.linear import matmul
from dovetail.ops.norm import rms_norm
from dovetail.ops.paged import token_rows


@dataclass(frozen=True)
class DFlash:
    """Describe a block drafter (see DraftModel). With `markov_rank` it is a DSpark drafter.

    A confidence head is part of published DSpark checkpoints and is not read: the engine chooses the number of draft
    tokens by the acceptance that it observes.
    """

    cfg: ModelConfig  # the drafter's layers and norms; `vocab` is the target's
    taps: tuple[int, ...]
    block_size: int
    mask_token_id: int
    draft_vocab: int  # U; V for a drafter with the target's own head
    sample_from_anchor: bool = False  # whether the newest token's slot predicts too
    markov_rank: int = 0
    source: str = "{}"  # the config.json that it was read from
    conv: DynamicConv | None = None  # around attention and MLP
    selector: CandidateSelector | None = None

    feature_dim = 0

    def __hash__(self) -> int:
        return hash((self.source, self.cfg))

    @property
    def layers(self) -> tuple[Layer, ...]:
        """Return the layers that keep pages."""
        return self.cfg.layers

    @property
    def most(self) -> int:
        """Return the most draft tokens of one call."""
        return self.block_size - (not self.sample_from_anchor)

    @property
    def unused(self) -> tuple[str, ...]:
        """Return patterns of tensors that are not read: copies of the target's, and the confidence head."""
        copies = (r"embed_tokens\.weight",) + (() if self.own_head else (r"lm_head\.weight",))
        return (*copies, r"confidence_head\..*")

    @property
    def own_head(self) -> bool:
        """Return whether the drafter has a head of its own, of a part of the vocabulary."""
        return self.draft_vocab != self.cfg.vocab

    # --- weights ------------------------------------------------------------------------------------------------------

    def spec(self) -> dict[str, Any]:
        """Return the tree of the drafter's own weights, with their published names."""
        D, V, U = self.cfg.dim, self.cfg.vocab, self.draft_vocab
        layers = tuple(self._layer_spec(layer, i) for i, layer in enumerate(self.layers))
        tree: dict[str, Any] = {
            "fc": declare("fc.weight", (D, len(self.taps) * D), ("embed", None)),
            "hidden_norm": declare_norm("hidden_norm.weight", D),
            "layers": tree_map(without_model, layers),
            "norm": declare_norm("norm.weight", D),
        }
        if self.own_head:
            tree["head"] = declare("lm_head.weight", (U, D), ("vocab", "embed"))
            tree["d2t"] = declare_tokens("d2t", U)
        if self.markov_rank:
            w1 = declare("markov_head.markov_w1.weight", (V, self.markov_rank), ("vocab", None), active=0.0)
            w2 = declare("markov_head.markov_w2.weight", (U, self.markov_rank), ("vocab", None))
            tree["markov"] = {"w1": w1, "w2": w2}
        if self.selector:
            tree["selector"] = self.selector.spec(V, D)
        return tree

    def _layer_spec(self, layer: Layer, i: int) -> dict[str, Any]:
        tree = layer_spec(self.cfg, FAMILIES["qwen3"], layer, i)
        if self.conv:
            for half, name in (("attn", "attention"), ("mlp", "mlp")):
                tree[f"{half}_conv"] = self.conv.spec(f"layers.{i}.{name}_conv", self.cfg.dim)
        return tree

    # --- serving ------------------------------------------------------------------------------------------------------

    def absorb(self, call: DraftCall, tapped: jax.Array, carried: Carried | None) -> tuple[Cache, None]:
        """Store the context's keys and values of a call of the target."""
        params, _, tokens, ctx, cache = call
        context, table = self.context(params, tapped), self._table(ctx, tokens.shape[0])
        entries = []
        for layer, p, entry in zip(self.layers, params["layers"], cache, strict=True):
            attn = layer.attn
            assert isinstance(attn, BlockAttention)
            entries.append(attn.store(p["attn"], context, table, ctx, entry, self.cfg.norm_eps, 0.0)[1])
        return tuple(entries), None

    def draft(self, call: DraftCall, carried: jax.Array | None, count: int, pick: Pick) -> tuple[jax.Array, Cache]:
        """Propose `count` tokens after each sequence's newest one; only the slots that they need are computed."""
        params, target, tokens, ctx, cache = call
        slots = count + (not self.sample_from_anchor)
        ctx = whole_blocks(ctx, slots)
        x = self.embed_blocks(target, tokens, slots, ctx).reshape(-1, self.cfg.dim)
        hidden, cache = self.forward(params, x, self._table(ctx, x.shape[0]), ctx, cache)
        hidden = hidden.reshape(len(tokens), slots, -1)[:, slots - count :]
        logits = matmul(hidden, self.head(params, target), out_dtype=jnp.float32)
        drafts, previous = [], tokens
        for j in range(count):
            own = logits[:, j]
            if self.markov_rank:
                own += matmul(*self._markov(params, previous), out_dtype=jnp.float32)
            if self.selector:
                own = self.selector.scores(params["selector"], own, hidden[:, j], previous)
            own = in_target_vocab(own, params["d2t"], self.cfg.vocab) if self.own_head else own
            previous = pick(j, own)
            drafts.append(previous)
        return jnp.stack(drafts), cache

    def _table(self, ctx: Paged, num_tokens: int) -> tuple:
        rope = self.layers[0].attn.rope
        assert rope is not None
        return rope.tables(token_rows(ctx, num_tokens)[1])

    # --- parts that serving and training share ------------------------------------------------------------------------

    def context(self, params: Params, tapped: jax.Array) -> jax.Array:
        """Return C [..., D] from the tapped outputs [..., len(taps) * D]."""
        return rms_norm(matmul(tapped, params["fc"]), params["hidden_norm"], self.cfg.norm_eps)

    def embed_blocks(self, target: Target, anchors: jax.Array, slots: int, ctx: Context) -> jax.Array:
        """Return the inputs [..., W, D] of blocks that start with the tokens `anchors` [...]."""
        masks = jnp.full((*anchors.shape, slots - 1), self.mask_token_id, anchors.dtype)
        return embed(target.params, self.cfg, jnp.concatenate([anchors[..., None], masks], axis=-1), ctx.placement)

    def forward(
        self, params: Params, x: jax.Array, table: tuple, ctx: Anchored | Paged, cache: Cache | None = None
    ) -> tuple[jax.Array, Cache]:
        """Run the layers on blocks x [..., D] -> (the last norm's output, the pages with the blocks' tokens)."""
        stream, entries = Residual(x), []
        for i, (layer, p) in enumerate(zip(self.layers, params["layers"], strict=True)):
            entry, how = None if cache is None else cache[i], dict[str, Any](cfg=self.cfg, layer=layer)
            if self.conv:
                blocks = ctx.visible.shape[1] if isinstance(ctx, Anchored) else ctx.kv_lens.shape[0]
                slots = x.shape[-2] // blocks
                stream, entry = conv_block(p, stream, table, ctx, entry, slots, conv=self.conv, **how)
            else:
                stream, entry, _ = block(p, stream, table, ctx, entry, None, **how)
            entries.append(entry)
        return stream.add_and_norm(None, params["norm"], self.cfg, ctx)[1], tuple(entries)

    def head(self, params: Params, target: Target) -> Any:
        """Return the head [U, D]: the drafter's own, or the target's."""
        return params["head"] if self.own_head else target.params["embed" if target.cfg.tied else "head"]

    def pairs(self, params: Params, hidden: jax.Array, previous: jax.Array) -> tuple[jax.Array, jax.Array] | None:
        """Return the factors [..., R] and [U, R] of what the tokens before [...] add to the logits; None for nothing.

        `hidden` [..., D] are the states that the logits are made of. DFlash 2 adds it for the best candidates alone.
        """
        if self.selector:
            return self.selector.edges(params["selector"], hidden, previous)
        return self._markov(params, previous) if self.markov_rank else None

    def _markov(self, params: Params, previous: jax.Array) -> tuple[jax.Array, jax.Array]:
        return params["markov"]["w1"][previous], params["markov"]["w2"]
