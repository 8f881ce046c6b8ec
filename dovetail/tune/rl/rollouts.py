"""Rollouts: the batches of RL, sampled by the current weights (a train.rows.BatchSource).

One step of GRPO, top to bottom (`Rollouts._make_batches`):

1. publish the weights to the sampler: `Rollouts._publish`, tune.rl.sampler
2. draw prompts: `_RolloutRun._sample_draw`, tune.rl.prompts
3. run episodes: `_RolloutRun._run_episodes`, tune.rl.episode_runner
4. assign rewards: `_RolloutRun._submit` and `_assign`, tune.rl.reward_assigner
5. compute advantages and build the batches of the updates: `Rollouts._build`, tune.rl.advantages and tune.rl.batches

What was sampled and rewarded is in the journal, so a killed run samples nothing twice.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import jax
import numpy as np

from dovetail.core.types import Batch
from dovetail.train.report.metrics import Passage
from dovetail.train.state import Position
from dovetail.tune.rl.batches import BatchBuilder, UpdateBatch
from dovetail.tune.rl.completions import Completions
from dovetail.tune.rl.drafter import PolicyDrafter
from dovetail.tune.rl.episode import Episode, EpisodeId
from dovetail.tune.rl.episode_runner import EpisodeGroup, EpisodeRunner, Grammar, Reply
from dovetail.tune.rl.images import RolloutImages
from dovetail.tune.rl.journal import Journal, JournalEntry, TrainedGroups
from dovetail.tune.rl.prompts import PromptRecord, PromptSet
from dovetail.tune.rl.reward_assigner import Computing, RewardAssigner
from dovetail.tune.rl.sampler import PolicySampler, offloaded_optimizer
from dovetail.tune.rl.settings import Rl

MAX_DRAWS = 8  # draws of prompts for one rollout, where dynamic sampling replaces groups


@dataclass
class Rollout:
    """The episodes of a rollout that are trained, by group."""

    groups: list[list[Episode]]
    seconds: dict[str, float] = field(default_factory=dict)  # rollout, reward, sync
    draws: int = 1
    is_recalled: bool = False  # whether all of it was in the journal
    speculation: dict[str, float] = field(default_factory=dict)  # its metrics, if draft tokens were verified

    @property
    def episodes(self) -> list[Episode]:
        """Return all episodes."""
        return [episode for group in self.groups for episode in group]


@dataclass(frozen=True)
class RolloutParts:
    """The parts of a run that a rollout uses."""

    settings: Rl
    prompts: PromptSet
    sampler: PolicySampler
    rewards: RewardAssigner
    builder: BatchBuilder
    journal: Journal
    reply: Reply | None = None  # an environment's, if there is one
    grammar: Grammar | None = None  # constrains the turns of the policy
    drafter: PolicyDrafter | None = None  # trained on the rollouts
    images: RolloutImages | None = None  # of the prompts, if the policy sees images


class Rollouts:
    """Sample a rollout for every `updates_per_rollout` steps, and give the loop its batches."""

    ahead, waits = 1, False

    def __init__(self, parts: RolloutParts, completions: Completions):
        self._parts, self._settings, self._completions = parts, parts.settings, completions
        self._current: tuple[int, list[Batch]] = (-1, [])
        self._notes: dict[int, Mapping[str, float]] = {}
        self._passages: dict[int, Passage | None] = {}
        self._documents: dict[int, int] = {}
        self._drafter_published = False  # whether the engine has the newest drafter
        self._next: tuple[int, Future[Rollout]] | None = None  # with max_staleness, what is sampled meanwhile
        self._thread = ThreadPoolExecutor(1, "rollout") if self._settings.engine.max_staleness else None

    # --- what the loop asks for ---------------------------------------------------------------------------------------

    def get(self, at: Position) -> Batch:
        """Return batch number `at.cursor`; sample its rollout if it is the first batch of one."""
        number, update = divmod(at.cursor, self._settings.updates_per_rollout)
        if self._current[0] != number:
            self._parts.journal.remove((at.saved or 0) // self._settings.updates_per_rollout)
            self._current = number, self._make_batches(number, at)
        return self._current[1][update % self._settings.updates]

    def documents(self, index: int) -> int:
        """Return the most episodes that a row of the batch holds."""
        return self._documents[index]

    def notes(self, index: int) -> Mapping[str, float]:
        """Return the metrics of the batch and its rollout."""
        return self._notes.pop(index, {})

    def passage(self, index: int) -> Passage | None:
        """Return the table of completions to show after the batch's step, if any."""
        return self._passages.pop(index, None)

    def settle(self) -> None:
        """Wait until a rollout that is sampled meanwhile is in the journal."""
        if self._next:
            self._next[1].result()

    def close(self) -> None:
        """Wait for the thread, and close the journal."""
        if self._thread:
            self._thread.shutdown(wait=True)
        self._parts.journal.close()

    # --- a step -------------------------------------------------------------------------------------------------------

    def _make_batches(self, number: int, at: Position) -> list[Batch]:
        """Sample a rollout and return the batches of one pass over it."""
        settings, first = self._settings, number * self._settings.updates_per_rollout
        rollout = self._sample_stale(number, at) if self._thread else self._sample(number, at)
        if at.cursor == first:  # otherwise they were written before a resume between its updates
            self._passages[first] = self._completions.add(at.step + 1, rollout.groups)
        if not settings.has_teacher:
            self._parts.rewards.failures.end_rollout(has_reward(rollout.episodes), settings.total_rollouts)
        updates = self._build(number, rollout, at, is_first=at.cursor == first)
        if at.cursor == first:
            self._train_drafter(number, rollout, updates, at)
        for i in range(settings.updates_per_rollout):
            update = updates[i % settings.updates]
            self._notes[first + i] = {**update.metrics, **_metrics(rollout, settings, is_first=i == 0)}
            self._documents[first + i] = update.layout.documents
        return [update.batch for update in updates]

    def _sample(self, number: int, at: Position) -> Rollout:
        """Sample a rollout with the current weights."""
        seconds, is_recalled = 0.0, self._read_journal(number).trained is not None
        if not is_recalled:
            seconds = self._publish(at)
        with offloaded_optimizer(at, self._settings.engine.offload_optimizer and not is_recalled):
            rollout = self._run(number, at.step)
        if not is_recalled:
            self._parts.sampler.sleep()
        rollout.seconds["sync"] = seconds
        return rollout

    def _sample_stale(self, number: int, at: Position) -> Rollout:
        """Return the rollout that was sampled during the step before, and start the next one on the thread."""
        assert self._thread is not None
        pending, self._next = self._next, None
        rollout = pending[1].result() if pending and pending[0] == number else self._sample(number, at)
        rollout.seconds["sync"] = self._publish(at)
        self._next = number + 1, self._thread.submit(self._run, number + 1, at.step)
        return rollout

    def _train_drafter(self, number: int, rollout: Rollout, updates: list[UpdateBatch], at: Position) -> None:
        """Train the drafter on a rollout, if it is time. The next rollout to be published uses it."""
        drafter = self._parts.drafter
        if drafter is None or not drafter.is_due(number):
            return
        began = time.monotonic()
        at.state, metrics = drafter.train(at.state, [update.batch for update in updates])
        rollout.speculation |= metrics
        rollout.seconds["drafter"] = time.monotonic() - began
        self._drafter_published = False

    def _publish(self, at: Position) -> float:
        """Publish the weights and return the seconds it took, without the time of the step that computes them."""
        jax.block_until_ready(at.state.step)
        began, drafter = time.monotonic(), None
        if self._parts.drafter and not self._drafter_published:
            drafter, self._drafter_published = self._parts.drafter.weights(at.state), True
        self._parts.sampler.publish(at.state.params, at.step, drafter)
        jax.block_until_ready(self._parts.sampler.llm.engine.runner.weights.params)
        return time.monotonic() - began

    def _run(self, number: int, version: int) -> Rollout:
        """Sample and reward a rollout with the published weights, or read it from the journal."""
        before = self._parts.sampler.draft_counts()
        rollout = _RolloutRun(self._parts, number, version, self._read_journal(number)).run()
        drafts, accepted, saved = np.subtract(self._parts.sampler.draft_counts(), before)
        if drafts:
            rollout.speculation = {"accepted_length": float(1 + accepted / drafts), "seconds_saved": float(saved)}
        return rollout

    def _read_journal(self, number: int) -> JournalEntry:
        """Return what the journal has of a rollout; nothing of one without a reward, which is sampled again."""
        found = self._parts.journal.read(number)
        if found.trained is None or self._settings.has_teacher or has_reward(found.episodes.values()):
            return found
        return JournalEntry({}, {}, None)

    def _build(self, number: int, rollout: Rollout, at: Position, is_first: bool) -> list[UpdateBatch]:
        """Build the batches, with scores by the weights before the first update.

        A run that is resumed between the updates of a rollout does not have these weights: the journal has the scores.
        """
        known = self._parts.journal.scores(number) if rollout.is_recalled and not is_first else None
        advantages = self._parts.builder.advantages(rollout.groups)
        updates = self._parts.builder.build(rollout.groups, advantages, at.state.params, at.state.reference, known)
        if known is None and self._settings.updates_per_rollout > 1:
            self._parts.journal.write_scores(number, [update.scores for update in updates])
        return updates


class _RolloutRun:
    """One rollout: read from the journal what it has, sample and reward the rest."""

    def __init__(self, parts: RolloutParts, number: int, version: int, found: JournalEntry):
        self._parts, self._settings, self._number, self._version = parts, parts.settings, number, version
        self._found, self._episodes = found, found.episodes
        self._seconds, self._draws = {"rollout": 0.0, "reward": 0.0}, 0

    def run(self) -> Rollout:
        trained = self._found.trained
        if trained is None:
            trained = self._sample_groups()
            self._parts.journal.write_trained_groups(self._number, trained)
        groups = [self._group(*each) for each in trained]
        return Rollout(groups, self._seconds, self._draws, is_recalled=self._found.trained is not None)

    def _sample_groups(self) -> TrainedGroups:
        """Draw prompts until enough groups have a gradient, and return the groups to train.

        If too few have one after MAX_DRAWS, the groups of the last draws fill the batch: a step must have rows.
        """
        dynamic, count = self._settings.resolved_loss.dynamic_sampling, self._settings.prompts
        trained, others = [], []
        for draw in range(MAX_DRAWS if dynamic else 1):
            self._sample_draw(draw)
            for group in range(count):
                is_kept = not dynamic or self._parts.builder.has_gradient(self._group(draw, group))
                (trained if is_kept else others).append((draw, group))
            if len(trained) >= count or not has_reward(self._episodes.values()):
                break  # other prompts do not help if every reward fails
        return [*trained, *reversed(others)][:count]

    def _sample_draw(self, draw: int) -> None:
        """Run the episodes of one draw of prompts. A group is rewarded while others still run."""
        self._draws, began = draw + 1, time.monotonic()
        prompts = self._parts.prompts.draw(self._number, self._settings.prompts, draw)
        computing: dict[int, tuple[list[Episode], Computing]] = {}
        groups = [self._missing(draw, group, prompt) for group, prompt in enumerate(prompts)]
        running = {each.group: len(each.members) for each in groups}

        def end(episodes: list[Episode]) -> None:
            self._episodes |= {each.id: each for each in episodes}
            self._parts.journal.write_episodes(self._number, episodes)
            for group in (each.id.group for each in episodes):
                running[group] -= 1
                if not running[group]:
                    computing[group] = self._submit(prompts[group], self._group(draw, group))

        self._run_episodes([each for each in groups if each.members], end)
        sampled = time.monotonic()
        for group, prompt in enumerate(prompts):
            self._assign(*(computing.get(group) or self._submit(prompt, self._group(draw, group))))
        self._seconds["rollout"] += sampled - began
        self._seconds["reward"] += time.monotonic() - sampled

    def _missing(self, draw: int, group: int, prompt: PromptRecord) -> EpisodeGroup:
        """Return the episodes of a group that the journal does not have."""
        count, seed = self._settings.num_generations, self._settings.seed
        members = [m for m in range(count) if EpisodeId(draw, group, m) not in self._episodes]
        state = np.random.SeedSequence((seed, self._number, draw, group)).generate_state(1, np.uint64)
        return EpisodeGroup(prompt, draw, group, members, int(state[0]))

    def _run_episodes(self, groups: list[EpisodeGroup], end: Callable[[list[Episode]], None]) -> None:
        if not groups:
            return
        parts = self._parts
        runner = EpisodeRunner(parts.sampler.llm, self._settings, parts.reply, parts.grammar, images=parts.images)
        write = functools.partial(parts.journal.write_partial_turns, self._number)
        runner.run(groups, self._version, end, self._found.partial, write)

    def _submit(self, prompt: PromptRecord, group: list[Episode]) -> tuple[list[Episode], Computing]:
        """Start to compute the rewards of the episodes that have none yet."""
        new = [episode for episode in group if episode.reward is None and not episode.problems]
        return new, self._parts.rewards.submit(prompt, new) if new else None

    def _assign(self, episodes: list[Episode], computing: Computing) -> None:
        if episodes:
            self._parts.rewards.assign(episodes, computing)
            self._parts.journal.write_rewards(self._number, episodes)

    def _group(self, draw: int, group: int) -> list[Episode]:
        return [self._episodes[EpisodeId(draw, group, member)] for member in range(self._settings.num_generations)]


# --- metrics ----------------------------------------------------------------------------------------------------------


def has_reward(episodes: Iterable[Episode]) -> bool:
    """Return whether any of the episodes has a reward."""
    return any(episode.reward is not None for episode in episodes)


def _metrics(rollout: Rollout, settings: Rl, is_first: bool) -> dict[str, float]:
    """Return the metrics of all episodes. Its seconds are counted in the first update of the rollout."""
    episodes = rollout.episodes
    rewards = [e.reward for e in episodes if e.reward is not None]
    lengths = np.asarray([e.completion_length for e in episodes])
    found = {"completion_length": float(lengths.mean()), "truncated": float(np.mean([e.truncated for e in episodes]))}
    if not settings.has_teacher or rewards:
        mean, std = (np.mean(rewards), np.std(rewards)) if rewards else (np.nan, np.nan)
        missing = np.mean([e.reward is None for e in episodes])
        found |= {"reward": float(mean), "reward_std": float(std), "unjudged": float(missing)}
    if settings.resolved_loss.dynamic_sampling:
        found["draws"] = float(rollout.draws)
    names = dict.fromkeys(name for e in episodes for name in e.rewards)
    for name in names if len(names) > 1 else ():
        values = [value for e in episodes if (value := e.rewards.get(name)) is not None]
        found[f"reward/{name}"] = float(np.mean(values)) if values else float("nan")
    if is_first:
        found |= rollout.speculation
    if took := rollout.seconds.get("rollout"):
        found["rollout_tokens_per_second"] = float(lengths.sum()) / took
    return found | {f"{name}_seconds": took if is_first else 0.0 for name, took in rollout.seconds.items()}
