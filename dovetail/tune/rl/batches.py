"""Build the batches of a rollout's updates from groups of rewarded episodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike

from dovetail.core.choice import one_of, require
from dovetail.core.types import Batch, Params
from dovetail.train.prepare import Ready
from dovetail.tune.rl.advantages import (
    Advantage,
    all_equal,
    gae,
    group_advantages,
    soft_overlong_punishment,
    token_rewards,
    whiten,
)
from dovetail.tune.rl.episode import Episode
from dovetail.tune.rl.images import RolloutImages
from dovetail.tune.rl.journal import Scores
from dovetail.tune.rl.layout import Layout, lay_out, row_sizes
from dovetail.tune.rl.losses import LOSS_TYPES
from dovetail.tune.rl.scorer import RowScorer
from dovetail.tune.rl.settings import Rl
from dovetail.tune.rl.tool_grammars import ToolGrammars

Groups = Sequence[Sequence[Episode]]


@dataclass(frozen=True)
class UpdateBatch:
    """The batch of one update."""

    batch: Batch
    layout: Layout
    metrics: dict[str, float]
    scores: Scores  # log-probabilities and values of its tokens before the first update


class BatchBuilder:
    """Compute advantages and scores of episodes, and lay them out in rows."""

    def __init__(
        self,
        settings: Rl,
        ready: Ready,
        advantage: Advantage | None = None,
        calls: ToolGrammars | None = None,
        images: RolloutImages | None = None,
    ):
        """Create a builder.

        Args:
            settings: The recipe.
            ready: The prepared run.
            advantage: The user's own, in place of the algorithm's.
            calls: The grammar that constrained the episodes, if any.
            images: Those of the prompts, if the policy sees images.
        """
        self._settings, self._ready, self._calls, self._images = settings, ready, calls, images
        self._advantage = advantage or settings.resolved_loss.advantage
        self._scorer = RowScorer(settings, ready)

    def has_gradient(self, group: Sequence[Episode]) -> bool:
        """Return whether the rewards of a group differ, so that its advantages are not all 0."""
        return not all_equal(np.asarray([self._rewards(group)]))[0]

    def advantages(self, groups: Groups) -> np.ndarray | None:
        """Return the advantage of each episode, one group after another; None if it is computed per token."""
        if not self._settings.has_group_advantages:
            return None
        assert self._advantage is not None
        rewards = [self._rewards(group) for group in groups]
        return group_advantages(rewards, self._advantage, self._settings.resolved_loss.scale_rewards).reshape(-1)

    def build(
        self,
        groups: Groups,
        advantages: np.ndarray | None,
        params: Params,
        reference: Params | None = None,
        known: Sequence[Scores] | None = None,
    ) -> list[UpdateBatch]:
        """Return one batch for each update of a pass. Each has episodes of all groups.

        Args:
            groups: The episodes.
            advantages: As `advantages` returns them.
            params: The weights before the first update.
            reference: The reference of the training state, if it has one.
            known: The scores of each batch, if they are known; otherwise they are computed.
        """
        episodes, parts = [episode for group in groups for episode in group], self._settings.updates
        return [
            self._build_one(
                episodes[i::parts], None if advantages is None else advantages[i::parts], params, reference,
                known[i] if known else None,
            )
            for i in range(parts)
        ]  # fmt: skip

    def _build_one(
        self,
        episodes: list[Episode],
        advantages: np.ndarray | None,
        params: Params,
        reference: Params | None,
        known: Scores | None,
    ) -> UpdateBatch:
        settings = self._settings
        sizes = row_sizes(settings.batch, self._ready.placement.mesh.size, self._ready.settings.accumulate or 1)
        layout = lay_out(episodes, settings.length, sizes)
        masks = [e.loss_mask(settings.mask_truncated_completions, not settings.has_teacher) for e in episodes]
        loss_type = settings.resolved_loss.loss_type or "grpo"
        weights = token_weights(
            loss_type, [int(m.sum()) for m in masks], max_completion_length=settings.max_completion_length
        )
        each = np.zeros(len(episodes)) if advantages is None else advantages
        batch = layout.batch(
            episodes, [m * w for m, w in zip(masks, weights, strict=True)],
            advantages=[np.full(len(e.tokens), a) for e, a in zip(episodes, each, strict=True)],
            sampler=[e.logprobs for e in episodes],
        )  # fmt: skip
        if self._calls and settings.has_grammar:
            batch = replace(batch, columns={**batch.columns, **self._calls.columns(layout, episodes)})
        if self._images:
            batch = self._images.add(batch, layout, episodes)
        scores = self._scores(batch, layout, params, reference) if known is None else known
        batch, metrics = self._with_scores(batch, layout, episodes, masks, scores)
        used = sum(layout.sizes)
        metrics |= {"tokens": float(used), "filled": used / (layout.rows * layout.length)}
        return UpdateBatch(batch, layout, metrics, scores)

    def _rewards(self, group: Sequence[Episode]) -> list[float]:
        """Return the rewards with the punishment of long completions; NaN for none."""
        rewards = np.asarray([np.nan if e.reward is None else e.reward for e in group])
        if cache := self._settings.resolved_loss.soft_punish_cache:
            lengths = [e.completion_length for e in group]
            rewards = rewards + soft_overlong_punishment(lengths, self._settings.max_completion_length, cache)
        return rewards.tolist()

    # --- scores -------------------------------------------------------------------------------------------------------

    def _scores(self, batch: Batch, layout: Layout, params: Params, reference: Params | None) -> Scores:
        """Return the scores by the old policy, the reference and the teacher, those that the recipe needs."""
        settings, found = self._settings, {}
        if settings.algo == "gkd" or not (
            settings.scores_old_policy or settings.has_reference or settings.has_teacher
        ):  # gkd runs its teacher in the training step
            return {}
        put = self._ready.place(batch)
        by_reference = self._scorer.reference(put, reference) if settings.has_reference else None
        if settings.scores_old_policy:
            found |= self._scorer.old_policy(params, put)
        if by_reference is not None:
            found["reference"] = np.asarray(by_reference)
        if settings.has_teacher:
            found["teacher"] = self._scorer.teacher(put)
        return {name: np.concatenate(layout.take(array)) for name, array in found.items()}

    def _with_scores(
        self, batch: Batch, layout: Layout, episodes: list[Episode], masks: list[np.ndarray], scores: Scores
    ) -> tuple[Batch, dict[str, float]]:
        """Return the batch with the columns that follow from the scores, and metrics of them."""
        settings, metrics = self._settings, {}
        if settings.algo == "gkd":
            own = {name: x for name, x in batch.columns.items() if name in self._ready.objective.columns}
            return replace(batch, columns=own), metrics
        ends = np.cumsum([len(e.tokens) for e in episodes])[:-1]
        found = {name: layout.put(np.split(array, ends)) for name, array in scores.items()}
        counts = np.asarray(batch.loss_mask) > 0
        if settings.has_critic:
            found |= self._critic_columns(found, layout, episodes, masks)
        if settings.has_teacher:  # a token's advantage is how much more probable it is to the teacher
            gain = found["teacher"] - found.get("old", np.asarray(batch.columns["sampler"]))
            found["advantages"] = np.where(counts, gain, 0.0).astype(np.float32)
        if "entropy" in found:
            quantile = settings.resolved_loss.top_entropy_quantile
            found["top_entropy"] = top_entropy(found["entropy"], counts, quantile)
        if settings.has_reference and "old" in found:
            metrics["kl_before"] = float(np.mean((found["old"] - found["reference"])[counts])) if counts.any() else 0.0
        wanted = {*self._ready.objective.columns} - set(batch.columns) | {"advantages"}
        columns = {**batch.columns, **{name: x for name, x in found.items() if name in wanted}}
        return replace(batch, columns=columns), metrics

    def _critic_columns(
        self, found: dict[str, np.ndarray], layout: Layout, episodes: list[Episode], masks: list[np.ndarray]
    ) -> dict[str, np.ndarray]:
        """Return `advantages` and `returns` of each token from a critic's values."""
        critic, longest = self._settings.critic, max(len(e.tokens) for e in episodes)

        def padded(values: Sequence[np.ndarray]) -> np.ndarray:
            return np.stack([np.pad(np.asarray(x, np.float64), (0, longest - len(x))) for x in values])

        mask, values = padded(masks), padded(layout.take(found["values"]))
        kl = np.zeros_like(values)
        if critic.kl_coef:
            kl = padded(layout.take(found["old"])) - padded(layout.take(found["reference"]))
        scores = [0.0 if np.isnan(r) else r for r in self._rewards(episodes)]
        estimated = gae(token_rewards(scores, kl, mask, critic.kl_coef), values, mask, critic.gamma, critic.lam)

        def put(array: np.ndarray) -> np.ndarray:
            return layout.put([row[: len(e.tokens)] for row, e in zip(array, episodes, strict=True)])

        return {"advantages": put(whiten(estimated.advantages, mask)), "returns": put(estimated.returns)}


# --- normalisation over a batch ---------------------------------------------------------------------------------------


def token_weights(
    loss_type: str, lengths: ArrayLike, num_sequences: int | None = None, max_completion_length: int | None = None
) -> np.ndarray:
    """Return the weight of a token of each sequence, [S] f32.

    The sum of loss times weight over the tokens that count is the loss of the batch, also if the batch is computed in
    parts. grpo is the mean over sequences of the mean over their tokens; dapo and bnpo are the mean over all tokens;
    dr_grpo is the sum over B max_completion_length, a constant. B is the number of sequences.

    Args:
        loss_type: One of LOSS_TYPES.
        lengths: The number of tokens that count in each sequence of the batch, [S]. A weight is 0 where it is 0.
        num_sequences: B; default: all sequences, those without tokens included.
        max_completion_length: The constant of dr_grpo, which alone reads it.
    """
    one_of("loss_type", loss_type, LOSS_TYPES)
    lengths = np.asarray(lengths, np.float64)
    total, filled = len(lengths) if num_sequences is None else num_sequences, int(np.count_nonzero(lengths))
    require(
        total >= filled,
        f"num_sequences must be at least the {filled} sequences that have tokens, got {total}",
        param="num_sequences",
    )
    if loss_type == "grpo":
        each = np.maximum(lengths, 1) * max(total, 1)
    elif loss_type == "dr_grpo":
        require(
            max_completion_length is not None and max_completion_length >= 1,
            f"max_completion_length must be at least 1 with loss_type=dr_grpo, got {max_completion_length}",
            param="max_completion_length",
        )
        each = np.full_like(lengths, max(total, 1) * (max_completion_length or 1))
    else:
        each = np.full_like(lengths, max(lengths.sum(), 1.0))
    return np.where(lengths > 0, 1 / each, 0.0).astype(np.float32)


def top_entropy(entropy: np.ndarray, counts: np.ndarray, quantile: float) -> np.ndarray:
    """Return 1 at the share `quantile` of the tokens that count with the highest entropy, else 0 (arXiv 2506.01939).

    All arrays are [B, T]; `counts` is a mask.
    """
    if not counts.any():
        return np.zeros(entropy.shape, np.float32)
    least = np.quantile(entropy[counts].astype(np.float64), 1 - quantile)
    return (counts & (entropy >= least)).astype(np.float32)
