"""Define the objective of drafters.

Drafts start at random tokens of the answers, as if each were the newest token. The k-th draft token is compared with
the answer's, and its distribution q with the target's p:

    loss = sum_k w_k ((1 - l1) CE + l1 |p - q|) / sum_k w_k,   w_k = exp(-(k - 1) / gamma)

B rows, T tokens, A starts of a row, N draft tokens of each, D model dim, R rank of token pairs,
U the drafter's vocabulary.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from dovetail.core.types import Batch, Params
from dovetail.models.config import ModelConfig
from dovetail.ops.linear import matmul
from dovetail.ops.token_loss import DraftScores, draft_scores
from dovetail.train.objective import Measured, Metrics, StepContext
from dovetail.tune.draft.accepted import answer_tokens, decode
from dovetail.tune.draft.states import Seen, States, take
from dovetail.tune.draft_sections import DrafterSettings

LEAST = 1e-9


class Starts(NamedTuple):
    """Say where the drafts of a batch start, and which of their tokens count."""

    newest: jax.Array  # [B, A]: tokens of the row
    before: jax.Array  # [B, A, N]: the token before each draft token
    counts: jax.Array  # [B, A, N] bool


class Trained(Protocol):
    """Compute the hidden states of a draft model for packed rows."""

    @property
    def scales(self) -> bool:
        """Return whether its logits have the scale and the soft cap of the target's."""
        ...

    def prepare(self, params: Params, cfg: ModelConfig, batch: Batch, ctx: StepContext, seen: Seen) -> Any:
        """Return what does not depend on where drafts start."""
        ...

    def hidden(self, params: Params, prepared: Any, batch: Batch, ctx: StepContext, newest: jax.Array) -> jax.Array:
        """Return the states [B, A, N, D] of the draft tokens after the newest tokens [B, A]."""
        ...

    def pairs(self, params: Params, hidden: jax.Array, previous: jax.Array) -> tuple[jax.Array, jax.Array] | None:
        """Return the factors [B, A, N, R] and [U, R] of what the tokens before [B, A, N] add to the logits, or None."""
        ...


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SharedHead:
    """Hold a frozen head [U, D], and beside it the trained table [U, R] of token pairs if there is one.

    It is an ops.linear.Weight [U, D + R], of which only the second part has a gradient.
    """

    head: jax.Array
    pairs: jax.Array | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """Return the shape of both parts."""
        return self.head.shape[0], self.head.shape[1] + (0 if self.pairs is None else self.pairs.shape[1])

    def matmul(self, x: jax.Array, dims: int, out_dtype: Any) -> jax.Array:
        """Multiply as ops.linear.matmul."""
        if self.pairs is None:
            return matmul(x, self.head, out_dtype=out_dtype)
        hidden, previous = jnp.split(x, [self.head.shape[1]], axis=-1)
        return matmul(hidden, self.head, out_dtype=out_dtype) + matmul(previous, self.pairs, out_dtype=out_dtype)


@dataclass(frozen=True)
class DraftObjective:
    """Compute the loss of a drafter, and its accepted length on held-out rows."""

    trained: Trained
    settings: DrafterSettings
    states: States

    def measure(self, params: Params, cfg: ModelConfig, batch: Batch, weight: jax.Array, ctx: StepContext) -> Measured:
        """Measure a microstep."""
        assert ctx.key is not None
        seen = self.states.of(cfg, batch, ctx)
        prepared = self.trained.prepare(params, cfg, batch, ctx, seen)
        starts = self._starts(batch, self._random(batch, ctx.key))
        loss, metrics = self._loss(self._scores(params, cfg, batch, ctx, seen, prepared, starts), starts)
        share = batch.loss_mask.sum() / weight  # of this part in the batch's mean
        return Measured(loss * share, jax.tree.map(lambda x: jax.lax.stop_gradient(x) * share, metrics))

    def held_out(self, params: Params, cfg: ModelConfig, batch: Batch, ctx: StepContext) -> tuple[Metrics, jax.Array]:
        """Return sums over the steps of decoding the batch's answers, and the number of steps.

        Drafts start at every token. The tokens before a draft token are the answer's own, which are the drafter's up to
        the first one that is not accepted.
        """
        seen = self.states.of(cfg, batch, ctx)
        prepared = self.trained.prepare(params, cfg, batch, ctx, seen)
        rows, length = batch.tokens.shape
        size = min(self.settings.anchors, length)
        parts = jnp.arange(-(-length // size) * size).reshape(-1, size)  # starts past the end count nothing

        def part(newest: jax.Array) -> tuple[jax.Array, jax.Array]:
            starts = self._starts(batch, jnp.broadcast_to(newest, (rows, size)))
            scores = self._scores(params, cfg, batch, ctx, seen, prepared, starts)
            right = jnp.cumprod(scores.best * starts.counts, axis=-1).sum(axis=-1)
            loss, _ = self._loss(scores, starts)
            return right, jnp.stack([loss * starts.counts.sum(), starts.counts.sum()])

        right, sums = jax.lax.map(part, parts)
        accepted = right.transpose(1, 0, 2).reshape(rows, -1)[:, :length]
        tokens, steps = decode(answer_tokens(batch), accepted)
        total, count = sums.sum(axis=0)
        return {"accepted_length": tokens, "loss": total / jnp.maximum(count, 1.0) * steps}, steps

    def _random(self, batch: Batch, key: jax.Array) -> jax.Array:
        """Return [B, A] different tokens, those of answers first."""
        noise = jax.random.uniform(key, batch.tokens.shape) + (batch.loss_mask > 0)
        return jax.lax.top_k(noise, min(self.settings.anchors, batch.tokens.shape[1]))[1]

    def _starts(self, batch: Batch, newest: jax.Array) -> Starts:
        """Return the starts; those past the row's end or at a document's first token do not count."""
        length = batch.tokens.shape[1]
        at = newest[..., None] + jnp.arange(self.settings.num_speculative_tokens)
        inside, at, newest = at < length, jnp.minimum(at, length - 1), jnp.minimum(newest, length - 1)
        counts = inside & (take(batch.segment_ids, at) == take(batch.segment_ids, newest)[..., None])
        counts &= (take(batch.loss_mask, at) > 0) & (take(batch.positions, newest) > 0)[..., None]
        return Starts(newest, at, jnp.cumprod(counts, axis=-1).astype(bool))

    def _scores(
        self,
        params: Params,
        cfg: ModelConfig,
        batch: Batch,
        ctx: StepContext,
        seen: Seen,
        prepared: Any,
        starts: Starts,
    ) -> DraftScores:
        """Return the scores [B, A, N] of the drafter for the answers' tokens."""
        B, A, N = starts.before.shape
        hidden = self.trained.hidden(params, prepared, batch, ctx, starts.newest)
        ours = head = SharedHead(self.states.head(cfg, ctx))
        if pairs := self.trained.pairs(params, hidden, take(batch.tokens, starts.before)):
            hidden = jnp.concatenate([hidden, pairs[0].astype(hidden.dtype)], axis=-1)
            ours = dataclasses.replace(head, pairs=pairs[1])
        flat = starts.before.reshape(B, -1)
        wanted = self.states.draft_token(take(batch.targets, flat))
        own = dict(scale=cfg.logit_scale, softcap=cfg.logit_softcap) if self.trained.scales else {}
        found = draft_scores(
            hidden.reshape(B, A * N, -1), ours, take(seen.final, flat), head, wanted, target_scale=cfg.logit_scale,
            target_softcap=cfg.logit_softcap, dtype=ctx.logits, placement=ctx.placement, **own,
        )  # fmt: skip
        known = wanted >= 0
        found = DraftScores(jnp.where(known, found.logprobs, 0.0), found.best * known, found.distance)
        return jax.tree.map(lambda x: x.reshape(B, A, N), found)

    def _loss(self, scores: DraftScores, starts: Starts) -> tuple[jax.Array, Metrics]:
        """Return the mean loss, and the accepted draft tokens and the first one's accuracy."""
        l1 = self.settings.l1_weight
        weights = starts.counts * jnp.exp(-jnp.arange(starts.counts.shape[-1]) / self.settings.gamma)
        each = (1 - l1) * -scores.logprobs + l1 * scores.distance
        loss = jnp.sum(weights * each) / jnp.maximum(weights.sum(), LEAST)
        first = jnp.maximum(starts.counts[..., 0].sum(), 1)
        right = jnp.cumprod(scores.best * starts.counts, axis=-1).sum()
        return loss, {"accepted": right / first, "first_accuracy": (scores.best * starts.counts)[..., 0].sum() / first}
