"""The referee: has the answers to a prompt judged, by the recipe's rewards and by what an environment gave."""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

from dovetail.tune.rl.episode import Episode
from dovetail.tune.rl.failures import Failures
from dovetail.tune.rl.rewards.completion import Scored
from dovetail.tune.rl.rewards.pool import Rewards
from dovetail.tune.rl.task import Task

ENVIRONMENT = "environment"  # the name of the reward that an environment gives


class Referee:
    def __init__(self, rewards: Rewards | None, failures: Failures | None = None):
        self._rewards, self.failures = rewards, failures or Failures()
        self._counts: dict[tuple[str, str, str], int] = {}  # of the problems that have been passed on

    def begin(self, task: Task, episodes: Sequence[Episode]) -> Future[list[Scored]] | None:
        """The judgement under way: it takes other processes. None: the environment's reward is the only one."""
        if self._rewards is None:
            return None
        columns: dict[str, list[Any]] = {name: [value] * len(episodes) for name, value in task.columns.items()}
        columns["completion_ids"] = [each.tokens[each.prompt :].tolist() for each in episodes]
        completions = [completion_of(task, each) for each in episodes]
        return self._rewards.submit([task.prompt] * len(episodes), completions, columns)

    def end(self, episodes: Sequence[Episode], judged: Future[list[Scored]] | None) -> None:
        """Write the judgement into the episodes."""
        found = judged.result() if judged else [Scored({}, None)] * len(episodes)
        for episode, one in zip(episodes, found, strict=True):
            given = episode.rewards.get(ENVIRONMENT)
            parts = [part for part in (given, one.total) if part is not None]
            episode.rewards = {**({ENVIRONMENT: given} if ENVIRONMENT in episode.rewards else {}), **one.values}
            episode.problems = dict(one.errors)
            total = math.fsum(parts) if parts else None
            episode.reward = total if total is None or math.isfinite(total) else None
            if episode.reward is None and not episode.problems:
                episode.problems = {"reward": "none applies to it"}
        for problem in self._rewards.problems if self._rewards else ():
            key = problem.reward, problem.kind, problem.message
            if problem.count > self._counts.get(key, 0):
                self._counts[key] = problem.count
                self.failures.add(f"the reward {problem.reward!r}", problem.kind, problem.message, problem.trace)


def completion_of(task: Task, episode: Episode) -> str | list[dict[str, Any]]:
    """Return what a reward is given: text after a prompt of text, messages after a prompt of messages (as TRL does)."""
    if episode.messages is not None:
        return episode.messages
    return episode.text if isinstance(task.prompt, str) else [{"role": "assistant", "content": episode.text}]
