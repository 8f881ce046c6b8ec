"""New special tokens for a model: in its tokenizer, and as rows of its embeddings and head.

A new row is the mean of those that are there, as the mean of what transformers' `resize_token_embeddings` draws: the
model then knows nothing of the token, and expects it as rarely as any other.

V vocabulary, D model dim.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp

from dovetail.core.errors import UserError
from dovetail.core.types import Params
from dovetail.io.tokenizer import Tokenizer
from dovetail.models.config import ModelConfig
from dovetail.models.registry import parse_config


def add_special_tokens(
    cfg: ModelConfig, params: Params, tokenizer: Tokenizer | None, tokens: Sequence[str]
) -> tuple[ModelConfig, Params, Tokenizer]:
    """Return the model with these tokens. Rows that a padded vocabulary has to spare are used first."""
    if tokenizer is None:
        raise UserError("special tokens are added to a tokenizer, and the model has none: add a tokenizer.json")
    if "per_layer" in params:
        raise UserError("special tokens cannot be added to a model with embeddings for each layer")
    before, grown = tokenizer.vocab_size, tokenizer.with_special_tokens(tokens)
    vocab = max(cfg.vocab, grown.vocab_size)
    cfg = parse_config(_resized(cfg, vocab), "the model with more tokens") if vocab > cfg.vocab else cfg
    tables = {name: _with_rows(params[name], before, vocab) for name in ("embed", "head") if name in params}
    return cfg, {**params, **tables}, grown


def _resized(cfg: ModelConfig, vocab: int) -> dict:
    hf = cfg.to_hf()
    inner = hf if "vocab_size" in hf else hf["text_config"]
    inner["vocab_size"] = vocab
    return hf


def _with_rows(table_VD: jnp.ndarray, known: int, vocab: int) -> jnp.ndarray:
    """Rows from `known` on are new."""
    known = min(known, len(table_VD))
    mean = table_VD[:known].astype(jnp.float32).mean(0).astype(table_VD.dtype)
    return jnp.concatenate([table_VD[:known], jnp.broadcast_to(mean, (vocab - known, len(mean)))])
