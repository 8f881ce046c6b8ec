"""The engine: requests in, tokens out, a step at a time.

A step is scheduled and launched while the one before it runs; then the earlier one's tokens are fetched and committed.
So the device always has a step to go on with, and the host's work is hidden behind it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import replace
from operator import attrgetter
from typing import Any

import numpy as np

from dovetail.core.errors import UserError
from dovetail.core.types import Params, Weights
from dovetail.engine.controls import Later
from dovetail.engine.device.buckets import DISPATCH_SECONDS, LEAST_TOKENS, steps_in_time
from dovetail.engine.device.launched import (
    LaunchedStep,
    keep_logprobs,
    keep_prompt_logprobs,
    prompt_logprobs,
    send_logprobs,
    wants_prompt_logprobs,
)
from dovetail.engine.device.runner import Asleep, Runner, drop_weights, put_to_sleep, wake_up
from dovetail.engine.device.sampler import Sampler
from dovetail.engine.request.intake import Intake, Prompt
from dovetail.engine.request.outputs import (
    Completion,
    RequestOutput,
    Update,
    Written,
    completion_of,
    go_on,
    take_in,
    update_of,
    updates_of,
    written_of,
)
from dovetail.engine.request.params import SamplingParams
from dovetail.engine.request.sequence import Request, Sequence, Status
from dovetail.engine.request.stops import Stops
from dovetail.engine.request.text import Text
from dovetail.engine.schedule.plan import Limits, StepPlan
from dovetail.engine.schedule.scheduler import Scheduler
from dovetail.engine.schedule.step_time import Pace, Predictor, predictor
from dovetail.engine.stats import Stats
from dovetail.io.hub import Progress
from dovetail.io.load import load
from dovetail.io.tokenizer import Tokenizer
from dovetail.models.publish import publish

NOTHING: Mapping[int, Written] = {}
_REQUEST = attrgetter("seq.request")
QUIET_SECONDS = 0.5  # without a newcomer amid the work, before several steps are dispatched: those in a row start soon


class Engine:
    """One model on one host. Not thread-safe: an EngineLoop gives it a thread of its own."""

    def __init__(
        self,
        runner: Runner,
        scheduler: Scheduler,
        tokenizer: Tokenizer | None,
        seed: int | None = 0,
        max_decode_steps: int | None = None,
        pace: Pace | None = None,
    ):
        self.runner, self.scheduler, self.tokenizer = runner, scheduler, tokenizer
        self.cfg = runner.cfg
        self.eos_ids = tuple(dict.fromkeys((*self.cfg.eos_ids, *(tokenizer.eos_ids if tokenizer else ()))))
        where = runner.programs.everywhere, runner.programs.history_sharding
        self.sampler = Sampler(self.cfg.vocab, runner.buckets.max_rows, tokenizer, self.eos_ids, *where)
        self.stops = Stops(self.eos_ids, self.sampler.is_done)
        self.intake = Intake(scheduler.config, self.sampler, tokenizer, seed, runner.adapters, not self.cfg.scored)
        self._max_decode_steps = max_decode_steps
        self.pace = pace or Pace(scheduler.config.max_num_batched_tokens)
        self._newcomer = float("-inf")  # when the last one came while others ran
        self._inflight: deque[LaunchedStep] = deque()
        self._answers: dict[str, list[Sequence]] = {}
        self._asleep: Asleep | None = None
        self._dropped = False  # a sleep of level 2 has dropped the weights, and no others have come
        self._paused = False
        self._generated = self._steps = self._computed = self._padding = 0
        self.predicted: Predictor = predictor(self.cfg, runner.compute, runner.programs.devices)

    # --- requests -----------------------------------------------------------------------------------------------------

    def add(
        self, id: str, prompt: Prompt, params: SamplingParams, written: Mapping[int, Written] = NOTHING, **more: Any
    ) -> None:
        """Queue a request (see Intake.request); a bad one is refused here, before anything of it exists. `written`: of
        those of its n that go on from somewhere, what they have already."""
        self.enqueue(self.intake.request(id, prompt, params, **more), written)

    def enqueue(self, request: Request, written: Mapping[int, Written] = NOTHING) -> None:
        if request.id in self._answers:
            raise UserError(f"a request {request.id!r} is under way already")
        if request.adapter:  # it may have been replaced since the request was checked
            request = replace(request, adapter=self.runner.adapters.find(request.adapter.name))
        sequences = [Sequence(request, index) for index in range(request.params.n)]
        try:
            for seq in sequences:
                self._prepare(seq)
                if seq.index in written:
                    go_on(seq, written[seq.index])
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
        updates = self.close([update_of(seq, [], now) for seq in ended])
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
        completions = tuple(completion_of(seq, self.runner.weights.version) for seq in sequences)
        first = sequences[0]
        request, scores = first.request, prompt_logprobs(first)
        return RequestOutput(id, request.prompt, completions, first.cached_tokens, scores, request.adapter)

    def completion(self, id: str, index: int) -> Completion:
        """Of one of a request's n that is done, while others may not be."""
        return completion_of(self._answers[id][index], self.runner.weights.version)

    def written(self, id: str, index: int, tokens: int = 0, parts: int = 0) -> Written:
        """What one of a request's n has so far, beyond the first `tokens` in `parts` (see written_of)."""
        return written_of(self._answers[id][index], tokens, parts)

    def close(self, updates: list[Update]) -> list[Update]:
        """The same updates, but where a request is done with them its last one brings the output, and it is
        forgotten."""
        last = {update.id: i for i, update in enumerate(updates) if update.finish_reason}
        for id, i in last.items():
            if self.is_done(id):
                updates[i] = updates[i]._replace(output=self.output(id))
        return updates

    def stats(self) -> Stats:
        """A snapshot; any thread may ask for it."""
        now = self.scheduler.stats()
        context = now.pages_used * self.scheduler.config.page_size / max(1, now.running)
        predicted = self.predicted.decode(now.running, context)
        return replace(
            now,
            decode_seconds=self.pace.decode_seconds if self.pace.decode_seconds != DISPATCH_SECONDS else 0.0,
            predicted_least=predicted.best if predicted else 0.0,
            predicted_most=predicted.worst if predicted else 0.0,
            generated_tokens=self._generated,
            steps=self._steps,
            computed_tokens=self._computed,
            padding_tokens=self._padding,
            weights_version=self.runner.weights.version,
            sleeping=self.sleeping,
            compiled=self.runner.steps.compilations.begun,
            compile_seconds=self.runner.steps.compilations.seconds,
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
        self.runner.weights = Weights(self.runner.adapters.join(published), version)
        self._dropped = False
        if not keep_cache:
            self.scheduler.preempt_all()
        self.reset_prefix_cache()
        return version

    def read_adapter(self, name: str, path: str, version: int | None = None) -> tuple[Any, ...]:
        """The arguments of put_adapter, from a folder as PEFT writes it; any thread may ask for it."""
        return name, self.runner.adapters.read(name, path), version

    def put_adapter(self, name: str, values: Params, version: int | None = None) -> int:
        """Load an adapter and return its version. One of that name is replaced: requests under way keep the old one, in
        a slot of its own. ValueError if no slot is free."""
        if self.sleeping:
            raise UserError(f"the engine sleeps (level {self.sleeping}): adapters are loaded after wake()")
        adapters, weights = self.runner.adapters, self.runner.weights
        loaded = adapters.put(name, values, version, self._used_slots())
        params = weights.params if self._dropped else adapters.rewrite(weights.params, values, loaded)
        self.runner.weights = replace(weights, params=params)
        return loaded.version

    def offer_adapter(self, name: str, values: Params, version: int | None = None) -> int:
        """`put_adapter`, but return 0 where a slot becomes free when requests under way have ended."""
        return 0 if self._must_wait(name) and not self.sleeping else self.put_adapter(name, values, version)

    def drop_adapter(self, name: str) -> tuple[int, int]:
        """Unload an adapter: no new request gets it, and those under way keep it, or the one that it replaced. Return
        its version and how many these are."""
        version = self.runner.adapters.drop(name).version
        return version, self._users(name, version)

    def await_unused(self, name: str, version: int) -> None:
        """Wait until no request under way has this version of an adapter or an earlier one; for an EngineLoop."""
        if self._users(name, version):
            raise Later

    def _users(self, name: str, version: int) -> int:
        requests = {seq.request.id: seq.request.adapter for seq in self._adapted()}
        return sum(bool(each) and each.name == name and each.version <= version for each in requests.values())

    def await_place(self, name: str) -> None:
        """Wait until there is a slot for an adapter of this name; for an EngineLoop."""
        if self._must_wait(name):
            raise Later

    def _must_wait(self, name: str) -> bool:
        place = self.runner.adapters.place
        return place(name, self._used_slots()) is None and place(name) is not None

    def _used_slots(self) -> set[int]:
        return {seq.request.adapter.number for seq in self._adapted() if seq.request.adapter}

    def _adapted(self) -> Iterator[Sequence]:
        """The sequences under way that have an adapter, which they keep to their end."""
        for sequences in self._answers.values():
            for seq in sequences:
                if seq.request.adapter and seq.status is not Status.FINISHED:
                    yield seq

    def sleep(self, level: int = 1) -> None:
        """Give back the device's memory between two steps: the KV pool, and the weights, which level 1 keeps on the
        host and level 2 drops. Those that run wait, and are computed again after `wake`."""
        if level not in (1, 2):
            raise UserError(f"sleep takes level 1 (weights go to the host) or 2 (weights are dropped); got {level!r}")
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
            raise UserError(f"{what} between steps: call drain() first and take its updates")

    def reset_prefix_cache(self) -> None:
        self.scheduler.reset_prefix_cache()

    def drain(self) -> list[Update]:
        """Take in every step that is under way, planning no further."""
        return [update for step in _emptied(self._inflight) for update in self._commit(step, step.fetch())]

    # --- the loop -----------------------------------------------------------------------------------------------------

    def step(self, prompts_first: bool = False, ended_only: bool = False) -> list[Update]:
        """Plan and launch a step (see Scheduler.schedule), then take in the one before it. `ended_only`: the updates of
        those that it ended, for a caller that waits for outputs. With `prompts_first` steps are as large as they may
        be, and wait for their program to be compiled; else no sequence that decodes waits for others."""
        if self.blocked:
            raise UserError(self.blocked)
        limits = None if prompts_first else self._limits()
        plan = self.scheduler.schedule(self._steps_wanted(), prompts_first, limits)
        if plan is not None:
            try:
                self._inflight.append(self._launch(plan, waits=limits is None))
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
        return self._commit(self._inflight.popleft(), sampled, ended_only)

    def _steps_wanted(self) -> int:
        if self._max_decode_steps == 1 or time.monotonic() - self._newcomer < QUIET_SECONDS:
            return 1
        rows = len(self.scheduler.running)
        compiled = self.runner.buckets.steps_for(rows)
        return self.runner.steps_ready(rows, max({*steps_in_time(self.pace.decode_seconds)} & {*compiled}))

    def _limits(self) -> Limits | None:
        if self.runner.is_warm and self.pace.token_seconds is None:
            return None
        demand = self.scheduler.demand()
        most = self.scheduler.config.max_num_batched_tokens
        return self.runner.limits(demand, min(most, max(self.pace.tokens, demand.decoding + LEAST_TOKENS)))

    def prepare(self, progress: Progress | None = None) -> None:
        """Compile the steps without which nothing can be answered, and measure how long a prompt's takes."""
        self.pace.set(self.runner.prepare(self.sampler, self.pace.tokens, progress))

    def _launch(self, plan: StepPlan, waits: bool = True) -> LaunchedStep:
        requests = {request.id: request for request in map(_REQUEST, plan.rows)}.values()  # few, if each has many rows
        scoring = any(request.params.prompt_logprobs is not None for request in requests)
        scoring = scoring and any(map(wants_prompt_logprobs, plan.rows))
        launched = self.runner.launch(plan, self.sampler, scoring, waits)
        if launched.waited:
            self.pace.rest()
        launched.tokens.copy_to_host_async()
        send_logprobs(launched, {request.params.logprobs for request in requests})
        tokens, steps = plan.num_tokens, plan.steps
        self._steps += steps
        self._computed += tokens * steps
        self._padding += (launched.padded - tokens) * steps
        return launched

    def _commit(self, launched: LaunchedStep, sampled: np.ndarray, ended_only: bool = False) -> list[Update]:
        """`sampled`: the tokens [steps, S] of the step."""
        if self.runner.is_compiling:  # beside a compiler a step is slower than it is
            self.pace.rest()
        self.pace.fetched(launched.plan, launched.padded, bool(self._inflight))
        if launched.hidden is not None:
            keep_prompt_logprobs(launched, self.runner.score)
        gains = self.scheduler.commit(launched.plan, sampled, self.stops)
        scores = keep_logprobs(launched, gains)
        now = time.monotonic()
        self._generated += take_in(gains, now, launched.version)
        return updates_of(gains, now, scores, ended_only)

    # --- one sequence -------------------------------------------------------------------------------------------------

    def _prepare(self, seq: Sequence) -> None:
        params = seq.request.params
        if self.tokenizer is not None and seq.request.text:
            detokenizer = self.tokenizer.stream(context=seq.request.prompt[-8:])
            seq.text = Text(detokenizer, params.stop, params.include_stop_str_in_output)
        self.stops.watch(seq)
        self.sampler.start(seq)


def _emptied(queue: deque) -> Iterator[Any]:
    while queue:
        yield queue.popleft()
