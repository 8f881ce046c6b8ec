"""The engine: requests in, tokens out, a step at a time.

A step is scheduled and launched while the one before it runs; then the earlier one's tokens are fetched and committed.
So the device always has a step to go on with, and the host's work is hidden behind it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from dovetail.core.types import Params, Weights
from dovetail.engine.buckets import STEPS
from dovetail.engine.intake import Intake, Prompt
from dovetail.engine.logprobs import keep_logprobs, keep_prompt_logprobs, prompt_logprobs, wants_prompt_logprobs
from dovetail.engine.params import SamplingParams
from dovetail.engine.plan import StepPlan
from dovetail.engine.runner import LaunchedStep, Runner
from dovetail.engine.sampler import Sampler
from dovetail.engine.scheduler import Scheduler
from dovetail.engine.sequence import Completion, Request, RequestOutput, Sequence, Status, Update
from dovetail.engine.sleep import Asleep, drop_weights, put_to_sleep, wake_up
from dovetail.engine.stats import Stats
from dovetail.engine.text import Text
from dovetail.io.load import load
from dovetail.io.tokenizer import Tokenizer
from dovetail.models.publish import publish

DISPATCH_SECONDS = 0.02  # how long a dispatch of several decode steps may take: a newcomer waits for one of them
QUIET_SECONDS = 0.5  # without a newcomer amid the work, before several steps are dispatched: those in a row start soon


class Engine:
    """One model on one host. Not thread-safe: an EngineLoop gives it a thread of its own."""

    def __init__(
        self,
        runner: Runner,
        scheduler: Scheduler,
        tokenizer: Tokenizer | None,
        seed: int | None = 0,
        multi_step: bool = True,
    ):
        self.runner, self.scheduler, self.tokenizer = runner, scheduler, tokenizer
        self.cfg = runner.cfg
        self.eos_ids = tuple(dict.fromkeys((*self.cfg.eos_ids, *(tokenizer.eos_ids if tokenizer else ()))))
        self.sampler = Sampler(self.cfg.vocab, runner.buckets.max_rows, tokenizer, self.eos_ids)
        self.intake = Intake(scheduler.config, self.sampler, tokenizer, seed)
        self._multi_step = multi_step
        self._step_seconds = DISPATCH_SECONDS  # of one decode step, learnt as they run
        self._last_fetch = 0.0
        self._newcomer = float("-inf")  # when the last one came while others ran
        self._inflight: deque[LaunchedStep] = deque()
        self._answers: dict[str, list[Sequence]] = {}
        self._asleep: Asleep | None = None
        self._dropped = False  # a sleep of level 2 has dropped the weights, and no others have come
        self._paused = False
        self._generated = self._steps = self._computed = self._padding = 0

    # --- requests -----------------------------------------------------------------------------------------------------

    def add(self, id: str, prompt: Prompt, params: SamplingParams, **more: Any) -> None:
        """Queue a request (see Intake.request); a bad one is refused here, before anything of it exists."""
        self.enqueue(self.intake.request(id, prompt, params, **more))

    def enqueue(self, request: Request) -> None:
        if request.id in self._answers:
            raise ValueError(f"a request {request.id!r} is under way already")
        sequences = [Sequence(request, index) for index in range(request.params.n)]
        try:
            for seq in sequences:
                self._prepare(seq)
                self.scheduler.add(seq)
        except BaseException:  # all n or none
            self.scheduler.abort(request.id)
            raise
        self._answers[request.id] = sequences
        if self._inflight:
            self._newcomer = time.monotonic()

    def abort(self, id: str, index: int | None = None) -> list[Update]:
        """End a request, or that one of its n, at any moment: the last updates of those of its sequences that were not
        done. A request is forgotten with the last of them; an unknown id is nothing to forget."""
        wanted = [seq for seq in self._answers.get(id, ()) if index is None or seq.index == index]
        ended = [seq for seq in wanted if seq.status is not Status.FINISHED]
        for seq in ended:
            self.scheduler.finish(seq, "abort")
        now = time.monotonic()
        updates = self.close([self._update(seq, [], now, seq.version) for seq in ended])
        if index is None:
            self._answers.pop(id, None)
        return updates

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

    def close(self, updates: list[Update]) -> list[Update]:
        """The same updates, but where a request is done with them its last one brings the output, and it is
        forgotten."""
        last = {update.id: i for i, update in enumerate(updates) if update.finish_reason and self.is_done(update.id)}
        for id, i in last.items():
            updates[i] = updates[i]._replace(output=self.output(id))
        return updates

    def stats(self) -> Stats:
        """A snapshot; any thread may ask for it."""
        return replace(
            self.scheduler.stats(),
            generated_tokens=self._generated,
            steps=self._steps,
            computed_tokens=self._computed,
            padding_tokens=self._padding,
            weights_version=self.runner.weights.version,
            sleeping=self.sleeping,
        )

    # --- weights and memory -------------------------------------------------------------------------------------------

    def update_weights(self, params: Params, keep_cache: bool = False) -> int:
        """Swap the weights between two steps, also asleep; their version. They come as `dt.load` gives them or as a
        trainer has them (see models.publish) and are copied: a train step may donate its own."""
        self._check_idle("weights are swapped")
        return self.swap_weights(self.published(params), keep_cache)

    def published(self, params: Params, take: bool = False) -> Params:
        """In the form that the steps are compiled for (see models.publish); any thread may ask for it."""
        return publish(params, self.cfg, self.runner.compute.dtype, self.runner.placement, take)

    def read_weights(self, path: str, *more: Any) -> tuple[Any, ...]:
        """The arguments of swap_weights, with weights from a path; any thread may ask for it. Both versions are in
        memory until the new one is in place, unless the engine sleeps."""
        params = load(path, self.runner.compute.dtype, self.runner.placement).params
        return self.published(params, take=True), *more

    def swap_weights(self, published: Params, keep_cache: bool = False, version: int | None = None) -> int:
        """Take published weights; their version, one more than before unless given. Whoever begins later finds nothing
        that the old ones computed. Those that run compute their tokens so far again, as if the new weights had been
        given them; with `keep_cache` they go on at once with the keys and values of the old weights."""
        self._check_idle("weights are swapped")
        version = self.runner.weights.version + 1 if version is None else version
        self.runner.weights = Weights(published, version)
        self._dropped = False
        if not keep_cache:
            self.scheduler.preempt_all()
        self.reset_prefix_cache()
        return version

    def sleep(self, level: int = 1) -> None:
        """Give back the device's memory between two steps: the KV pool, and the weights, which level 1 keeps on the
        host and level 2 drops. Those that run wait, and are computed again after `wake`."""
        if level not in (1, 2):
            raise ValueError(f"sleep takes level 1 (weights go to the host) or 2 (weights are dropped); got {level!r}")
        self._check_idle("an engine goes to sleep")
        if self._asleep is None:
            self.scheduler.preempt_all()
            self.reset_prefix_cache()
            self.sampler.release()
            self._asleep = put_to_sleep(self.runner, level)
        if level == 2:  # from level 1 too
            drop_weights(self.runner)
            self._asleep, self._dropped = Asleep(2, None), True

    def wake(self) -> None:
        """Take the memory again. After level 2 new weights must come, before this or after it."""
        if self._asleep is not None:
            wake_up(self.runner, self._asleep)
            self._asleep = None

    @property
    def sleeping(self) -> int:
        """The level; 0: awake."""
        asleep = self._asleep  # read once: another thread may ask while this one wakes
        return asleep.level if asleep else 0

    def pause(self) -> None:
        """No more steps until `resume`. What runs keeps its pages, and what comes waits."""
        self._paused = True

    def resume(self) -> None:
        self._paused = False

    @property
    def blocked(self) -> str | None:
        """Why no step can be taken now, and what to do; None: one can."""
        return self.weightless or ("the engine is paused: call resume() first" if self._paused else None)

    @property
    def weightless(self) -> str | None:
        """Why there are no weights on the device, and what to do; None: they are there."""
        if self._asleep is not None:
            return f"the engine sleeps (level {self.sleeping}): call wake() first"
        if self._dropped:
            return "sleep(level=2) dropped the weights: give new ones with update_weights(params) first"
        return None

    def _check_idle(self, what: str) -> None:
        if self._inflight:
            raise ValueError(f"{what} between steps: call drain() first and take its updates")

    def reset_prefix_cache(self) -> None:
        self.scheduler.reset_prefix_cache()

    def drain(self) -> list[Update]:
        """Take in every step that is under way, planning no further."""
        return [update for step in _emptied(self._inflight) for update in self._commit(step, step.fetch())]

    # --- the loop -----------------------------------------------------------------------------------------------------

    def step(self, prompts_first: bool = False) -> list[Update]:
        """StepPlan and launch a step (see Scheduler.schedule), then take in the one before it."""
        if self.blocked:
            raise ValueError(self.blocked)
        plan = self.scheduler.schedule(self._steps_wanted(), prompts_first)
        if plan is not None:
            try:
                self._inflight.append(self._launch(plan))
            except BaseException:  # it did not run: nothing may be found, or waited for, that it would have made
                self.scheduler.withdraw(plan)
                self.runner.renew()
                self.sampler.release()
                raise
            if len(self._inflight) < 2:
                return []
        if not self._inflight:
            return []
        sampled = self._inflight[0].fetch()  # a step that cannot be fetched stays under way
        return self._commit(self._inflight.popleft(), sampled)

    def _steps_wanted(self) -> int:
        if not self._multi_step or time.monotonic() - self._newcomer < QUIET_SECONDS:
            return 1
        return max(steps for steps in STEPS if steps == 1 or steps * self._step_seconds < 1.2 * DISPATCH_SECONDS)

    def _launch(self, plan: StepPlan) -> LaunchedStep:
        seqs = [row.seq for row in plan.rows]
        scoring = any(wants_prompt_logprobs(row) for row in plan.rows)
        launched = self.runner.launch(plan, self.sampler, self.sampler.kind(seqs), keep_hidden=scoring)
        launched.tokens.copy_to_host_async()
        tokens, steps = plan.num_tokens, plan.steps
        self._steps += steps
        self._computed += tokens * steps
        self._padding += (launched.padded - tokens) * steps
        return launched

    def _commit(self, launched: LaunchedStep, sampled: list[list[int]]) -> list[Update]:
        self._learn_pace(launched.plan)
        if launched.hidden is not None:
            keep_prompt_logprobs(launched, self.runner)
        gains = self.scheduler.commit(launched.plan, sampled, self._stop_of)
        if launched.logprobs is not None:
            keep_logprobs(launched, gains)
        now, version = time.monotonic(), launched.version
        for seq, tokens in gains:
            self._generated += len(tokens)
            if not seq.versions or seq.versions[-1][1] != version:
                seq.versions.append((len(seq.tokens) - len(tokens) - seq.prompt_len, version))
        return [self._update(seq, tokens, now, version) for seq, tokens in gains]

    def _update(self, seq: Sequence, tokens: list[int], now: float, version: int) -> Update:
        done, times, request = seq.status is Status.FINISHED, seq.times, seq.request
        if times.first_token is None and tokens:
            times.first_token = now
        logprobs = None
        if request.params.logprobs is not None:
            logprobs = seq.logprobs[len(seq.logprobs) - len(tokens) :]
        text = "" if seq.text is None else seq.text.take(done)
        if not done:
            return Update(request.id, seq.index, tokens, text, now, times, seq.cached_tokens, version, logprobs)
        times.finished = now
        ended = seq.finish_reason, seq.stop_reason, seq.grammar_error
        return Update(request.id, seq.index, tokens, text, now, times, seq.cached_tokens, version, logprobs, *ended)

    def _learn_pace(self, plan: StepPlan) -> None:
        """The time between two fetches is the later step's own, once steps run back to back."""
        now = time.perf_counter()
        if plan.is_decode and self._last_fetch and self._inflight:
            seconds = (now - self._last_fetch) / plan.steps
            self._step_seconds += 0.3 * (seconds - self._step_seconds)
        self._last_fetch = now if self._inflight else 0.0  # what follows a rest says nothing of the pace

    # --- one sequence -------------------------------------------------------------------------------------------------

    def _prepare(self, seq: Sequence) -> None:
        params = seq.request.params
        if self.tokenizer is not None and seq.request.text:
            detokenizer = self.tokenizer.stream(context=seq.request.prompt[-8:])
            seq.text = Text(detokenizer, params.stop, params.include_stop_str_in_output)
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
        if seq.text is not None:
            stop = seq.text.push(token, may_stop=not early)
            if stop is not None:
                return "stop", stop
        if params.structured and self.sampler.is_done(seq):
            return "stop", seq.grammar_error  # where the grammar could not go on, why
        return ("length", None) if params.max_tokens is not None and count >= params.max_tokens else None

    def _completion(self, seq: Sequence) -> Completion:
        return Completion(
            index=seq.index,
            token_ids=tuple(seq.output),
            text=seq.text.whole if seq.text else "",
            finish_reason=seq.finish_reason or "abort",
            stop_reason=seq.stop_reason,
            logprobs=tuple(seq.logprobs) if seq.request.params.logprobs is not None else None,
            weights_version=seq.version if seq.versions else self.runner.weights.version,
            weights_versions=tuple(seq.versions),
            times=seq.times,
        )


def _emptied(queue: deque) -> Iterator[Any]:
    while queue:
        yield queue.popleft()
