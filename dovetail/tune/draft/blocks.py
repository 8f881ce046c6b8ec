"""Define the objective of block drafters (DFlash, DSpark).

Blocks start at random tokens of the answers. A block sees the hidden states of the tokens before its start, of the same
document, and itself. Its k-th draft token is compared with the answer's, and its distribution q with the target's p:

    loss = sum_k w_k ((1 - l1) CE + l1 |p - q|) / sum_k w_k,   w_k = exp(-(k - 1) / gamma)

B rows, T tokens, A blocks of a row, W slots of a block, N draft tokens of it, D model dim, U the drafter's vocabulary.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from dovetail.core.types import Batch, Params
from dovetail.models.config import ModelConfig
from dovetail.models.draft.block_attention import Anchored
from dovetail.models.draft.dflash import DFlash
from dovetail.models.draft.draft import Target
from dovetail.ops.linear import matmul
from dovetail.ops.token_loss import DraftScores, draft_scores
from dovetail.train.objective import Measured, Metrics, StepContext
from dovetail.tune.draft.accepted import answer_tokens, decode
from dovetail.tune.draft.states import States
from dovetail.tune.draft_sections import DrafterSettings

LEAST = 1e-9


class Blocks(NamedTuple):
    """Say where the blocks of a batch start, and which of their draft tokens count."""

    start: jax.Array  # [B, A]: tokens of the row
    token: jax.Array  # [B, A, N]: the token before each draft token
    counts: jax.Array  # [B, A, N] bool


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SharedHead:
    """Hold a frozen head [U, D], and beside it the Markov head's second matrix [U, R] if there is one.

    It is an ops.linear.Weight [U, D + R], of which only the second part has a gradient.
    """

    head: jax.Array
    markov: jax.Array | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """Return the shape of both parts."""
        return self.head.shape[0], self.head.shape[1] + (0 if self.markov is None else self.markov.shape[1])

    def matmul(self, x: jax.Array, dims: int, out_dtype: Any) -> jax.Array:
        """Multiply as ops.linear.matmul."""
        if self.markov is None:
            return matmul(x, self.head, out_dtype=out_dtype)
        hidden, previous = jnp.split(x, [self.head.shape[1]], axis=-1)
        return matmul(hidden, self.head, out_dtype=out_dtype) + matmul(previous, self.markov, out_dtype=out_dtype)


@dataclass(frozen=True)
class BlockObjective:
    """Compute the loss of a block drafter, and its accepted length on held-out rows."""

    model: DFlash
    settings: DrafterSettings
    states: States

    def measure(self, params: Params, cfg: ModelConfig, batch: Batch, weight: jax.Array, ctx: StepContext) -> Measured:
        """Measure a microstep."""
        assert ctx.key is not None
        seen = self.states.of(cfg, batch, ctx)
        blocks = self._blocks(batch, self._random_starts(batch, ctx.key))
        scores = self._scores(params, cfg, batch, ctx, seen, blocks)
        loss, metrics = self._loss(scores, blocks)
        share = batch.loss_mask.sum() / weight  # of this part in the batch's mean
        return Measured(loss * share, jax.tree.map(lambda x: jax.lax.stop_gradient(x) * share, metrics))

    def held_out(self, params: Params, cfg: ModelConfig, batch: Batch, ctx: StepContext) -> tuple[Metrics, jax.Array]:
        """Return sums over the steps of decoding the batch's answers, and the number of steps.

        Blocks start at every token. The Markov head reads the answer's own tokens, which are the drafter's up to the
        first draft token that is not accepted.
        """
        seen = self.states.of(cfg, batch, ctx)
        rows, length = batch.tokens.shape
        size = min(self.settings.anchors, length)
        parts = jnp.arange(-(-length // size) * size).reshape(-1, size)  # starts past the end count nothing

        def part(starts: jax.Array) -> tuple[jax.Array, jax.Array]:
            blocks = self._blocks(batch, jnp.broadcast_to(starts, (rows, size)))
            scores = self._scores(params, cfg, batch, ctx, seen, blocks)
            right = jnp.cumprod(scores.best * blocks.counts, axis=-1).sum(axis=-1)
            loss, _ = self._loss(scores, blocks)
            return right, jnp.stack([loss * blocks.counts.sum(), blocks.counts.sum()])

        right, sums = jax.lax.map(part, parts)
        accepted = right.transpose(1, 0, 2).reshape(rows, -1)[:, :length]
        tokens, steps = decode(answer_tokens(batch), accepted)
        total, count = sums.sum(axis=0)
        return {"accepted_length": tokens, "loss": total / jnp.maximum(count, 1.0) * steps}, steps

    def _random_starts(self, batch: Batch, key: jax.Array) -> jax.Array:
        """Return [B, A] different tokens, those of answers first."""
        noise = jax.random.uniform(key, batch.tokens.shape) + (batch.loss_mask > 0)
        return jax.lax.top_k(noise, min(self.settings.anchors, batch.tokens.shape[1]))[1]

    def _blocks(self, batch: Batch, start: jax.Array) -> Blocks:
        length = batch.tokens.shape[1]
        at = start[..., None] + jnp.arange(self.model.most)
        inside, at = at < length, jnp.minimum(at, length - 1)
        first = _take(batch.segment_ids, jnp.minimum(start, length - 1))
        counts = inside & (_take(batch.segment_ids, at) == first[..., None]) & (_take(batch.loss_mask, at) > 0)
        return Blocks(jnp.minimum(start, length - 1), at, jnp.cumprod(counts, axis=-1).astype(bool))

    def _scores(
        self, params: Params, cfg: ModelConfig, batch: Batch, ctx: StepContext, seen: Any, blocks: Blocks
    ) -> DraftScores:
        """Return the scores [B, A, N] of the drafter for the answers' tokens."""
        B, A, N = blocks.token.shape
        hidden, head = self._hidden(params, cfg, batch, ctx, seen, blocks), SharedHead(self.states.head(cfg, ctx))
        ours = head
        if self.model.markov_rank:
            before = params["markov"]["w1"][_take(batch.tokens, blocks.token)]
            hidden = jnp.concatenate([hidden, before.astype(hidden.dtype)], axis=-1)
            ours = dataclasses.replace(head, markov=params["markov"]["w2"])
        flat = blocks.token.reshape(B, -1)
        wanted = self.states.draft_token(_take(batch.targets, flat))
        found = draft_scores(
            hidden.reshape(B, A * N, -1), ours, _take(seen.final, flat), head, wanted,
            target_scale=cfg.logit_scale, target_softcap=cfg.logit_softcap, dtype=ctx.logits, placement=ctx.placement,
        )  # fmt: skip
        known = wanted >= 0
        found = DraftScores(jnp.where(known, found.logprobs, 0.0), found.best * known, found.distance)
        return jax.tree.map(lambda x: x.reshape(B, A, N), found)

    def _hidden(
        self, params: Params, cfg: ModelConfig, batch: Batch, ctx: StepContext, seen: Any, blocks: Blocks
    ) -> jax.Array:
        """Return the drafter's states [B, A, N, D]."""
        B, A = blocks.start.shape
        slots = self.model.block_size
        segment = _take(batch.segment_ids, blocks.start)
        before = jnp.arange(batch.tokens.shape[1]) < blocks.start[..., None]
        anchored = Anchored(
            jnp.repeat(segment, slots, axis=1), ctx.platform, ctx.placement,
            context=self.model.context(params, seen.taps), positions=batch.positions,
            visible=before & (batch.segment_ids[:, None] == segment[..., None]),
        )  # fmt: skip
        target = Target({"embed": self.states.embed(cfg, ctx)}, cfg)
        x = self.model.embed_blocks(target, _take(batch.tokens, blocks.start), slots, anchored)
        positions = (_take(batch.positions, blocks.start)[..., None] + jnp.arange(slots)).reshape(B, -1)
        rope = self.model.layers[0].attn.rope
        assert rope is not None
        hidden, _ = self.model.forward(params, x.reshape(B, A * slots, -1), rope.tables(positions), anchored)
        return hidden.reshape(B, A, slots, -1)[:, :, slots - self.model.most :]

    def _loss(self, scores: DraftScores, blocks: Blocks) -> tuple[jax.Array, Metrics]:
        """Return the mean loss, and the mean accuracy and acceptance by probability of the first draft token."""
        l1 = self.settings.l1_weight
        weights = blocks.counts * jnp.exp(-jnp.arange(blocks.counts.shape[-1]) / self.settings.gamma)
        each = (1 - l1) * -scores.logprobs + l1 * scores.distance
        loss = jnp.sum(weights * each) / jnp.maximum(weights.sum(), LEAST)
        first = jnp.maximum(blocks.counts[..., 0].sum(), 1)
        right = jnp.cumprod(scores.best * blocks.counts, axis=-1).sum()
        return loss, {"accepted": right / first, "first_accuracy": (scores.best * blocks.counts)[..., 0].sum() / first}


def _take(x: jax.Array, at: jax.Array) -> jax.Array:
    """Return x [B, T, ...] at the tokens [B, ...]."""
    return jax.vmap(lambda row, index: row[index])(x, at)
