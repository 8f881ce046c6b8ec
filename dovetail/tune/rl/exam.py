"""The exam: held-out prompts answered and judged, for pass@k and maj@k as the policy learns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from dovetail.core.types import Params
from dovetail.train.rows import Sampled
from dovetail.tune.rl.actor import Actor
from dovetail.tune.rl.advantages import maj_at_k, pass_at_k
from dovetail.tune.rl.critic import ACTOR
from dovetail.tune.rl.episode import Episode
from dovetail.tune.rl.player import Grammar, Player, Reply, Start, write_texts
from dovetail.tune.rl.referee import Referee
from dovetail.tune.rl.settings import Rl
from dovetail.tune.rl.task import Task


@dataclass(frozen=True)
class Examiner:
    """A train.rows.Samples."""

    settings: Rl
    tasks: list[Task]
    actor: Actor
    referee: Referee
    reply: Reply | None = None
    grammar: Grammar | None = None

    @property
    def every(self) -> int:
        return self.settings.eval.every

    def __call__(self, params: Params, step: int) -> Sampled:
        wanted = self.settings.exam
        tasks = self.tasks[: wanted.prompts]
        self.actor.publish(params[ACTOR] if self.settings.has_critic else params, step)
        groups = self._answers(tasks, wanted.samples)
        self.actor.rest()
        right = [[e.reward is not None and e.reward >= wanted.right for e in group] for group in groups]
        measures = {"held_out_reward": _mean([e.reward for group in groups for e in group])}
        counts = [sum(each) for each in right]
        for k in {1, wanted.samples}:
            measures[f"held_out_pass@{k}"] = float(np.mean(pass_at_k(counts, wanted.samples, k)))
        if wanted.samples > 1:
            votes = [maj_at_k([e.text for e in g], ok) for g, ok in zip(groups, right, strict=True)]
            measures[f"held_out_maj@{wanted.samples}"] = float(np.mean(votes))
        return Sampled([_line(task, group) for task, group in zip(tasks, groups, strict=True)], measures)

    def _answers(self, tasks: list[Task], samples: int) -> list[list[Episode]]:
        """The same seeds at every exam: what changes is the policy."""
        found: dict[tuple[int, int], Episode] = {}

        def keep(episodes: list[Episode]) -> None:
            found.update({(each.place.group, each.place.member): each for each in episodes})

        starts = [
            Start(task, 0, i, range(samples), int(np.random.default_rng((self.settings.seed, i)).integers(2**63)))
            for i, task in enumerate(tasks)
        ]
        Player(self.actor.llm, self.settings, self.reply, self.grammar, samples).play(starts, 0, keep)
        groups = [[found[i, member] for member in range(samples)] for i in range(len(tasks))]
        write_texts([episode for group in groups for episode in group], self.actor.tokenizer)
        judged = [self.referee.begin(task, group) for task, group in zip(tasks, groups, strict=True)]
        for group, one in zip(groups, judged, strict=True):
            self.referee.end(group, one)
        return groups


def _mean(values: list[float | None]) -> float:
    there = [value for value in values if value is not None]
    return float(np.mean(there)) if there else float("nan")


def _line(task: Task, group: list[Episode]) -> dict[str, Any]:
    best = max(group, key=lambda e: -np.inf if e.reward is None else e.reward)
    return {"prompt": task.prompt, "answer": best.messages or best.text, "reward": best.reward}
