"""PlainDraft: a smaller model with the target's vocabulary that proposes tokens one after another."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from dovetail.core.errors import CheckpointError
from dovetail.core.types import Cache
from dovetail.models.config import Layer, ModelConfig
from dovetail.models.decoder import forward, unembed
from dovetail.models.draft.draft import Carried, DraftCall, Pick
from dovetail.models.spec import spec
from dovetail.ops.paged import token_rows

MOST = 63  # draft tokens of one call: as many as an engine verifies


@dataclass(frozen=True)
class PlainDraft:
    """Describe a separate draft model."""

    cfg: ModelConfig
    taps: tuple[int, ...] = ()
    feature_dim: int = 0
    most: int = MOST

    @property
    def layers(self) -> tuple[Layer, ...]:
        """Return the model's layers."""
        return self.cfg.layers

    def spec(self) -> dict[str, Any]:
        """Return the model's weights."""
        return spec(self.cfg)

    def absorb(self, call: DraftCall, tapped: jax.Array, carried: Carried | None) -> tuple[Cache, None]:
        """Compute the tokens' keys and values (see DraftModel.absorb)."""
        params, _, tokens, ctx, cache = call
        _, positions, _ = token_rows(ctx, tokens.shape[0])
        _, new = forward(params, self.cfg, tokens, positions, ctx, cache)
        assert new is not None
        return new, None

    def draft(self, call: DraftCall, carried: jax.Array | None, count: int, pick: Pick) -> tuple[jax.Array, Cache]:
        """Propose tokens (see DraftModel.draft)."""
        params, _, tokens, ctx, cache = call
        found = []
        for j in range(count):
            here = replace(ctx, kv_lens=ctx.kv_lens + j)
            hidden, new = forward(params, self.cfg, tokens, here.kv_lens - 1, here, cache)
            assert new is not None
            cache, tokens = new, pick(j, unembed(params, self.cfg, hidden))
            found.append(tokens)
        return jnp.stack(found), cache


def plain_draft(cfg: ModelConfig, target: ModelConfig, where: str) -> PlainDraft:
    """Return a model as the draft model of a target.

    Raises:
        CheckpointError: It has another vocabulary, or no head.
    """
    if cfg.scored or cfg.vocab != target.vocab:
        what = "a score instead of a head" if cfg.scored else f"a vocabulary of {cfg.vocab:,} tokens"
        raise CheckpointError(
            f"{where} must be a language model with the target's vocabulary of {target.vocab:,} tokens, got {what}",
            param="speculative_config.model",
        )
    return PlainDraft(cfg)
