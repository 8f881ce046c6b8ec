"""Multi-token prediction as a draft model; its equations and weights are those of models.mtp.

The layer of depth k has at entry i of its pages the pair (h^{k-1}_i, t_{i+k}). A token at position q therefore writes
entry q - k of depth k, from h^{k-1} at the same place, which the token before computed: the feature of a token is

    [h^0_q; h^1_{q-1}; ..; h^{K-1}_{q-K+1}]

with h^0 the target's final norm's output and K the number of depths. To draft more than K tokens, the last depth runs
on its own output. A state that is not known is zero: after a prefix hit the first token lacks h^1 to h^{K-1}, the next
one h^2 to h^{K-1}, and so on. Depth k then keeps the entries that are in the pages.

T tokens of a call, S sequences, D the target's dim.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from dovetail.core.errors import CheckpointError, UnsupportedError
from dovetail.core.spec import ParamSpec, tree_map
from dovetail.core.types import Cache, Paged, Params
from dovetail.models.config import Layer, ModelConfig
from dovetail.models.decoder import embed, unembed
from dovetail.models.draft.check import check_size, check_verifier
from dovetail.models.draft.draft import Carried, DraftCall, Pick, Target
from dovetail.models.draft.shift import MOST, features_before, of_rows, shifted
from dovetail.models.mtp import mtp_depth, mtp_layer, mtp_spec, mtp_step
from dovetail.models.registry import parse_config
from dovetail.ops.paged import token_rows

NEXTN, QWEN, SPECULATORS = "nextn", "qwen", "speculators"
# the names of other formats by DeepSeek's and GLM's; "" is the prefix of the block's own
NAMES = {
    QWEN: {
        "enorm": "mtp.pre_fc_norm_embedding",
        "hnorm": "mtp.pre_fc_norm_hidden",
        "eh_proj": "mtp.fc",
        "shared_head.norm": "mtp.norm",
        "": "mtp.layers.0.",
    },
    SPECULATORS: {
        "enorm": "mtp_layers.0.token_layernorm",
        "hnorm": "mtp_layers.0.hidden_layernorm",
        "eh_proj": "mtp_layers.0.input_proj",
        "shared_head.norm": "mtp_layers.0.final_layernorm",
        "": "mtp_layers.0.",
    },
}


@dataclass(frozen=True)
class Mtp:
    """Describe the layers of multi-token prediction of a target.

    Attributes:
        cfg: The target.
        names: The tensor names: NEXTN (DeepSeek, GLM), QWEN or SPECULATORS.
    """

    cfg: ModelConfig
    names: str = NEXTN

    def __post_init__(self):
        if self.names != NEXTN and self.depth > 1:
            raise UnsupportedError(f"{self.depth} MTP layers are supported under DeepSeek's tensor names only")

    @functools.cached_property
    def depth(self) -> int:
        """Return the number of layers."""
        return mtp_depth(self.cfg)

    @property
    def taps(self) -> tuple[int, ...]:
        """Return the tap of the final norm's output."""
        return (len(self.cfg.layers),)

    @property
    def layers(self) -> tuple[Layer, ...]:
        """Return the layers that keep pages."""
        return (mtp_layer(self.cfg),) * self.depth

    @property
    def feature_dim(self) -> int:
        """Return the width of the hidden states that are carried: one per depth."""
        return self.depth * self.cfg.dim

    @property
    def most(self) -> int:
        """Return the most draft tokens of one call."""
        return MOST

    def spec(self) -> dict[str, Any]:
        """Return the weights under `mtp`, as in a model that is trained with them."""
        specs, at = mtp_spec(self.cfg), f"model.layers.{len(self.cfg.layers)}."
        if self.names != NEXTN:
            specs = tree_map(lambda leaf: _renamed(leaf, at, NAMES[self.names]), specs)
        return {"mtp": specs}

    def absorb(self, call: DraftCall, tapped: jax.Array, carried: Carried | None) -> tuple[Cache, jax.Array | None]:
        """Follow a call of the target (see `DraftModel.absorb`)."""
        assert carried is not None
        params, target, tokens, ctx, cache = call
        states, entries, drop = [tapped], [], jnp.zeros_like(ctx.kv_lens)
        for k, before in enumerate(jnp.split(carried.feature, self.depth, axis=-1), start=1):
            # without the state before the first token, a depth lacks its input for one token more than the depth above
            drop = jnp.where(carried.known & _is_known(before), 0, drop + 1)
            moved, index = shifted(ctx, len(tokens), drop, by=k)
            hidden = features_before(ctx, index, states[-1], before)
            hidden, entry = self._step(params, target, k - 1, tokens[index], hidden, moved, cache[k - 1])
            real = token_rows(moved, len(tokens))[2]
            places = jnp.where(real, index, len(tokens))
            states.append(jnp.zeros_like(tapped).at[places].set(hidden, mode="drop"))
            entries.append(entry)
        return tuple(entries), jnp.concatenate(states[: self.depth], axis=-1)

    def draft(self, call: DraftCall, carried: jax.Array | None, count: int, pick: Pick) -> tuple[jax.Array, Cache]:
        """Propose tokens (see `DraftModel.draft`)."""
        assert carried is not None
        params, target, tokens, ctx, cache = call
        last, entries, drafted = self.depth - 1, list(cache), []
        inputs = dict(enumerate(jnp.split(carried, self.depth, axis=-1)))  # of each depth, for the newest token
        for j in range(count):
            here = dataclasses.replace(ctx, kv_lens=ctx.kv_lens + j)
            outputs = {}
            for k in range(min(j, last), self.depth):
                known = _is_known(inputs[k])
                moved, index = shifted(here, len(tokens), 1 - known, by=k + 1)
                hidden, entries[k] = self._step(params, target, k, tokens[index], inputs[k][index], moved, entries[k])
                outputs[k] = jnp.where(known[:, None], of_rows(moved, hidden), 0)
            tokens = pick(j, unembed(target.params, target.cfg, outputs[min(j, last)]))
            drafted.append(tokens)
            # each depth's output is the next one's input for the next token; the last one's, alone, is its own
            inputs = {min(k + 1, last): outputs[k] for k in reversed(outputs)}
        return jnp.stack(drafted), tuple(entries)

    def _step(
        self, params: Params, target: Target, k: int, tokens: jax.Array, hidden: jax.Array, ctx: Paged, entry: Any
    ) -> tuple[jax.Array, Any]:
        """Run one depth for tokens [T] and hidden states [T, D]; return the next hidden states and the pages."""
        positions = token_rows(ctx, len(tokens))[1]
        embedding = embed(target.params, target.cfg, tokens, ctx.placement)
        if self.names == NEXTN:  # as in vLLM: the first pair of a sequence has no token
            embedding = jnp.where(positions[:, None] == 0, 0, embedding)
        hidden, entry, _ = mtp_step(params["mtp"][k], self.cfg, embedding, hidden, positions, ctx, entry)
        return hidden, entry


def _is_known(states: jax.Array) -> jax.Array:
    """Return whether each of the states [S, D] is known."""
    return jnp.any(states != 0, axis=-1)


def _renamed(leaf: ParamSpec, prefix: str, names: dict[str, str]) -> ParamSpec:
    """Return the spec under another format's tensor names."""

    def one(name: str) -> str:
        own = name.removeprefix(prefix)
        module = own.removesuffix(".weight")
        return f"{names[module]}.weight" if module in names else names[""] + own

    return dataclasses.replace(leaf, stored=dataclasses.replace(leaf.stored, names=tuple(map(one, leaf.stored.names))))


def native_names(tensors: Iterable[str]) -> str | None:
    """Return the format of the MTP layers among a model's own tensors; None if it has none."""
    for name in tensors:
        if re.fullmatch(r"model\.layers\.\d+\.eh_proj\.weight", name):
            return NEXTN
        if name == "mtp.fc.weight":
            return QWEN
    return None


def parse_mtp(hf: dict[str, Any], target: ModelConfig, where: str) -> Mtp:
    """Parse the config of MTP layers in the format of `speculators`."""
    check_verifier(hf, target, where)
    cfg = parse_config(hf.get("transformer_layer_config") or {}, f"{where}: transformer_layer_config")
    check_size("hidden_size", cfg.dim, target.dim, where)
    check_size("vocab_size", cfg.vocab, target.vocab, where)
    if mtp_layer(cfg) != mtp_layer(target):
        raise CheckpointError(
            f"{where} is a draft for another model: its layer is not like the target's last one",
            param="transformer_layer_config",
        )
    return Mtp(target, SPECULATORS)
