"""Assign rewards to the episodes of a prompt: those of the recipe, and the one that an environment gave."""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

from dovetail.io.tokenizer import Tokenizer
from dovetail.tune.rl.episode import Episode
from dovetail.tune.rl.failures import Failures
from dovetail.tune.rl.prompts import PromptRecord
from dovetail.tune.rl.rewards.completion import Scored
from dovetail.tune.rl.rewards.pool import Rewards

ENVIRONMENT = "environment"  # the name of the reward that an environment gives

Computing = Future[list[Scored]] | None  # rewards that other processes compute; None: only the environment gives one


class RewardAssigner:
    """Compute rewards in other processes while episodes still run, and write them into the episodes."""

    def __init__(self, rewards: Rewards | None, tokenizer: Tokenizer, failures: Failures | None = None):
        self._rewards, self._tokenizer, self.failures = rewards, tokenizer, failures or Failures()
        self._counts: dict[tuple[str, str, str], int] = {}  # problems that have been reported

    def submit(self, prompt: PromptRecord, episodes: Sequence[Episode]) -> Computing:
        """Start to compute the rewards of episodes of a prompt."""
        write_texts(episodes, self._tokenizer)
        if self._rewards is None:
            return None
        columns: dict[str, list[Any]] = {name: [value] * len(episodes) for name, value in prompt.columns.items()}
        columns["completion_ids"] = [each.tokens[each.prompt_length :].tolist() for each in episodes]
        completions = [completion_of(prompt, each) for each in episodes]
        return self._rewards.submit([prompt.prompt] * len(episodes), completions, columns)

    def assign(self, episodes: Sequence[Episode], computing: Computing) -> None:
        """Wait for the rewards and write them into the episodes."""
        found = computing.result() if computing else [Scored({}, None)] * len(episodes)
        for episode, one in zip(episodes, found, strict=True):
            given = episode.rewards.get(ENVIRONMENT)
            parts = [part for part in (given, one.total) if part is not None]
            episode.rewards = {**({ENVIRONMENT: given} if ENVIRONMENT in episode.rewards else {}), **one.values}
            episode.problems = dict(one.errors)
            total = math.fsum(parts) if parts else None
            episode.reward = total if total is None or math.isfinite(total) else None
            if episode.reward is None and not episode.problems:
                episode.problems = {"reward": "none applies to it"}
        self._report_problems()

    def _report_problems(self) -> None:
        for problem in self._rewards.problems if self._rewards else ():
            key = problem.reward, problem.kind, problem.message
            if problem.count > self._counts.get(key, 0):
                self._counts[key] = problem.count
                self.failures.add(f"the reward {problem.reward!r}", problem.kind, problem.message, problem.trace)


def completion_of(prompt: PromptRecord, episode: Episode) -> str | list[dict[str, Any]]:
    """Return the completion that a reward is given: text after a text prompt, else messages (as TRL does)."""
    if episode.messages is not None:
        return episode.messages
    return episode.text if isinstance(prompt.prompt, str) else [{"role": "assistant", "content": episode.text}]


def write_texts(episodes: Sequence[Episode], tokenizer: Tokenizer) -> None:
    """Detokenise the episodes that have no text yet, without the token that ended a turn.

    It is one batched call: one call per episode takes a good part of the time that sampling takes.
    """
    without = [episode for episode in episodes if not episode.text]
    if not without:
        return
    sampled = [e.tokens[e.sampled].tolist() for e in without]
    shown = [tokens[:-1] if e.finish == "stop" else tokens for e, tokens in zip(without, sampled, strict=True)]
    for episode, text in zip(without, tokenizer.decode_batch(shown), strict=True):
        episode.text = text
