"""EAGLE-3 (arXiv 2503.01840): layers that predict from a token and the target's hidden states before it.

With x^1, .., x^n the tapped layers' outputs at position q and t the tokens,

    g_q = fc [x^1_q; ..; x^n_q]
    h_q = layers(norm(embed(t_{q+1})), norm(g_q)),    logits of t_{q+2} = head(norm(h_q))

The first layer's queries, keys and values are computed from both halves, its residual stream is g. Past the newest
token g is not known, and h of the step before takes its place.

T tokens of a call, S sequences, D the target's dim, d the draft's, V and v their vocabularies.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from dovetail.core.errors import CheckpointError
from dovetail.core.spec import ParamSpec, tree_map
from dovetail.core.types import Cache, Context, Paged, Params
from dovetail.models.block import Residual, Table, block, feed_forward, norm
from dovetail.models.config import Attention, Layer, ModelConfig
from dovetail.models.decoder import embed, unembed
from dovetail.models.draft.check import check_size, check_taps, check_verifier
from dovetail.models.draft.declare import declare, declare_norm, declare_tokens, in_target_vocab, without_model
from dovetail.models.draft.draft import Carried, DraftCall, Pick, Target
from dovetail.models.draft.shift import MOST, features_before, of_rows, shifted
from dovetail.models.family import Fields
from dovetail.models.registry import family_of, parse_config
from dovetail.models.spec import layer_spec
from dovetail.ops.linear import matmul
from dovetail.ops.norm import rms_norm
from dovetail.ops.paged import token_rows


@dataclass(frozen=True)
class Eagle3:
    """Describe an EAGLE-3 draft model.

    Attributes:
        cfg: Its layers, as an ordinary model's; its vocabulary is the target's.
        target_dim: D.
        vocab: v, the tokens that it can draft.
        taps: The target's layers that it reads, from 0.
        norm_before_residual: The residual stream is the norm of g.
        norm_before_fc: The taps side by side are normed.
        fc_norm: Each tap is normed by itself.
        norm_output: A step passes on the norm of h, not h.
        shared: What the checkpoint leaves to the target: some of `may_share`.
    """

    cfg: ModelConfig
    target_dim: int
    vocab: int
    taps: tuple[int, ...]
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    shared: tuple[str, ...] = ()

    @property
    def may_share(self) -> tuple[str, ...]:
        """Return the weights that may be the target's."""
        if self.cfg.dim != self.target_dim:
            return ()
        return ("embed",) if self.is_reduced else ("embed", "head")

    @property
    def is_reduced(self) -> bool:
        """Return whether it drafts from a part of the target's vocabulary."""
        return self.vocab != self.cfg.vocab

    @property
    def layers(self) -> tuple[Layer, ...]:
        """Return the layers that keep pages."""
        return self.cfg.layers

    @property
    def feature_dim(self) -> int:
        """Return the width of g."""
        return self.cfg.dim

    @property
    def most(self) -> int:
        """Return the most draft tokens of one call."""
        return MOST

    # --- weights ------------------------------------------------------------------------------------------------------

    def spec(self) -> dict[str, Any]:
        """Return the draft model's own weights as ParamSpecs."""
        d, wide = self.cfg.dim, len(self.taps) * self.target_dim
        tree: dict[str, Any] = {
            "fc": declare("fc.weight", (d, wide), (None, "embed")),
            "layers": tuple(self._layer_spec(i) for i in range(len(self.layers))),
            "norm": declare_norm("norm.weight", d),
            "embed": declare("embed_tokens.weight", (self.cfg.vocab, d), ("vocab", "embed"), active=0.0),
            "head": declare("lm_head.weight", (self.vocab, d), ("vocab", "embed")),
        }
        if self.norm_before_fc:
            tree["input_norm"] = declare_norm("input_norm.weight", wide)
        if self.fc_norm:
            names = [f"fc_norm.{i}.weight" for i in range(len(self.taps))]
            tree["fc_norm"] = tuple(declare_norm(name, self.target_dim) for name in names)
        if self.is_reduced:
            tree["d2t"] = declare_tokens("d2t", self.vocab)
        return {key: leaf for key, leaf in tree.items() if key not in self.shared}

    def _layer_spec(self, i: int) -> dict[str, Any]:
        layer = self.layers[i]
        tree = tree_map(without_model, layer_spec(self.cfg, family_of(self.cfg), layer, i))
        if i == 0:
            wide = {x: _widened(tree["attn"][x]) for x in layer.attn.projections}
            hidden_norm = declare_norm("layers.0.hidden_norm.weight", self.cfg.dim)
            tree |= {"attn": tree["attn"] | wide, "hidden_norm": hidden_norm}
        return tree

    # --- the forward --------------------------------------------------------------------------------------------------

    def absorb(self, call: DraftCall, tapped: jax.Array, carried: Carried | None) -> tuple[Cache, jax.Array | None]:
        """Follow a call of the target (see `DraftModel.absorb`).

        Of the last layer only the keys and values are used: XLA removes the rest.
        """
        assert carried is not None
        params, target, tokens, ctx, cache = call
        features = self.features(params, tapped)
        moved, index = shifted(ctx, len(tokens), jnp.where(carried.known, 0, 1))
        before = features_before(ctx, index, features, carried.feature)
        _, cache = self._run(params, target, tokens[index], before, moved, cache)
        return cache, features

    def draft(self, call: DraftCall, carried: jax.Array | None, count: int, pick: Pick) -> tuple[jax.Array, Cache]:
        """Propose tokens (see `DraftModel.draft`)."""
        assert carried is not None
        params, target, tokens, ctx, cache = call
        moved, index = shifted(ctx, len(tokens), jnp.zeros_like(ctx.kv_lens))
        hidden, drafted = carried, []
        for j in range(count):
            here = dataclasses.replace(moved, kv_lens=moved.kv_lens + j)
            hidden, cache = self._run(params, target, tokens[index], hidden[index], here, cache)
            hidden = of_rows(moved, hidden)
            normed = norm(params["norm"], self.cfg, hidden)
            tokens = pick(j, self._logits(params, target, normed))
            hidden = normed if self.norm_output else hidden
            drafted.append(tokens)
        return jnp.stack(drafted), cache

    def features(self, params: Params, tapped: jax.Array) -> jax.Array:
        """Return g [T, d] of the taps side by side [T, n * D]."""
        if self.norm_before_fc:
            tapped = rms_norm(tapped, params["input_norm"], self.cfg.norm_eps)
        if self.fc_norm:
            parts = jnp.split(tapped, len(self.taps), axis=-1)
            normed = [rms_norm(x, w, self.cfg.norm_eps) for x, w in zip(parts, params["fc_norm"], strict=True)]
            tapped = jnp.concatenate(normed, axis=-1)
        return matmul(tapped, params["fc"])

    def _run(
        self, params: Params, target: Target, tokens: jax.Array, hidden: jax.Array, ctx: Paged, cache: Cache
    ) -> tuple[jax.Array, Cache]:
        """Run the layers for pairs of tokens [T] and hidden states [T, d]; return the next hidden states."""
        embedding = self._embed(params, target, tokens, ctx)
        positions = token_rows(ctx, len(tokens))[1]
        stream, entries = Residual(hidden), []
        for i, (p, layer, entry) in enumerate(zip(params["layers"], self.layers, cache, strict=True)):
            table = layer.attn.rope.tables(positions) if layer.attn.rope else ()
            if i == 0:
                stream, entry = self.first_layer(p, embedding, hidden, table, ctx, entry)
            else:
                stream, entry, _ = block(p, stream, table, ctx, entry, None, None, cfg=self.cfg, layer=layer)
            entries.append(entry)
        return stream.x if stream.pending is None else stream.x + stream.pending, tuple(entries)

    def first_layer(
        self, p: Params, embedding: jax.Array, hidden: jax.Array, table: Table, ctx: Context, entry: Any
    ) -> tuple[Residual, Any]:
        """Run the layer that reads a token's embedding [..., d] beside the hidden states [..., d]."""
        cfg, layer = self.cfg, self.layers[0]
        normed = norm(p["hidden_norm"], cfg, hidden)
        both = jnp.concatenate([norm(p["attn_norm"], cfg, embedding), normed], axis=-1)
        x, entry = layer.attn(p["attn"], both, table, ctx, entry, cfg.norm_eps, cfg.norm_offset)
        stream = Residual(normed if self.norm_before_residual else hidden)
        stream, x = stream.add_and_norm(layer.attn.merge(p["attn"], x), p["mlp_norm"], cfg, ctx)
        x, _ = feed_forward(p, cfg, layer, stream.x, x, ctx)
        return Residual(stream.x, x), entry

    def _embed(self, params: Params, target: Target, tokens: jax.Array, ctx: Paged) -> jax.Array:
        if "embed" in self.shared:
            return embed(target.params, target.cfg, tokens, ctx.placement)
        return embed(params, self.cfg, tokens, ctx.placement)

    def _logits(self, params: Params, target: Target, hidden: jax.Array) -> jax.Array:
        """Return the logits [S, V] of normed hidden states [S, d]; minus infinity for tokens that it cannot draft."""
        if "head" in self.shared:
            return unembed(target.params, target.cfg, hidden)
        logits = matmul(hidden, params["head"], out_dtype=jnp.float32)
        return in_target_vocab(logits, params["d2t"], self.cfg.vocab) if self.is_reduced else logits


def _widened(leaf: ParamSpec) -> ParamSpec:
    """Return the spec of a projection whose input is a token's embedding and a hidden state."""
    stored = dataclasses.replace(leaf.stored, shape=(*leaf.stored.shape[:-1], 2 * leaf.stored.shape[-1]))
    return dataclasses.replace(leaf, shape=(*leaf.shape[:-1], 2 * leaf.shape[-1]), stored=stored)


# --- config.json ------------------------------------------------------------------------------------------------------

TAPS = "eagle_aux_hidden_state_layer_ids"
SWITCHES = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
BESIDE = ("speculators_config", "speculators_model_type", "speculators_version", "embed_requires_grad",
          "has_no_defaults_at_init", "transformer_layer_config", "tie_word_embeddings")  # fmt: skip
# what converters left in configs of the original format; the windows count only with use_sliding_window
LEFT_OVER = ("target_model_type", "modal_type", "max_window_layers", "sliding_window", "use_sliding_window")


def parse_eagle3(hf: dict[str, Any], target: ModelConfig, where: str) -> Eagle3:
    """Parse a config.json of `speculators`, or of the original format, which has the layer's fields beside the rest."""
    check_verifier(hf, target, where)
    own = hf if "speculators_model_type" in hf else {k: hf[k] for k in _OPTIONS if k in hf}
    f = Fields(own, where)
    f.skip(*BESIDE)
    cfg = _layers_config(hf, where)
    target_dim = f.get("target_hidden_size", cfg.dim)
    check_size("hidden_size", target_dim, target.dim, where)
    check_size("vocab_size", cfg.vocab, target.vocab, where)
    vocab = f.get("draft_vocab_size", cfg.vocab)
    if not 0 < vocab <= target.vocab:
        raise CheckpointError(
            f"{where}: draft_vocab_size must be at most the target's {target.vocab}, got {vocab}",
            param="draft_vocab_size",
        )
    switches = {name: f.get(name, False) for name in SWITCHES}
    draft = Eagle3(cfg, target_dim, vocab, check_taps(TAPS, _taps(f, target), target, where), **switches)
    f.done()
    return draft


_OPTIONS = ("draft_vocab_size", "target_hidden_size", "eagle_config", TAPS, *SWITCHES)


def _layers_config(hf: dict[str, Any], where: str) -> ModelConfig:
    """Return the layers of the draft model as a ModelConfig."""
    if "speculators_model_type" in hf:
        layers = hf.get("transformer_layer_config") or {}
    else:
        left_over = () if hf.get("use_sliding_window") else LEFT_OVER
        layers = {k: v for k, v in hf.items() if k not in (*_OPTIONS, *left_over)}
        layers["model_type"] = "llama"
    cfg = parse_config(layers, where)
    first = cfg.layers[0]
    if not isinstance(first.attn, Attention) or first.mlp is None or first.moe or first.post_norm or cfg.norm_offset:
        raise CheckpointError(f"{where}: the layers of EAGLE-3 must be Llama's or Qwen3's", param="model_type")
    return cfg


def _taps(f: Fields, target: ModelConfig) -> list[int]:
    """Return the layers whose outputs are read, from 0. `speculators` and vLLM count from 1, SpecForge from 0."""
    inside = f.get("eagle_config", {}).get(TAPS)
    count = len(target.layers)
    return list(inside) if inside else [i - 1 for i in f.get(TAPS, None) or (2, count // 2, count - 3)]
