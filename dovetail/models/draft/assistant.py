"""The Gemma 4 assistant: a few layers that read the target's own keys and values.

With E the target's embedding, t_n the newest token and s_0 the target's final hidden state before it, step j is

    h_j = norm(layers(pre_projection [E(t_{n+j}); s_j]))
    logits of t_{n+j+1} = head(h_j),    s_{j+1} = post_projection(h_j)

The layers have queries alone: each attends to the pages of the target's last layer of its type (sliding or full) that
has keys and values of its own, from the position n in every step. So the assistant keeps no pages. The definition is
that of `gemma4_assistant` and `gemma4_unified_assistant` in transformers.

A clustered head scores C centroids and computes the logits of the tokens of the best k clusters alone.

S sequences, D the target's dim, d the assistant's, V the vocabulary.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from dovetail.core.errors import CheckpointError, UnsupportedError
from dovetail.core.types import Cache, Paged, Params
from dovetail.models.block import Residual, block
from dovetail.models.config import Attention, Layer, ModelConfig
from dovetail.models.decoder import embed, unembed
from dovetail.models.draft.check import check_size
from dovetail.models.draft.declare import declare, declare_tokens
from dovetail.models.draft.draft import Carried, DraftCall, Pick, Target
from dovetail.models.draft.shift import MOST
from dovetail.models.family import Fields
from dovetail.models.registry import parse_config
from dovetail.models.spec import spec
from dovetail.models.towers.gemma4 import skip_other_media
from dovetail.models.towers.gemma4_unified import as_gemma4
from dovetail.ops.linear import matmul

UNIFIED = "gemma4_unified_assistant"  # the model type of the assistant of Gemma 4 12B


@dataclass(frozen=True)
class Clusters:
    """Describe a clustered head: C clusters of V / C tokens, of which `chosen` are scored."""

    count: int
    chosen: int

    def spec(self, vocab: int, dim: int) -> dict[str, Any]:
        """Return the weights."""
        return {
            "centroids": declare("masked_embedding.centroids.weight", (self.count, dim), (None, "embed")),
            "tokens": declare_tokens("masked_embedding.token_ordering", vocab),
        }

    def logits(self, p: Params, head: jax.Array, hidden: jax.Array) -> jax.Array:
        """Return the logits [S, V] of hidden states [S, d], minus infinity outside of the chosen clusters."""
        _, best = jax.lax.top_k(matmul(hidden, p["centroids"], out_dtype=jnp.float32), self.chosen)
        ids = p["tokens"].reshape(self.count, -1)[best].reshape(len(hidden), -1)
        values = jnp.einsum("sd,snd->sn", hidden, head[ids], preferred_element_type=jnp.float32)
        everywhere = jnp.full((len(hidden), head.shape[0]), -jnp.inf)
        return everywhere.at[jnp.arange(len(hidden))[:, None], ids].set(values)


@dataclass(frozen=True)
class Assistant:
    """Describe a Gemma 4 assistant.

    Attributes:
        cfg: Its layers; `kv_from` of each is a layer of the target. The embedding is the head.
        target_dim: D.
        taps: The tap of the target's final norm's output.
        clusters: The clusters of its head; None for a dense one.
    """

    cfg: ModelConfig
    target_dim: int
    taps: tuple[int, ...]
    clusters: Clusters | None = None

    layers = ()  # none keeps pages
    most = MOST
    unused = (r"lm_head\.weight",)  # a copy of the embedding

    @property
    def feature_dim(self) -> int:
        """Return the width of the target's hidden state."""
        return self.target_dim

    def spec(self) -> dict[str, Any]:
        """Return the assistant's weights, with their published names."""
        d, D = self.cfg.dim, self.target_dim
        tree = spec(self.cfg) | {
            "pre_projection": declare("pre_projection.weight", (d, 2 * D), ("embed", None)),
            "post_projection": declare("post_projection.weight", (D, d), (None, "embed")),
        }
        return tree | {"clusters": self.clusters.spec(self.cfg.vocab, d)} if self.clusters else tree

    def absorb(self, call: DraftCall, tapped: jax.Array, carried: Carried | None) -> tuple[Cache, jax.Array | None]:
        """Return the target's hidden states: nothing is stored (see `DraftModel.absorb`)."""
        return (), tapped

    def draft(self, call: DraftCall, carried: jax.Array | None, count: int, pick: Pick) -> tuple[jax.Array, Cache]:
        """Propose tokens (see `DraftModel.draft`)."""
        assert carried is not None
        params, target, tokens, ctx, _ = call
        hidden, drafted = carried, []
        for j in range(count):
            both = jnp.concatenate([embed(target.params, target.cfg, tokens, ctx.placement), hidden], axis=-1)
            normed = self._run(params, target, matmul(both, params["pre_projection"]), ctx)
            tokens, hidden = pick(j, self._logits(params, normed)), matmul(normed, params["post_projection"])
            drafted.append(tokens)
        return jnp.stack(drafted), ()

    def _run(self, params: Params, target: Target, x: jax.Array, ctx: Paged) -> jax.Array:
        """Run the layers on x [S, d] at the newest tokens' positions, which have no keys yet; return the final norm."""
        newest = ctx.kv_lens - 1
        before = dataclasses.replace(ctx, kv_lens=jnp.maximum(newest, 0))
        stream = Residual(x)
        for p, layer in zip(params["layers"], self.cfg.layers, strict=True):
            assert layer.attn.kv_from is not None and layer.attn.rope is not None
            table, entry = layer.attn.rope.tables(newest), target.cache[layer.attn.kv_from]
            stream, _, _ = block(p, stream, table, before, entry, None, None, cfg=self.cfg, layer=layer)
        return stream.add_and_norm(None, params["norm"], self.cfg, ctx)[1]

    def _logits(self, params: Params, hidden: jax.Array) -> jax.Array:
        if self.clusters:
            return self.clusters.logits(params["clusters"], params["embed"], hidden)
        return unembed(params, self.cfg, hidden)


# --- config.json ------------------------------------------------------------------------------------------------------


def parse_assistant(hf: dict[str, Any], target: ModelConfig, where: str) -> Assistant:
    """Parse the config.json of a Gemma 4 assistant."""
    f = Fields(hf, where)
    f.skip("text_config", "image_token_id")
    skip_other_media(f)
    f.only("tie_word_embeddings", True)
    check_size("backbone_hidden_size", f.get("backbone_hidden_size"), target.dim, where)
    cfg = _layers(hf, where)
    check_size("vocab_size", cfg.vocab, target.vocab, where)
    clusters = Clusters(f.get("num_centroids", 2048), f.get("centroid_intermediate_top_k", 32))
    if clustered := f.get("use_ordered_embeddings", False):
        _check_clusters(clusters, cfg.vocab, where)
    f.done()
    layers = tuple(_reading(layer, target, where) for layer in cfg.layers)
    cfg = dataclasses.replace(cfg, layers=layers)
    return Assistant(cfg, target.dim, (len(target.layers),), clusters if clustered else None)


def _layers(hf: dict[str, Any], where: str) -> ModelConfig:
    """Return the assistant as an ordinary Gemma 4."""
    text = hf.get("text_config") or {}
    count, shared = text.get("num_hidden_layers"), text.get("num_kv_shared_layers") or 0
    if shared not in (0, count):  # transformers takes 0 for all
        raise UnsupportedError(
            f"{where}: `num_kv_shared_layers` must be all {count} layers, got {shared}", param="num_kv_shared_layers"
        )
    text = as_gemma4(text) if hf["model_type"] == UNIFIED else text
    cfg = parse_config(text | {"num_kv_shared_layers": 0, "tie_word_embeddings": True}, f"{where}: text_config")
    if cfg.family != "gemma4_text" or any(layer.moe or layer.per_layer_dim for layer in cfg.layers):
        raise UnsupportedError(
            f"{where}: the layers of an assistant must be those of a dense Gemma 4, without embeddings per layer",
            param="text_config",
        )
    return cfg


def _check_clusters(clusters: Clusters, vocab: int, where: str) -> None:
    if vocab % clusters.count:
        raise CheckpointError(
            f"{where}: `num_centroids` must divide vocab_size={vocab}, got {clusters.count}", param="num_centroids"
        )
    if not 0 < clusters.chosen <= clusters.count:
        raise CheckpointError(
            f"{where}: `centroid_intermediate_top_k` must be 1 to {clusters.count}, got {clusters.chosen}",
            param="centroid_intermediate_top_k",
        )


def _reading(layer: Layer, target: ModelConfig, where: str) -> Layer:
    """Return the layer with the keys and values of the target's last layer of its type that has its own."""
    own = layer.attn
    assert isinstance(own, Attention)
    found = {
        i: each.attn
        for i, each in enumerate(target.layers)
        if isinstance(each.attn, Attention) and each.attn.kv_from is None and bool(each.attn.window) == bool(own.window)
    }
    if not found:
        kind = "sliding" if own.window else "full"
        raise CheckpointError(
            f"{where} is a draft for another model: the target has no layer of {kind} attention", param="layer_types"
        )
    donor = max(found)
    for field, key in (("kv_heads", "num_key_value_heads"), ("head_dim", "head_dim"), ("rope", "rope_parameters")):
        if getattr(own, field) != getattr(found[donor], field):
            raise CheckpointError(
                f"{where} is a draft for another model: {key} of its layers is not that of the target's layer {donor}",
                param=key,
            )
    return dataclasses.replace(layer, attn=dataclasses.replace(own, kv_from=donor))
