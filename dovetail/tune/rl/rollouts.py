"""Rollouts: the batches of reinforcement learning, made by the weights of the moment (a train.rows.Source).

For each rollout the weights are published, prompts drawn, episodes played and judged, groups compared, and rows made of
them. All that was played is in the journal, so a run that is killed plays nothing twice.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import jax
import numpy as np

from dovetail.core.types import Batch, Params
from dovetail.train.report.metrics import Passage
from dovetail.train.state import Position
from dovetail.tune.rl.actor import Actor
from dovetail.tune.rl.completions import Completions
from dovetail.tune.rl.critic import ACTOR
from dovetail.tune.rl.draft import Draft
from dovetail.tune.rl.episode import Episode, Place
from dovetail.tune.rl.journal import Chosen, Found, Journal
from dovetail.tune.rl.lessons import Lesson, Lessons
from dovetail.tune.rl.offload import offloaded
from dovetail.tune.rl.player import Grammar, Player, Reply, Start, write_texts
from dovetail.tune.rl.referee import Referee
from dovetail.tune.rl.rewards.completion import Scored
from dovetail.tune.rl.settings import Rl
from dovetail.tune.rl.task import Task, Tasks

MOST_DRAWS = 8  # of prompts for one rollout, where groups that teach nothing are replaced


@dataclass
class Rollout:
    """What was played for a step, and what became of it."""

    groups: list[list[Episode]]
    seconds: dict[str, float] = field(default_factory=dict)  # rollout, reward, sync
    draws: int = 1
    is_recalled: bool = False  # whether all of it was in the journal

    @property
    def episodes(self) -> list[Episode]:
        return [episode for group in self.groups for episode in group]


class Rollouts:
    ahead, waits = 1, False

    def __init__(
        self,
        settings: Rl,
        tasks: Tasks,
        actor: Actor,
        referee: Referee,
        lessons: Lessons,
        journal: Journal,
        shown: Completions,
        reply: Reply | None = None,
        grammar: Grammar | None = None,
    ):
        """`reply`: an environment's, where episodes have several turns. `grammar`: of each of them."""
        self._settings, self._tasks, self._actor, self._referee = settings, tasks, actor, referee
        self._lessons, self._journal, self._shown, self._reply, self._grammar = lessons, journal, shown, reply, grammar
        self._now: tuple[int, list[Batch]] = (-1, [])
        self._notes: dict[int, Mapping[str, float]] = {}
        self._passages: dict[int, Passage | None] = {}
        self._documents: dict[int, int] = {}
        self._next: tuple[int, Future[Rollout]] | None = None  # what is played meanwhile, where it may be stale
        self._thread = ThreadPoolExecutor(1, "rollout") if settings.engine.stale else None

    # --- what the loop asks for ---------------------------------------------------------------------------------------

    def get(self, at: Position) -> Batch:
        number, update = divmod(at.cursor, self._settings.updates_per_rollout)
        if self._now[0] != number:
            self._journal.forget((at.saved or 0) // self._settings.updates_per_rollout)
            self._now = number, self._made(number, at)
        return self._now[1][update % self._settings.updates]

    def documents(self, index: int) -> int:
        return self._documents[index]

    def notes(self, index: int) -> Mapping[str, float]:
        return self._notes.pop(index, {})

    def passage(self, index: int) -> Passage | None:
        return self._passages.pop(index, None)

    def settle(self) -> None:
        """What is played meanwhile is in the journal to its end."""
        if self._next:
            self._next[1].result()

    def close(self) -> None:
        if self._thread:
            self._thread.shutdown(wait=True)
        self._journal.close()

    # --- a rollout ----------------------------------------------------------------------------------------------------

    def _made(self, number: int, at: Position) -> list[Batch]:
        rollout, settings = self._played(number, at), self._settings
        first = number * settings.updates_per_rollout
        if at.cursor == first:  # else they were written with the first of its updates, before a resume between them
            self._passages[first] = self._shown.add(at.step + 1, rollout.groups)
        if not settings.is_taught:
            self._referee.failures.end_rollout(is_rewarded(rollout.episodes), settings.rollouts)
        lessons = self._scored(number, rollout, at, first)
        for i in range(settings.updates_per_rollout):
            lesson = lessons[i % settings.updates]
            self._notes[first + i] = {**lesson.notes, **self._reported(rollout, spent=i == 0)}
            self._documents[first + i] = lesson.layout.documents
        return [lesson.batch for lesson in lessons]

    def _scored(self, number: int, rollout: Rollout, at: Position, first: int) -> list[Lesson]:
        """With the scores by the weights before the first update: a run that is resumed between two reads them."""
        kept = self._journal.scores(number) if rollout.is_recalled and at.cursor > first else None
        lessons = self._lessons.of(rollout.groups, at.state.params, at.state.reference, kept)
        if kept is None and self._settings.updates_per_rollout > 1:
            self._journal.write_scores(number, [lesson.scores for lesson in lessons])
        return lessons

    def _played(self, number: int, at: Position) -> Rollout:
        """By the weights that are there now; where a rollout may be stale, by those before, while they were trained."""
        if not self._thread:
            return self._play(number, at)
        pending, self._next = self._next, None
        if pending and pending[0] == number:
            rollout = pending[1].result()
        else:
            rollout = self._play(number, at)
        rollout.seconds["sync"] = self._publish(at)
        self._next = number + 1, self._thread.submit(self._sampled, number + 1, at.step)
        return rollout

    def _play(self, number: int, at: Position) -> Rollout:
        seconds, is_there = 0.0, self._found(number).chosen is not None
        if not is_there:
            seconds = self._publish(at)
        with offloaded(at, self._settings.engine.offload and not is_there):
            rollout = self._sampled(number, at.step)
        if not is_there:
            self._actor.rest()
        rollout.seconds["sync"] = seconds
        return rollout

    def _publish(self, at: Position) -> float:
        """Seconds that it took. What is published must have been computed: the trainer's time is not this one's."""
        jax.block_until_ready(at.state.step)
        began = time.monotonic()
        self._actor.publish(self._policy(at.state.params), at.step)
        jax.block_until_ready(self._actor.llm.engine.runner.weights.params)
        return time.monotonic() - began

    def _policy(self, params: Params) -> Params:
        return params[ACTOR] if self._settings.has_critic else params

    def _sampled(self, number: int, version: int) -> Rollout:
        """From the journal what is in it, the rest from the engine."""
        found = self._found(number)
        play, chosen = _Play(self, number, version, found), found.chosen
        if chosen is None:
            chosen = play.all()
            self._journal.choose(number, chosen)
        groups = [play.group(*place) for place in chosen]
        return Rollout(groups, play.seconds, play.draws, is_recalled=found.chosen is not None)

    def _found(self, number: int) -> Found:
        """What the journal has of a rollout; nothing of one without a reward, which is played and judged again."""
        found = self._journal.read(number)
        if found.chosen is None or self._settings.is_taught or is_rewarded(found.episodes.values()):
            return found
        return Found({}, {}, None)

    def _reported(self, rollout: Rollout, spent: bool) -> dict[str, float]:
        """Of all its episodes, trained or not. `spent`: whether its seconds are this update's, which is the first."""
        episodes = rollout.episodes
        rewards = [e.reward for e in episodes if e.reward is not None]
        written = np.asarray([e.written for e in episodes])
        notes = {"answer_tokens": float(written.mean()), "truncated": float(np.mean([e.truncated for e in episodes]))}
        if not self._settings.is_taught or rewards:
            mean, std = (np.mean(rewards), np.std(rewards)) if rewards else (np.nan, np.nan)
            unjudged = np.mean([e.reward is None for e in episodes])
            notes |= {"reward": float(mean), "reward_std": float(std), "unjudged": float(unjudged)}
        if self._settings.wanted.dynamic:
            notes["draws"] = float(rollout.draws)
        names = dict.fromkeys(name for e in episodes for name in e.rewards)
        for name in names if len(names) > 1 else ():
            values = [value for e in episodes if (value := e.rewards.get(name)) is not None]
            notes[f"reward/{name}"] = float(np.mean(values)) if values else float("nan")
        seconds = {f"{what}_seconds": took if spent else 0.0 for what, took in rollout.seconds.items()}
        if took := rollout.seconds.get("rollout"):
            notes["rollout_tokens_per_second"] = float(written.sum()) / took
        return notes | seconds


def is_rewarded(episodes: Iterable[Episode]) -> bool:
    return any(episode.reward is not None for episode in episodes)


class _Play:
    """One rollout: draws of prompts until enough groups teach something."""

    def __init__(self, rollouts: Rollouts, number: int, version: int, found: Found):
        self._of, self._number, self._version = rollouts, number, version
        self._found, self._begun = found.episodes, found.drafts
        self.seconds, self.draws = {"rollout": 0.0, "reward": 0.0}, 0

    def all(self) -> Chosen:
        """The groups to train on. Where none teaches, the last draws do: a step must have rows."""
        settings, chosen, others = self._of._settings, [], []
        for turn in range(MOST_DRAWS if settings.wanted.dynamic else 1):
            self._draw(turn)
            for group in range(settings.prompts):
                teaches = not settings.wanted.dynamic or self._of._lessons.teaches(self.group(turn, group))
                (chosen if teaches else others).append((turn, group))
            if len(chosen) >= settings.prompts or not is_rewarded(self._found.values()):
                break  # other prompts do not mend rewards that fail
        return [*chosen, *reversed(others)][: settings.prompts]

    def group(self, turn: int, group: int) -> list[Episode]:
        return [self._found[Place(turn, group, member)] for member in range(self._of._settings.group_size)]

    def _draw(self, turn: int) -> None:
        """Groups are judged while others are still played."""
        settings, judged = self._of._settings, {}
        self.draws = turn + 1
        tasks = self._of._tasks.of(self._number, settings.prompts, turn)

        began = time.monotonic()
        starts = [self._start(turn, group, task) for group, task in enumerate(tasks)]
        open_ = {start.group: len(start.members) for start in starts}

        def keep(episodes: list[Episode]) -> None:
            self._keep(episodes)
            for each in episodes:
                group = each.place.group
                open_[group] -= 1
                if not open_[group]:
                    judged[group] = self._begin(tasks[group], self.group(turn, group))

        if missing := [start for start in starts if start.members]:
            self._player().play(missing, self._version, keep, self._begun, self._keep_drafts)
        played = time.monotonic()
        for group, task in enumerate(tasks):
            ended, future = judged.get(group) or self._begin(task, self.group(turn, group))
            self._end(ended, future)
        self.seconds["rollout"] += played - began
        self.seconds["reward"] += time.monotonic() - played

    def _start(self, turn: int, group: int, task: Task) -> Start:
        members = [m for m in range(self._of._settings.group_size) if Place(turn, group, m) not in self._found]
        seed = np.random.SeedSequence((self._of._settings.seed, self._number, turn, group)).generate_state(1, np.uint64)
        return Start(task, turn, group, members, int(seed[0]))

    def _player(self) -> Player:
        return Player(self._of._actor.llm, self._of._settings, self._of._reply, self._of._grammar)

    def _keep_drafts(self, drafts: list[Draft]) -> None:
        self._of._journal.write_drafts(self._number, drafts)

    def _keep(self, episodes: list[Episode]) -> None:
        self._found |= {each.place: each for each in episodes}
        self._of._journal.write(self._number, episodes)

    def _begin(self, task: Task, group: list[Episode]) -> tuple[list[Episode], Future[list[Scored]] | None]:
        """Those of a group that have not been judged, and the judgement under way."""
        open_ = [episode for episode in group if episode.reward is None and not episode.problems]
        write_texts(open_, self._of._actor.tokenizer)
        return open_, self._of._referee.begin(task, open_) if open_ else None

    def _end(self, open_: list[Episode], judged: Future[list[Scored]] | None) -> None:
        if open_:
            self._of._referee.end(open_, judged)
            self._of._journal.judge(self._number, open_)
