"""Evaluate the policy on held-out prompts: pass@k, maj@k and the mean reward."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from dovetail.core.choice import require
from dovetail.core.types import Params
from dovetail.train.rows import Sampled
from dovetail.tune.rl.episode import Episode, EpisodeId
from dovetail.tune.rl.episode_runner import EpisodeGroup, EpisodeRunner, Grammar, Reply
from dovetail.tune.rl.images import RolloutImages
from dovetail.tune.rl.prompts import PromptRecord
from dovetail.tune.rl.reward_assigner import RewardAssigner
from dovetail.tune.rl.sampler import PolicySampler
from dovetail.tune.rl.settings import Rl


@dataclass(frozen=True)
class Evaluator:
    """Sample completions of held-out prompts and reward them (a train.rows.SampleFn)."""

    settings: Rl
    prompts: list[PromptRecord]
    sampler: PolicySampler
    rewards: RewardAssigner
    reply: Reply | None = None
    grammar: Grammar | None = None
    images: RolloutImages | None = None

    @property
    def every(self) -> int:
        """Steps between two evaluations."""
        return self.settings.eval.every

    def __call__(self, params: Params, step: int) -> Sampled:
        """Return the best completion of each prompt, and the metrics."""
        wanted = self.settings.eval
        prompts = self.prompts[: wanted.prompts]
        self.sampler.publish(params, step)
        groups = self._run(prompts, wanted.num_generations)
        self.sampler.sleep()
        lines = [_line(prompt, group) for prompt, group in zip(prompts, groups, strict=True)]
        return Sampled(lines, held_out_metrics(groups, wanted.num_generations, wanted.success_threshold))

    def _run(self, prompts: list[PromptRecord], count: int) -> list[list[Episode]]:
        """Run and reward `count` episodes per prompt, with the same seeds in every evaluation."""
        found: dict[EpisodeId, Episode] = {}

        def keep(episodes: list[Episode]) -> None:
            found.update({each.id: each for each in episodes})

        groups = [
            EpisodeGroup(
                prompt, 0, i, range(count), int(np.random.default_rng((self.settings.seed, i)).integers(2**63))
            )
            for i, prompt in enumerate(prompts)
        ]
        runner = EpisodeRunner(self.sampler.llm, self.settings, self.reply, self.grammar, count, self.images)
        runner.run(groups, 0, keep)
        episodes = [[found[group.id(member)] for member in range(count)] for group in groups]
        computing = [self.rewards.submit(prompt, each) for prompt, each in zip(prompts, episodes, strict=True)]
        for each, future in zip(episodes, computing, strict=True):
            self.rewards.assign(each, future)
        return episodes


def held_out_metrics(groups: Sequence[Sequence[Episode]], count: int, success_threshold: float) -> dict[str, float]:
    """Return the metrics of `count` rewarded episodes per prompt."""
    rewards = [e.reward for group in groups for e in group if e.reward is not None]
    metrics = {"held_out_reward": float(np.mean(rewards)) if rewards else float("nan")}
    correct = [[e.reward is not None and e.reward >= success_threshold for e in group] for group in groups]
    for k in {1, count}:
        metrics[f"held_out_pass@{k}"] = float(np.mean(pass_at_k([sum(each) for each in correct], count, k)))
    if count > 1:
        votes = [maj_at_k([e.text for e in group], ok) for group, ok in zip(groups, correct, strict=True)]
        metrics[f"held_out_maj@{count}"] = float(np.mean(votes))
    return metrics


def pass_at_k(correct: ArrayLike, n: ArrayLike, k: int) -> np.ndarray:
    """Return the probability that at least one of k completions is correct, where `correct` of n were.

    It is the unbiased estimate 1 - C(n - correct, k) / C(n, k) for each prompt (arXiv 2107.03374).
    """
    correct, n = np.broadcast_arrays(np.asarray(correct, np.int64), np.asarray(n, np.int64))
    require(k >= 1, f"k must be at least 1, got {k}", param="k")
    fewest = int(n.min(initial=np.iinfo(np.int64).max))
    require(k <= fewest, f"k must be at most the number of completions of a prompt, {fewest}, got {k}", param="k")
    require(
        bool(((correct >= 0) & (correct <= n)).all()),
        f"correct must be from 0 to n for each prompt, got {correct.tolist()} of {n.tolist()}",
        param="correct",
    )
    shares = [1.0 - math.comb(of - c, k) / math.comb(of, k) for c, of in zip(correct.flat, n.flat, strict=True)]
    return np.asarray(shares, np.float64).reshape(n.shape)


def maj_at_k(answers: Sequence[Hashable], correct: Sequence[bool | float]) -> float:
    """Return whether the most frequent answer of a prompt's completions is correct.

    If several answers are equally frequent, it is the share of them that is correct. None is no answer and is not
    counted; the result is 0 if there is no answer.
    """
    votes = Counter(answer for answer in answers if answer is not None)
    most = max(votes.values(), default=0)
    found = [float(ok) for answer, ok in zip(answers, correct, strict=True) if votes[answer] == most > 0]
    return sum(found) / len(found) if found else 0.0


def _line(prompt: PromptRecord, group: Sequence[Episode]) -> dict[str, Any]:
    best = max(group, key=lambda e: -np.inf if e.reward is None else e.reward)
    return {"prompt": prompt.prompt, "answer": best.messages or best.text, "reward": best.reward}
