"""Describe a new drafter: its config.json in the format of `speculators`, and which of its weights are trained."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
import numpy as np

from dovetail.core.errors import UserError
from dovetail.core.types import Params
from dovetail.io.hub import name_for_others
from dovetail.models.attention import Attention
from dovetail.models.config import ModelConfig
from dovetail.models.draft.dflash_config import DFLASH2
from dovetail.models.draft.draft import DraftModel
from dovetail.models.draft.registry import parse_draft
from dovetail.ops.rope import Rope
from dovetail.tune.draft_sections import BLOCKS, DrafterSettings

NAMES = {
    "dspark": "DSparkSpeculator", "dflash": "DFlashSpeculator", "dflash2": "DFlash2Speculator",
    "eagle3": "Eagle3Speculator", "mtp": "MTPDraftModel",
}  # fmt: skip
EXACT = {"verifier_accept_k": 1, "accept_tolerance": 0.0}  # a draft token is accepted if it is the target's
HEAD_DIM = 128  # where the target's attention has no heads to copy (MLA)
GIVEN = ("head", "d2t")  # weights that come from the target


@dataclass(frozen=True)
class NewDraft:
    """Hold a draft model that is trained."""

    model: DraftModel
    given: tuple[str, ...]  # entries of its spec that come from the target

    def trained_spec(self) -> dict[str, Any]:
        """Return the specs of the trained weights."""
        return {name: part for name, part in self.model.spec().items() if name not in self.given}


def new_draft(config: dict[str, Any], target: ModelConfig) -> NewDraft:
    """Return the draft model that a config.json (see `draft_config`) describes."""
    model: Any = parse_draft(config, target, "the new drafter")
    if shared := getattr(model, "may_share", ()):
        model = replace(model, shared=shared)
    return as_new(model)


def as_new(model: DraftModel) -> NewDraft:
    """Return a draft model as one that is trained."""
    return NewDraft(model, tuple(name for name in GIVEN if name in model.spec()))


def draft_config(wanted: DrafterSettings, target: ModelConfig, weights: str, vocab: int = 0) -> dict[str, Any]:
    """Return the drafter's config.json.

    Args:
        wanted: The drafter.
        target: The model that it drafts for.
        weights: The folder or name of the target's weights.
        vocab: The tokens that it knows; 0 for all.
    """
    count = wanted.num_speculative_tokens
    common = {
        "architectures": [NAMES[wanted.kind]],
        "speculators_model_type": wanted.kind,
        "transformer_layer_config": target.to_hf() if wanted.kind == "mtp" else _layers(wanted, target),
        "draft_vocab_size": vocab or target.vocab,
        "tie_word_embeddings": False,
        "speculators_config": {
            "algorithm": wanted.kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": count} | EXACT],
            "verifier": {
                "name_or_path": name_for_others(weights),
                "architectures": target.to_hf()["architectures"],
            },
        },
    }
    return common | _of_kind(wanted, target)


def _of_kind(wanted: DrafterSettings, target: ModelConfig) -> dict[str, Any]:
    if wanted.kind == "mtp":
        return {"num_nextn_predict_layers": 1}
    ids = [tap + 1 for tap in tap_layers(wanted, target)]
    if wanted.kind == "eagle3":
        return {"eagle_aux_hidden_state_layer_ids": ids, "norm_before_residual": True}
    mask = target.vocab - 1 if wanted.mask_token_id < 0 else wanted.mask_token_id
    from_anchor = wanted.kind == "dspark"
    block = {
        "block_size": wanted.num_speculative_tokens + (not from_anchor),
        "mask_token_id": mask,
        "aux_hidden_state_layer_ids": ids,
        "sample_from_anchor": from_anchor,
        "sliding_window_non_causal": False,
    }
    if wanted.kind == "dflash2":
        return block | DFLASH2 | {"selector_rank": wanted.markov_rank}
    if not from_anchor:
        return block
    head = {"markov_rank": wanted.markov_rank, "markov_head_type": "vanilla"}
    return block | head | {"enable_confidence_head": False, "confidence_head_with_markov": False}


def tap_layers(wanted: DrafterSettings, target: ModelConfig) -> tuple[int, ...]:
    """Return the layers to tap: the given ones, or an early, a middle and a late one."""
    depth = len(target.layers)
    taps = wanted.taps or tuple(sorted({min(1, depth - 1), max(0, depth // 2 - 1), max(0, depth - 4)}))
    outside = [tap for tap in taps if not 0 <= tap < depth]
    if outside or len(set(taps)) != len(taps):
        raise UserError(
            f"`drafter.taps` must be different layers from 0 to {depth - 1}, got {list(taps)}", param="drafter.taps"
        )
    return taps


def _layers(wanted: DrafterSettings, target: ModelConfig) -> dict[str, Any]:
    """Return the config of the drafter's layers: as wide as the target's last one, and with its rotation."""
    layer, dim = target.layers[-1], target.dim
    attn, mlp = layer.attn, layer.mlp
    if isinstance(attn, Attention):
        heads = dict(head_dim=attn.head_dim, num_attention_heads=attn.heads, num_key_value_heads=attn.kv_heads)
    else:
        number = max(1, dim // HEAD_DIM)
        heads = dict(head_dim=HEAD_DIM, num_attention_heads=number, num_key_value_heads=number)
    rope: Rope | None = next((each.attn.rope for each in target.layers if each.attn.rope), None)
    return heads | {
        "model_type": "qwen3" if wanted.kind in BLOCKS else "llama",
        "hidden_size": dim,
        "intermediate_size": mlp.width if mlp else 3 * dim,
        "num_hidden_layers": wanted.layers,
        "vocab_size": target.vocab,
        "max_position_embeddings": target.max_len,
        "rms_norm_eps": target.norm_eps,
        "rope_theta": rope.theta if rope else 10_000.0,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
    }


def with_given(new: NewDraft, trained: Params, head: Any, ids: Sequence[int]) -> Params:
    """Return all weights of the drafter: the trained ones, and rows of the target's head with their numbers."""
    rows = np.asarray(ids, np.int32)
    offsets = rows - np.arange(len(rows), dtype=np.int32)
    return trained | {name: {"head": jnp.asarray(head)[rows], "d2t": offsets}[name] for name in new.given}
