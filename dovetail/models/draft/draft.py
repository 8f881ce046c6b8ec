"""DraftModel: the interface of drafters that have weights.

A draft model follows the target: after every call of the target, `absorb` is given the tokens of the call and the
outputs of the layers that it taps, and writes what it will need of them into pages of its own. These have the page
tables of the target, so that a prefix hit finds them too. `draft` then proposes the tokens after the newest one.

A draft token is accepted only if the target samples it, so nothing here can change an output.

T tokens of a call, S sequences, D the target's dim, V its vocabulary, F the width of a feature, n the position of a
sequence's newest token, which the target has not computed yet.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax

from dovetail.core.types import Cache, Paged, Params
from dovetail.models.config import Layer, ModelConfig

Pick = Callable[[int, jax.Array], jax.Array]  # (j, logits [S, V] f32) -> the draft tokens [S] of position n + 1 + j


class Target(NamedTuple):
    """Hold the model that draft tokens are for; a draft model may use its embedding, its head and its pages."""

    params: Params
    cfg: ModelConfig
    cache: Cache = ()  # its pages, with the tokens before the newest; only `draft` is given them


class DraftCall(NamedTuple):
    """Hold what every call of a draft model is given."""

    params: Params  # the draft model's weights
    target: Target
    tokens: jax.Array
    ctx: Paged
    cache: Cache  # the draft model's pages


class Carried(NamedTuple):
    """Hold the feature of the token before each row's first one, which an earlier call computed."""

    feature: jax.Array  # [S, F]
    known: jax.Array  # [S] bool; False after a prefix hit


class DraftModel(Protocol):
    """Describe a draft model. Hashable: it is a static argument of every step."""

    @property
    def taps(self) -> tuple[int, ...]:
        """Return the target's layers whose outputs are read, from 0; len(cfg.layers) is the final norm's output."""
        ...

    @property
    def layers(self) -> tuple[Layer, ...]:
        """Return the layers that keep pages, one entry of the cache each."""
        ...

    @property
    def feature_dim(self) -> int:
        """Return F, the width of the feature that is carried from a sequence's last computed token; 0 for none."""
        ...

    @property
    def most(self) -> int:
        """Return the most draft tokens of one call."""
        ...

    def spec(self) -> dict[str, Any]:
        """Return the tree of the draft model's own weights as ParamSpecs."""
        ...

    def absorb(self, call: DraftCall, tapped: jax.Array, carried: Carried | None) -> tuple[Cache, jax.Array | None]:
        """Follow a call of the target.

        Args:
            call: The tokens [T] and the context of the target's call.
            tapped: [T, len(taps) * D], the taps side by side.
            carried: The features before the rows' first tokens; None if `feature_dim` is 0.

        Returns:
            The pages with the new tokens, and the tokens' features [T, F]; None if `feature_dim` is 0.
        """
        ...

    def draft(self, call: DraftCall, carried: jax.Array | None, count: int, pick: Pick) -> tuple[jax.Array, Cache]:
        """Propose tokens.

        Args:
            call: The newest token of each sequence [S], and rows of one token: kv_lens is n + 1. Where a row has no
                pages, its table has a page that nobody reads. What is written from position n on is overwritten by the
                next `absorb`.
            carried: [S, F], the features of the tokens before the newest.
            count: How many tokens to propose, at most `most`.
            pick: Chooses the tokens of a position from its logits, as the target's sampler will.

        Returns:
            The draft tokens [count, S] and the pages.
        """
        ...
