"""Run episodes on an engine, many at a time; each continues as soon as its environment has replied."""

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
from dovetail.tune.rl.episode import Episode, EpisodeId, new_episode
from dovetail.tune.rl.images import RolloutImages
from dovetail.tune.rl.objective import banned_token
from dovetail.tune.rl.partial_turns import PartialTurn, PartialTurns, TurnId
from dovetail.tune.rl.prompts import PromptRecord
from dovetail.tune.rl.sampler import ADAPTER
from dovetail.tune.rl.sections import Sampling
from dovetail.tune.rl.settings import Rl

# Returns an environment's reply to an episode whose policy has ended its turn, as tokens; None: the episode is over, as
# it always is after a truncated turn. It may be slow: it is called on a thread.
Reply = Callable[[Episode], Sequence[int] | None]
# Returns the grammar of the policy's next turn; None: the turn is free.
Grammar = Callable[[Episode], StructuredOutputsParams | None]
NO_TURNS: Mapping[TurnId, PartialTurn] = {}
MIN_LOGPROB = -1e20  # tokens with a log-probability below are not allowed by the grammar
POLL_SECONDS = 0.05  # how long an idle engine waits for an environment before it looks again


@dataclass(frozen=True)
class EpisodeGroup:
    """Episodes of one prompt to run."""

    prompt: PromptRecord
    draw: int
    group: int
    members: Sequence[int]
    seed: int  # the group's; the seed of a member follows from it

    def id(self, member: int) -> EpisodeId:
        """Return the id of a member."""
        return EpisodeId(self.draw, self.group, member)


class EpisodeRunner:
    """Run episodes with the settings of a recipe."""

    def __init__(
        self,
        llm: LLM,
        settings: Rl,
        reply: Reply | None = None,
        grammar: Grammar | None = None,
        num_generations: int = 0,
        images: RolloutImages | None = None,
    ):
        """Create a runner.

        Args:
            llm: The engine.
            settings: The recipe.
            reply: The environment's; without one, an episode has one turn.
            grammar: Constrains the policy's turns.
            num_generations: In place of the recipe's.
            images: Those of the prompts, if the policy sees images.
        """
        self.engine, self.settings, self.reply, self._grammar = llm.engine, settings, reply, grammar
        self.num_generations = num_generations or settings.num_generations
        self._adapter, self._images = ADAPTER if settings.lora else None, images
        banned, tokenizer = banned_token(llm.config), llm.tokenizer
        self._bad_words = (tokenizer.token(banned),) if tokenizer and banned >= 0 else ()

    def run(
        self,
        groups: Sequence[EpisodeGroup],
        version: int,
        on_end: Callable[[list[Episode]], None],
        partial: Mapping[TurnId, PartialTurn] = NO_TURNS,
        on_partial: Callable[[list[PartialTurn]], object] | None = None,
    ) -> None:
        """Run all episodes to their end.

        Args:
            groups: The episodes to run.
            version: Version of the weights in the engine.
            on_end: Called with the episodes that a step of the engine ended.
            partial: Turns to continue from.
            on_partial: Called from time to time with the new tokens of turns that have not ended.
        """
        with without_collection(), ThreadPoolExecutor(8, "environment") as threads:
            running = _Running(self, version, on_end, threads, PartialTurns(self.engine, partial, on_partial))
            try:
                running.run(groups)
            finally:
                running.abort()

    def params(self, max_tokens: int, n: int = 1, seed: int = 0) -> SamplingParams:
        """Return the sampling parameters of a request with `n` sequences."""
        wanted = self.settings.sampling
        return SamplingParams(
            n=n, seed=seed, max_tokens=max_tokens, temperature=wanted.temperature, top_k=wanted.top_k,
            top_p=wanted.top_p, stop=wanted.stop, include_stop_str_in_output=True, logprobs=max(0, wanted.top_k),
            bad_words=self._bad_words,
        )  # fmt: skip

    def add(self, id: str, episode: Episode, params: SamplingParams, written: Mapping[int, PartialOutput]) -> None:
        """Add a request for a turn. The engine detokenises only if it must look for stop strings."""
        if self._grammar:
            params = replace(params, structured_outputs=self._grammar(episode))
        prompt = self._images.prompt(episode) if self._images else episode.tokens.tolist()
        self.engine.add(id, prompt, params, written, adapter=self._adapter, text=bool(params.stop))

    def append_turn(self, episode: Episode, completion: CompletionOutput) -> None:
        """Append the policy's turn to its episode."""
        assert completion.logprobs is not None
        support = None
        if self.settings.has_top_k:
            support = support_of(completion.logprobs, completion.token_ids, self.settings.sampling)
        episode.extend(completion.token_ids, completion.logprobs.array, support)
        episode.text += completion.text
        episode.finish = completion.finish_reason


class _Running:
    """The episodes that are running: each waits for the engine, or for its environment."""

    def __init__(
        self,
        runner: EpisodeRunner,
        version: int,
        on_end: Callable[[list[Episode]], None],
        threads: ThreadPoolExecutor,
        partial: PartialTurns,
    ):
        self._runner, self._version, self._on_end, self._threads = runner, version, on_end, threads
        self._settings, self._reply, self._partial = runner.settings, runner.reply, partial
        self._requests: dict[str, list[tuple[Episode, int] | None]] = {}  # (episode, its seed) of each sequence
        self._replies: dict[Future, tuple[Episode, int]] = {}  # environments that are computing a reply
        self._ended: list[Episode] = []  # since the last step
        self._count = 0

    def run(self, groups: Sequence[EpisodeGroup]) -> None:
        for group in groups:
            self._start(group)
        engine = self._runner.engine
        while self._requests or self._replies:
            if self._requests:
                for update in engine.step(prompts_first=True, ended_only=True):
                    if update.finish_reason:
                        self._end_turn(update.request_id, update.index)
            if self._replies:
                done, _ = wait(self._replies, timeout=0 if self._requests else POLL_SECONDS)
                for future in done:
                    self._take_reply(future)
            if self._ended:
                self._on_end(self._ended)
                self._ended = []
            self._partial.write_if_due()
        engine.drain()

    def abort(self) -> None:
        """Abort the requests that an error leaves behind."""
        for id in list(self._requests):
            self._runner.engine.abort(id)

    def _start(self, group: EpisodeGroup) -> None:
        settings, prompt = self._settings, group.prompt
        episodes = {
            member: new_episode(group.id(member), prompt.index, prompt.tokens, self._version, settings.sampling.top_k)
            for member in group.members
        }
        seeded = [(episode, seed_of(group.seed, member)) for member, episode in episodes.items()]
        left = [each for each in seeded if not self._recall_turn(*each)]
        count = self._runner.num_generations
        if len(left) == count:  # a whole group is one request, whose prompt is computed once
            self._request(left, self._runner.params(settings.max_completion_length, count, group.seed))
            return
        for episode, seed in left:
            self._request([(episode, seed)], self._runner.params(settings.max_completion_length, seed=seed))

    def _recall_turn(self, episode: Episode, seed: int) -> bool:
        """Append the next turn from the journal, if it has the whole of it; return whether it has."""
        known = self._partial.find(episode)
        if known is None or not known.finish:
            return False
        self._runner.append_turn(episode, known.completion)
        self._after_turn(episode, seed)
        return True

    def _request(self, episodes: list[tuple[Episode, int]], params: SamplingParams) -> None:
        self._count += 1
        id = f"episode-{self._count}"
        known = {i: self._partial.find(episode) for i, (episode, _) in enumerate(episodes)}
        written = {i: part.written for i, part in known.items() if part}
        self._runner.add(id, episodes[0][0], params, written)
        self._requests[id] = list(episodes)
        for i, (episode, _) in enumerate(episodes):
            self._partial.follow(id, i, episode)

    def _end_turn(self, id: str, index: int) -> None:
        engine, sequences = self._runner.engine, self._requests[id]
        running, sequences[index] = sequences[index], None
        assert running is not None, "a sequence ends once"
        episode, seed = running
        completion = engine.completion(id, index)
        self._partial.end_turn(id, index, completion, continues=self._reply is not None)
        self._runner.append_turn(episode, completion)
        if not any(sequences):
            engine.abort(id)  # remove the request, which has ended
            del self._requests[id]
        self._after_turn(episode, seed)

    def _after_turn(self, episode: Episode, seed: int) -> None:
        """End the episode after the policy's turn, or ask its environment."""
        if self._reply is None:
            self._end_episode(episode)
        else:
            self._replies[self._threads.submit(self._reply, episode)] = (episode, seed)

    def _take_reply(self, future: Future) -> None:
        episode, seed = self._replies.pop(future)
        reply = future.result()
        used = len(episode.tokens) - episode.prompt_length + len(reply or ())
        left = self._settings.max_completion_length - used
        if reply is None or left < 1:
            episode.finish = episode.finish if reply is None else "length"
            self._end_episode(episode)
            return
        episode.extend(reply)
        if not self._recall_turn(episode, seed):
            self._request([(episode, seed)], self._runner.params(left, seed=seed))

    def _end_episode(self, episode: Episode) -> None:
        self._partial.end_episode(episode)
        self._ended.append(episode)


def support_of(logprobs: Logprobs, tokens: Sequence[int], sampling: Sampling) -> np.ndarray:
    """Return the tokens that each token was drawn from, [tokens, top_k] int32; -1 pads.

    They are cut as the sampler cuts them: the top_k most probable, and of these the ones that have
    less than top_p of the probability before them.
    """
    ids, top = logprobs.top
    values = top.astype(np.float64)
    p = np.exp((values - values[:, :1]) / sampling.temperature)
    share = p / p.sum(axis=1, keepdims=True)
    stays = np.cumsum(share, axis=1) - share < sampling.top_p
    stays |= ids == np.asarray(tokens, np.int32)[:, None]  # a rounding error must not lose the sampled token
    stays &= values > MIN_LOGPROB
    return np.pad(np.where(stays, ids, -1), ((0, 0), (0, sampling.top_k - ids.shape[1])), constant_values=-1)
