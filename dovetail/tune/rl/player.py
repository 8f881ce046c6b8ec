"""The player: episodes played on an engine, many at a time, each going on as soon as its environment has answered."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace

import numpy as np

from dovetail.engine.device.sampler import seed_of
from dovetail.engine.llm import LLM
from dovetail.engine.request.logprobs import Logprobs
from dovetail.engine.request.outputs import CompletionOutput, PartialOutput
from dovetail.engine.request.params import SamplingParams, StructuredOutputsParams
from dovetail.engine.terminal import without_collection
from dovetail.io.tokenizer import Tokenizer
from dovetail.tune.rl.draft import Draft, Turn
from dovetail.tune.rl.drafts import Drafts
from dovetail.tune.rl.episode import Episode, Place, begun
from dovetail.tune.rl.settings import Rl
from dovetail.tune.rl.task import Task

# What an environment says to an episode whose policy has ended its turn, as tokens; None: it is over, as it always is
# after a turn that was cut off. It may take its time: it runs on a thread of its own.
Reply = Callable[[Episode], Sequence[int] | None]
# What keeps the policy's turn that begins now; None: nothing does.
Grammar = Callable[[Episode], StructuredOutputsParams | None]
ADAPTER = "policy"  # what the engine calls the adapters that are trained
NONE: Mapping[Turn, Draft] = {}
LEAST = -1e20  # log-probabilities below are of words that a grammar does not allow
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
    def __init__(
        self,
        llm: LLM,
        settings: Rl,
        reply: Reply | None = None,
        grammar: Grammar | None = None,
        group_size: int = 0,
    ):
        """`reply`: an environment's; without one an episode has one turn. `group_size`: in place of the recipe's."""
        self.engine, self.settings, self.reply, self._grammar = llm.engine, settings, reply, grammar
        self.group_size = group_size or settings.group_size
        self._adapter = ADAPTER if settings.lora else None

    def play(
        self,
        starts: Sequence[Start],
        version: int,
        ended: Callable[[list[Episode]], None],
        begun: Mapping[Turn, Draft] = NONE,
        drafted: Callable[[list[Draft]], object] | None = None,
    ) -> None:
        """To their ends; `ended` is given those that a step brought to it, and `drafted` from time to time what is new
        of the others. `begun`: drafts to go on from.
        """
        with without_collection(), ThreadPoolExecutor(8, "environment") as threads:
            table = _Table(self, starts, version, ended, threads, Drafts(self.engine, begun, drafted))
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

    def add(self, id: str, episode: Episode, params: SamplingParams, written: Mapping[int, PartialOutput]) -> None:
        """A turn. Text is made of tokens when it is over, unless stop strings are looked for in it."""
        if self._grammar:
            params = replace(params, structured_outputs=self._grammar(episode))
        tokens = episode.tokens.tolist()
        self.engine.add(id, tokens, params, written, adapter=self._adapter, text=bool(params.stop))

    def take(self, episode: Episode, completion: CompletionOutput) -> None:
        """The policy's turn."""
        assert completion.logprobs is not None
        support = None
        if self.settings.has_support:
            support = support_of(completion.logprobs, completion.token_ids, self.settings)
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
        ended: Callable[[list[Episode]], None],
        threads: ThreadPoolExecutor,
        drafts: Drafts,
    ):
        self._player, self._starts, self._version, self._ended, self._threads = player, starts, version, ended, threads
        self._settings, self._reply, self._drafts = player.settings, player.reply, drafts
        self._asked: dict[str, list[tuple[Episode, int] | None]] = {}  # request -> (episode, its seed) of each sequence
        self._thinking: dict[Future, tuple[Episode, int]] = {}  # an environment's answers
        self._done: list[Episode] = []  # since the last step
        self._count = 0

    def run(self) -> None:
        for start in self._starts:
            self._begin(start)
        engine = self._player.engine
        while self._asked or self._thinking:
            if self._asked:
                for update in engine.step(prompts_first=True, ended_only=True):
                    if update.finish_reason:
                        self._turn_over(update.request_id, update.index)
            if self._thinking:
                done, _ = wait(self._thinking, timeout=0 if self._asked else WAIT)
                for future in done:
                    self._answered(future)
            if self._done:
                self._ended(self._done)
                self._done = []
            self._drafts.look()
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
        playing = [(episode, seed_of(start.seed, member)) for member, episode in episodes.items()]
        open_ = [each for each in playing if not self._recalled(*each)]
        # a whole group is one request, whose prompt is computed once
        count = self._player.group_size
        if len(open_) == count:
            self._ask(open_, self._player.params(settings.max_tokens, count, start.seed))
            return
        for episode, seed in open_:
            self._ask([(episode, seed)], self._player.params(settings.max_tokens, seed=seed))

    def _recalled(self, episode: Episode, seed: int) -> bool:
        """Whether a draft has the turn that begins now to its end; it is taken from there then."""
        draft = self._drafts.of(episode)
        if draft is None or not draft.finish:
            return False
        self._player.take(episode, draft.completion)
        self._go_on(episode, seed)
        return True

    def _ask(self, episodes: list[tuple[Episode, int]], params: SamplingParams) -> None:
        self._count += 1
        id = f"episode-{self._count}"
        drafts = {i: self._drafts.of(episode) for i, (episode, _) in enumerate(episodes)}
        written = {i: draft.written for i, draft in drafts.items() if draft}
        self._player.add(id, episodes[0][0], params, written)
        self._asked[id] = list(episodes)
        for i, (episode, _) in enumerate(episodes):
            self._drafts.follow(id, i, episode)

    def _turn_over(self, id: str, index: int) -> None:
        engine, asked = self._player.engine, self._asked[id]
        playing, asked[index] = asked[index], None
        assert playing is not None, "a sequence ends once"
        episode, seed = playing
        completion = engine.completion(id, index)
        self._drafts.turn_over(id, index, completion, goes_on=self._reply is not None)
        self._player.take(episode, completion)
        if not any(asked):
            engine.abort(id)  # it is forgotten
            del self._asked[id]
        self._go_on(episode, seed)

    def _go_on(self, episode: Episode, seed: int) -> None:
        """The policy's turn is over."""
        if self._reply is None:
            self._end(episode)
        else:
            self._thinking[self._threads.submit(self._reply, episode)] = (episode, seed)

    def _end(self, episode: Episode) -> None:
        self._drafts.ended(episode)
        self._done.append(episode)

    def _answered(self, future: Future) -> None:
        episode, seed = self._thinking.pop(future)
        said = future.result()
        left = self._settings.max_tokens - (len(episode.tokens) - episode.prompt) - len(said or ())
        if said is None or left < 1:
            episode.finish = episode.finish if said is None else "length"
            self._end(episode)
            return
        episode.extend(said)
        if not self._recalled(episode, seed):
            self._ask([(episode, seed)], self._player.params(left, seed=seed))


def write_texts(episodes: Sequence[Episode], tokenizer: Tokenizer) -> None:
    """Of those that have none yet, without the token that ended a turn. All at once: one by one it takes a good part of
    the time that the engine takes to sample them.
    """
    bare = [episode for episode in episodes if not episode.text]
    sampled = [e.tokens[e.sampled].tolist() for e in bare]
    told = [tokens[:-1] if e.finish == "stop" else tokens for e, tokens in zip(bare, sampled, strict=True)]
    for episode, text in zip(bare, tokenizer.decode_batch(told), strict=True):
        episode.text = text


def support_of(logprobs: Logprobs, tokens: Sequence[int], settings: Rl) -> np.ndarray:
    """[tokens, top_k] int32: the words that each was drawn from, as the sampler cuts: the likeliest top_k, and of these
    those before whom less than top_p's share lies; -1 beyond.
    """
    wanted, (ids, top) = settings.sampling, logprobs.top
    values = top.astype(np.float64)
    p = np.exp((values - values[:, :1]) / wanted.temperature)
    share = p / p.sum(axis=1, keepdims=True)
    stays = np.cumsum(share, axis=1) - share < wanted.top_p
    stays |= ids == np.asarray(tokens, np.int32)[:, None]  # rounding at the edge does not lose the word itself
    stays &= values > LEAST
    return np.pad(np.where(stays, ids, -1), ((0, 0), (0, wanted.top_k - ids.shape[1])), constant_values=-1)
