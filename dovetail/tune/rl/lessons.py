"""Lessons: from groups of judged episodes to the batches of a rollout's updates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from dovetail.core.types import Batch, Params
from dovetail.train.prepare import Ready
from dovetail.tune.rl.advantages import (
    Advantage,
    all_equal,
    gae,
    group_advantages,
    overlong_penalty,
    token_rewards,
    whiten,
)
from dovetail.tune.rl.episode import Episode
from dovetail.tune.rl.journal import Scores
from dovetail.tune.rl.layout import Layout, lay_out, row_sizes
from dovetail.tune.rl.losses import token_weights, top_entropy
from dovetail.tune.rl.scorer import Scorer
from dovetail.tune.rl.settings import Rl
from dovetail.tune.rl.tool_grammars import ToolGrammars

Groups = Sequence[Sequence[Episode]]


@dataclass(frozen=True)
class Lesson:
    batch: Batch
    layout: Layout
    notes: dict[str, float]
    scores: Scores  # what models say of its tokens before the first update


class Lessons:
    def __init__(
        self, settings: Rl, ready: Ready, advantage: Advantage | None = None, calls: ToolGrammars | None = None
    ):
        """`advantage`: the user's own, in place of the algorithm's. `calls`: what kept the episodes, if any."""
        self._settings, self._ready, self._calls = settings, ready, calls
        self._advantage = advantage or settings.wanted.advantage
        self._scorer = Scorer(settings, ready)

    def teaches(self, group: Sequence[Episode]) -> bool:
        """Whether some of its answers did better than others."""
        return not all_equal(np.asarray([self._rewards(group)]))[0]

    def of(
        self, groups: Groups, params: Params, reference: Params | None = None, kept: Sequence[Scores] | None = None
    ) -> list[Lesson]:
        """Return one for each update of a pass, with episodes of all groups, so that no update sees one prompt alone.

        Args:
            reference: the training state's, where it keeps one.
            kept: the scores of each, where they are known; else they are computed with `params`.
        """
        settings, episodes = self._settings, [episode for group in groups for episode in group]
        gains = self._gains(groups) if settings.judges_groups else None
        parts, lessons = settings.updates, []
        for i in range(parts):
            own = None if gains is None else gains[i::parts]
            lessons.append(self._lesson(episodes[i::parts], own, params, reference, kept[i] if kept else None))
        return lessons

    def _lesson(
        self,
        episodes: list[Episode],
        gains: np.ndarray | None,
        params: Params,
        reference: Params | None,
        kept: Scores | None,
    ) -> Lesson:
        settings = self._settings
        devices = self._ready.placement.mesh.size
        sizes = row_sizes(settings.batch, devices, self._ready.settings.accumulate or 1)
        layout = lay_out(episodes, settings.length, sizes)
        masks = [episode.mask(settings.truncated == "mask", not settings.is_taught) for episode in episodes]
        wanted = settings.wanted.aggregation or "grpo"
        each = token_weights(wanted, [int(m.sum()) for m in masks], max_tokens=settings.max_tokens)
        flat = [np.zeros(len(e.tokens)) if gains is None else np.full(len(e.tokens), g) for e, g in zip(
            episodes, gains if gains is not None else masks, strict=True)]  # fmt: skip
        batch = layout.batch(
            episodes, [m * w for m, w in zip(masks, each, strict=True)], advantages=flat,
            sampler=[e.logprobs for e in episodes],
        )  # fmt: skip
        if self._calls and settings.has_masks:
            batch = replace(batch, columns={**batch.columns, **self._calls.columns(layout, episodes)})
        scores = self._scores(batch, layout, params, reference) if kept is None else kept
        batch, notes = self._with_scores(batch, layout, episodes, masks, scores)
        places = sum(layout.sizes)
        notes |= {"tokens": float(places), "filled": places / (layout.rows * layout.length)}
        return Lesson(batch, layout, notes, scores)

    # --- advantages ---------------------------------------------------------------------------------------------------

    def _rewards(self, group: Sequence[Episode]) -> list[float]:
        """As they count: an answer that is nearly too long loses some."""
        rewards = np.asarray([np.nan if e.reward is None else e.reward for e in group])
        if buffer := self._settings.wanted.overlong:
            rewards = rewards + overlong_penalty([e.written for e in group], self._settings.max_tokens, buffer)
        return rewards.tolist()

    def _gains(self, groups: Groups) -> np.ndarray:
        """Of each episode."""
        assert self._advantage is not None
        rewards = [self._rewards(group) for group in groups]
        return group_advantages(rewards, self._advantage, self._settings.wanted.scale_rewards).reshape(-1)

    # --- what models say of them --------------------------------------------------------------------------------------

    def _scores(self, batch: Batch, layout: Layout, params: Params, reference: Params | None) -> Scores:
        """By the policy (see Scorer.before), the reference and the teacher, of each that this recipe has."""
        settings, found = self._settings, {}
        if settings.algo == "gkd" or not (settings.scores_first or settings.has_reference or settings.is_taught):
            return {}  # the teacher of gkd is asked in the step itself
        put = self._ready.place(batch)
        by_reference = self._scorer.reference(put, reference) if settings.has_reference else None
        if settings.scores_first:
            found |= self._scorer.before(params, put)
        if by_reference is not None:
            found["reference"] = np.asarray(by_reference)
        if settings.is_taught:
            found["teacher"] = self._scorer.teacher(put)
        return {name: np.concatenate(layout.take(array)) for name, array in found.items()}

    def _with_scores(
        self, batch: Batch, layout: Layout, episodes: list[Episode], masks: list[np.ndarray], scores: Scores
    ) -> tuple[Batch, dict[str, float]]:
        """The batch with the columns that follow from the scores."""
        settings, notes = self._settings, {}
        if settings.algo == "gkd":
            return replace(batch, columns={}), notes
        ends = np.cumsum([len(e.tokens) for e in episodes])[:-1]
        found = {name: layout.put(np.split(array, ends)) for name, array in scores.items()}
        counts = np.asarray(batch.loss_mask) > 0
        if settings.has_critic:
            found |= self._estimated(found, layout, episodes, masks)
        if settings.is_taught:  # each token's reward is how much likelier it is to the teacher
            gain = found["teacher"] - found.get("old", np.asarray(batch.columns["sampler"]))
            found["advantages"] = np.where(counts, gain, 0.0).astype(np.float32)
        if "entropy" in found:
            found["top_entropy"] = top_entropy(found["entropy"], counts, settings.wanted.top_entropy_quantile)
        if settings.has_reference and "old" in found:
            notes["kl_before"] = float(np.mean((found["old"] - found["reference"])[counts])) if counts.any() else 0.0
        wanted = {name for name in self._ready.objective.columns} - set(batch.columns)
        columns = {**batch.columns, **{name: x for name, x in found.items() if name in {*wanted, "advantages"}}}
        return replace(batch, columns=columns), notes

    def _estimated(
        self, found: dict[str, np.ndarray], layout: Layout, episodes: list[Episode], masks: list[np.ndarray]
    ) -> dict[str, np.ndarray]:
        """By a critic: `advantages` and `returns` of each token."""
        critic, longest = self._settings.critic, max(len(e.tokens) for e in episodes)

        def rows(values: Sequence[np.ndarray]) -> np.ndarray:
            return np.stack([np.pad(np.asarray(x, np.float64), (0, longest - len(x))) for x in values])

        mask, values = rows(masks), rows(layout.take(found["values"]))
        kl = np.zeros_like(values)
        if critic.beta:
            kl = rows(layout.take(found["old"])) - rows(layout.take(found["reference"]))
        scores = [0.0 if np.isnan(r) else r for r in self._rewards(episodes)]
        estimated = gae(token_rewards(scores, kl, mask, critic.beta), values, mask, critic.gamma, critic.lam)

        def put(array: np.ndarray) -> np.ndarray:
            return layout.put([row[: len(e.tokens)] for row, e in zip(array, episodes, strict=True)])

        return {"advantages": put(whiten(estimated.advantages, mask)), "returns": put(estimated.returns)}
