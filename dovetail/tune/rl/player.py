"""The player: episodes played on an engine, many at a time, each going on as soon as its environment has answered."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

import numpy as np

from dovetail.engine.llm import LLM, without_collection
from dovetail.engine.params import SamplingParams
from dovetail.engine.sampler import seed_of
from dovetail.engine.sequence import Completion
from dovetail.io.tokenizer import Tokenizer
from dovetail.tune.rl.episode import Episode, Place, begun
from dovetail.tune.rl.settings import Rl
from dovetail.tune.rl.task import Task

# What an environment says to an episode whose policy has ended its turn, as tokens; None: it is over, as it always is
# after a turn that was cut off. It may take its time: it runs on a thread of its own.
Reply = Callable[[Episode], Sequence[int] | None]
ADAPTER = "policy"  # what the engine calls the adapters that are trained
WAIT = 0.05  # seconds that the engine, where it has nothing to do, waits for an environment before it looks again


@dataclass(frozen=True)
class Start:
    """Episodes of one prompt to play."""

    task: Task
    turn: int
    group: int
    members: Sequence[int]
    seed: int  # of the group; a member's own follows from it

    def place(self, member: int) -> Place:
        return Place(self.turn, self.group, member)


class Player:
    def __init__(self, llm: LLM, settings: Rl, reply: Reply | None = None, group_size: int = 0):
        """`reply`: an environment's; without one an episode has one turn. `group_size`: in place of the recipe's."""
        self.engine, self.settings, self.reply = llm.engine, settings, reply
        self.group_size = group_size or settings.group_size
        self._adapter = ADAPTER if settings.lora else None

    def play(self, starts: Sequence[Start], version: int, ended: Callable[[Episode], None]) -> None:
        """To their ends; `ended` is given each as it comes to it."""
        with without_collection(), ThreadPoolExecutor(8, "environment") as threads:
            table = _Table(self, starts, version, ended, threads)
            try:
                table.run()
            finally:
                table.clear()

    def params(self, left: int, n: int = 1, seed: int = 0) -> SamplingParams:
        wanted = self.settings.sampling
        return SamplingParams(
            n=n, seed=seed, max_tokens=left, temperature=wanted.temperature, top_k=wanted.top_k, top_p=wanted.top_p,
            stop=wanted.stop, include_stop_str_in_output=True, logprobs=wanted.top_k,
        )  # fmt: skip

    def add(self, id: str, tokens: Sequence[int], params: SamplingParams) -> None:
        """Text is made of tokens when a turn is over, unless stop strings are looked for in it."""
        self.engine.add(id, list(tokens), params, adapter=self._adapter, text=bool(params.stop))

    def take(self, episode: Episode, completion: Completion) -> None:
        """The policy's turn."""
        assert completion.logprobs is not None
        support = support_of(completion.logprobs, self.settings) if self.settings.has_support else None
        episode.extend(completion.token_ids, completion.logprobs.array, support)
        episode.text += completion.text
        episode.finish = completion.finish_reason


class _Table:
    """The episodes that are being played: each waits for the engine, or for its environment."""

    def __init__(
        self,
        player: Player,
        starts: Sequence[Start],
        version: int,
        ended: Callable[[Episode], None],
        threads: ThreadPoolExecutor,
    ):
        self._player, self._starts, self._version, self._ended, self._threads = player, starts, version, ended, threads
        self._settings, self._reply = player.settings, player.reply
        self._asked: dict[str, list[tuple[Episode, int] | None]] = {}  # request -> (episode, its seed) of each sequence
        self._thinking: dict[Future, tuple[Episode, int]] = {}  # an environment's answers
        self._count = 0

    def run(self) -> None:
        for start in self._starts:
            self._begin(start)
        engine = self._player.engine
        while self._asked or self._thinking:
            if self._asked:
                for update in engine.step(prompts_first=True, ended_only=True):
                    if update.finish_reason:
                        self._turn_over(update.id, update.index)
            if self._thinking:
                done, _ = wait(self._thinking, timeout=0 if self._asked else WAIT)
                for future in done:
                    self._answered(future)
        engine.drain()

    def clear(self) -> None:
        """What an error leaves behind."""
        for id in list(self._asked):
            self._player.engine.abort(id)

    def _begin(self, start: Start) -> None:
        settings, task = self._settings, start.task
        kept = settings.sampling.top_k
        episodes = {
            member: begun(task.number, start.place(member), task.tokens, self._version, kept)
            for member in start.members
        }
        # a whole group is one request, whose prompt is computed once
        count = self._player.group_size
        if list(start.members) == list(range(count)):
            seeds = [seed_of(start.seed, member) for member in start.members]
            params = self._player.params(settings.max_tokens, count, start.seed)
            self._ask(list(zip(episodes.values(), seeds, strict=True)), params)
            return
        for member, episode in episodes.items():
            seed = seed_of(start.seed, member)
            self._ask([(episode, seed)], self._player.params(settings.max_tokens, seed=seed))

    def _ask(self, episodes: list[tuple[Episode, int]], params: SamplingParams) -> None:
        self._count += 1
        id = f"episode-{self._count}"
        self._player.add(id, episodes[0][0].tokens.tolist(), params)
        self._asked[id] = list(episodes)

    def _turn_over(self, id: str, index: int) -> None:
        engine, asked = self._player.engine, self._asked[id]
        playing, asked[index] = asked[index], None
        assert playing is not None, "a sequence ends once"
        episode, seed = playing
        self._player.take(episode, engine.completion(id, index))
        if not any(asked):
            engine.abort(id)  # it is forgotten
            del self._asked[id]
        if self._reply is None:
            self._ended(episode)
        else:
            self._thinking[self._threads.submit(self._reply, episode)] = (episode, seed)

    def _answered(self, future: Future) -> None:
        episode, seed = self._thinking.pop(future)
        said = future.result()
        left = self._settings.max_tokens - (len(episode.tokens) - episode.prompt) - len(said or ())
        if said is None or left < 1:
            episode.finish = episode.finish if said is None else "length"
            self._ended(episode)
            return
        episode.extend(said)
        self._ask([(episode, seed)], self._player.params(left, seed=seed))


def write_texts(episodes: Sequence[Episode], tokenizer: Tokenizer) -> None:
    """Of those that have none yet, without the token that ended a turn. All at once: one by one it takes a good part of
    the time that the engine takes to sample them."""
    bare = [episode for episode in episodes if not episode.text]
    sampled = [e.tokens[e.sampled].tolist() for e in bare]
    told = [tokens[:-1] if e.finish == "stop" else tokens for e, tokens in zip(bare, sampled, strict=True)]
    for episode, text in zip(bare, tokenizer.decode_batch(told), strict=True):
        episode.text = text


def support_of(logprobs: Any, settings: Rl) -> np.ndarray:
    """[tokens, top_k] int32: the words that each was drawn from, as the sampler cuts: the likeliest top_k, and of these
    those before whom less than top_p's share lies; -1 beyond."""
    wanted, rows = settings.sampling, []
    for each in logprobs:
        ids, values = np.asarray([t for t, _ in each.top]), np.asarray([p for _, p in each.top], np.float64)
        p = np.exp((values - values[0]) / wanted.temperature)
        before = np.concatenate([[0.0], np.cumsum(p / p.sum())[:-1]])
        stays = (before < wanted.top_p) | (ids == each.token)  # rounding at the edge does not lose the word itself
        row = np.where(stays, ids, -1)
        rows.append(np.concatenate([row, np.full(wanted.top_k - len(row), -1)]))
    return np.asarray(rows, np.int32).reshape(len(rows), wanted.top_k)
