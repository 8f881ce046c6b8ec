"""The engine: requests in, tokens out, a step at a time.

A step is scheduled and launched while the one before it runs; then the earlier one's tokens are fetched and committed.
So the device always has a step to go on with, and the host's work is hidden behind it.
"""

from __future__ import annotations

import operator
import time
from collections import deque
from collections.abc import Iterator
from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import Any

import numpy as np

from dovetail.core.types import Params, Weights
from dovetail.engine.buckets import STEPS
from dovetail.engine.logprobs import keep_logprobs, keep_prompt_logprobs, prompt_logprobs, wants_prompt_logprobs
from dovetail.engine.params import SamplingParams
from dovetail.engine.plan import Plan
from dovetail.engine.runner import Launched, Runner
from dovetail.engine.sampler import Sampler
from dovetail.engine.scheduler import Scheduler
from dovetail.engine.sequence import Completion, Request, RequestOutput, Sequence, Status
from dovetail.engine.text import Text
from dovetail.io.tokenizer import Tokenizer

DISPATCH_SECONDS = 0.02  # how long a dispatch of several decode steps may take: a newcomer waits for one of them


@dataclass(frozen=True)
class Update:
    """What a step brought one sequence."""

    seq: Sequence
    tokens: list[int]
    text: str
    finished: bool


class Engine:
    """One model on one host. Not thread-safe: AsyncEngine gives it a thread of its own."""

    def __init__(
        self,
        runner: Runner,
        scheduler: Scheduler,
        tokenizer: Tokenizer | None,
        seed: int = 0,
        multi_step: bool = True,
    ):
        self.runner, self.scheduler, self.tokenizer = runner, scheduler, tokenizer
        self.cfg = runner.cfg
        self.eos_ids = tuple(dict.fromkeys((*self.cfg.eos_ids, *(tokenizer.eos_ids if tokenizer else ()))))
        self.sampler = Sampler(self.cfg.vocab, runner.buckets.max_rows, tokenizer, self.eos_ids)
        self._rng = np.random.default_rng(seed)
        self._multi_step = multi_step
        self._step_seconds = DISPATCH_SECONDS  # of one decode step, learnt as they run
        self._last_fetch = 0.0
        self._inflight: deque[Launched] = deque()
        self._answers: dict[str, list[Sequence]] = {}

    # --- requests -----------------------------------------------------------------------------------------------------

    def add(self, id: str, prompt: str | Many[int], params: SamplingParams, priority: int = 0, **more: Any) -> None:
        """Queue a request; a bad one is refused here, before anything of it exists."""
        tokens = self._encode(prompt)
        self._check(tokens, params)
        if params.prompt_logprobs is not None:
            more["cache_salt"] = f"scored:{id}"  # every prompt token must be computed, so none is looked up
        seed = params.seed if params.seed is not None else int(self._rng.integers(2**63))
        request = Request(id, tuple(tokens), params, time.monotonic(), priority, seed=seed, **more)
        if id in self._answers:
            raise ValueError(f"a request {id!r} is under way already")
        sequences = [Sequence(request, index) for index in range(params.n)]
        for seq in sequences:
            self._prepare(seq)
            self.scheduler.add(seq)
        self._answers[id] = sequences

    def abort(self, id: str) -> None:
        """Forget a request, at any moment; an unknown id is nothing to forget."""
        if self._answers.pop(id, None) is not None:
            self.scheduler.abort(id)

    @property
    def has_work(self) -> bool:
        return bool(self._inflight) or self.scheduler.has_work

    def is_done(self, id: str) -> bool:
        return all(seq.status is Status.FINISHED for seq in self._answers[id])

    def output(self, id: str) -> RequestOutput:
        """The finished request; it is forgotten with this."""
        sequences = self._answers.pop(id)
        completions = tuple(self._completion(seq) for seq in sequences)
        first = sequences[0]
        return RequestOutput(id, first.request.prompt, completions, first.cached_tokens, prompt_logprobs(first))

    # --- weights ------------------------------------------------------------------------------------------------------

    def update_weights(self, params: Params) -> int:
        """Swap the weights between two steps; the new version. Old keys and values are of no more use."""
        if self._inflight:
            raise ValueError("weights are swapped between steps: call drain() first and take its updates")
        version = self.runner.weights.version + 1
        self.runner.weights = Weights(params, version)
        self.reset_prefix_cache()
        return version

    def reset_prefix_cache(self) -> None:
        self.scheduler.reset_prefix_cache()

    def drain(self) -> list[Update]:
        """Take in every step that is under way, planning no further."""
        return [update for launched in _emptied(self._inflight) for update in self._commit(launched)]

    # --- the loop -----------------------------------------------------------------------------------------------------

    def step(self) -> list[Update]:
        """Plan and launch a step, then take in the one before it."""
        plan = self.scheduler.schedule(self._steps_wanted())
        if plan is not None:
            self._inflight.append(self._launch(plan))
            if len(self._inflight) < 2:
                return []
        return self._commit(self._inflight.popleft()) if self._inflight else []

    def _steps_wanted(self) -> int:
        if not self._multi_step:
            return 1
        return max(steps for steps in STEPS if steps == 1 or steps * self._step_seconds < 1.2 * DISPATCH_SECONDS)

    def _launch(self, plan: Plan) -> Launched:
        seqs = [row.seq for row in plan.rows]
        scoring = any(wants_prompt_logprobs(row) for row in plan.rows)
        sampler = None if self.sampler.is_greedy(seqs) else self.sampler
        launched = self.runner.launch(plan, sampler, keep_hidden=scoring)
        launched.tokens.copy_to_host_async()
        return launched

    def _commit(self, launched: Launched) -> list[Update]:
        sampled = launched.fetch()
        self._learn_pace(launched.plan)
        if launched.hidden is not None:
            keep_prompt_logprobs(launched, self.runner.weights.params, self.cfg)
        updates = []
        gains = self.scheduler.commit(launched.plan, sampled, self._stop_of)
        if launched.logprobs is not None:
            keep_logprobs(launched, gains)
        for seq, tokens in gains:
            done = seq.status is Status.FINISHED
            seq.extra["version"] = launched.version
            text = self._text_of(seq, done)
            updates.append(Update(seq, tokens, text, done))
        return updates

    def _learn_pace(self, plan: Plan) -> None:
        """The time between two fetches is the later step's own, once steps run back to back."""
        now = time.perf_counter()
        if plan.is_decode and self._last_fetch and self._inflight:
            seconds = (now - self._last_fetch) / plan.steps
            self._step_seconds += 0.3 * (seconds - self._step_seconds)
        self._last_fetch = now

    # --- one sequence -------------------------------------------------------------------------------------------------

    def _encode(self, prompt: str | Many[int]) -> list[int]:
        if not isinstance(prompt, str):
            try:
                return list(map(operator.index, prompt))
            except TypeError:
                raise ValueError(f"a prompt is text or a list of token ids; got {repr(prompt)[:80]}") from None
        if self.tokenizer is None:
            raise ValueError("the model has no tokenizer: give the prompt as token ids")
        return self.tokenizer.encode(prompt)

    def _check(self, tokens: list[int], params: SamplingParams) -> None:
        limit = self.scheduler.config.max_model_len
        if not tokens:
            raise ValueError("the prompt is empty: give at least one token")
        if len(tokens) >= limit:
            raise ValueError(f"the prompt has {len(tokens)} tokens; with max_model_len={limit} at most {limit - 1} fit")
        bad = next((t for t in tokens if not 0 <= t < self.cfg.vocab), None)
        if bad is not None:
            raise ValueError(f"token id {bad} is outside the vocabulary of {self.cfg.vocab}")
        self.sampler.check(params)
        if self.tokenizer is None and params.stop:
            raise ValueError("stop strings need a tokenizer, and the model has none: use stop_token_ids")

    def _prepare(self, seq: Sequence) -> None:
        params = seq.request.params
        if self.tokenizer is not None:
            detokenizer = self.tokenizer.stream(context=seq.request.prompt[-8:])
            seq.extra["text"] = Text(detokenizer, params.stop, params.include_stop_str_in_output)
        self.sampler.start(seq)

    def _stop_of(self, seq: Sequence) -> tuple[str, int | str | None] | None:
        """Whether the token just appended ends the sequence: (finish reason, what stopped it)."""
        params, token = seq.request.params, seq.tokens[-1]
        count = len(seq.tokens) - seq.prompt_len
        early = count < params.min_tokens
        if token in self.eos_ids and not params.ignore_eos and not early:
            return "stop", None
        if token in params.stop_token_ids and not early:
            return "stop", token
        if "text" in seq.extra:
            stop = seq.extra["text"].push(token, may_stop=not early)
            if stop is not None:
                return "stop", stop
        if params.structured and self.sampler.is_done(seq):
            return "stop", None
        return ("length", None) if params.max_tokens is not None and count >= params.max_tokens else None

    def _text_of(self, seq: Sequence, done: bool) -> str:
        text: Text | None = seq.extra.get("text")
        if text is None:
            return ""
        if done:
            text.flush()
        return text.take()

    def _completion(self, seq: Sequence) -> Completion:
        text = seq.extra.get("text")
        return Completion(
            index=seq.index,
            token_ids=tuple(seq.output),
            text=text.whole if text else "",
            finish_reason=seq.finish_reason or "abort",
            stop_reason=seq.stop_reason,
            logprobs=tuple(seq.logprobs) if seq.request.params.logprobs is not None else None,
            weights_version=seq.extra.get("version", 0),
        )


def _emptied(queue: deque) -> Iterator[Any]:
    while queue:
        yield queue.popleft()
