"""The engine: requests in, tokens out, one step at a time.

A step is planned and launched while the previous one runs; then the previous one's tokens are fetched and committed. So
the device always has the next step queued, and the host's work is hidden behind it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import replace
from operator import attrgetter
from typing import Any

import numpy as np

from dovetail.core.errors import RequestError, UserError
from dovetail.core.reporter import Progress
from dovetail.core.types import Params, Weights
from dovetail.engine.device.batch import DISPATCH_SECONDS, LEAST_TOKENS, steps_in_time
from dovetail.engine.device.runner import (
    Asleep,
    LaunchedStep,
    Runner,
    drop_weights,
    keep_logprobs,
    keep_prompt_logprobs,
    prompt_logprobs,
    put_to_sleep,
    send_logprobs,
    wake_up,
    wants_prompt_logprobs,
)
from dovetail.engine.device.sampler import Sampler
from dovetail.engine.interface import EngineStats, Later
from dovetail.engine.request.intake import Intake, Prompt
from dovetail.engine.request.outputs import (
    CompletionOutput,
    OutputDelta,
    PartialOutput,
    RequestOutput,
    completion_of,
    delta_of,
    deltas_of,
    partial_output,
    record_gains,
    resume,
)
from dovetail.engine.request.params import SamplingParams
from dovetail.engine.request.sequence import Request, Sequence, Status, Stops
from dovetail.engine.request.text import OutputText
from dovetail.engine.schedule.plan import StepLimits, StepPlan
from dovetail.engine.schedule.scheduler import Scheduler
from dovetail.engine.schedule.step_time import Pace, Predictor, predictor
from dovetail.engine.spec.speculator import Speculator
from dovetail.io.tokenizer import Tokenizer

_REQUEST = attrgetter("seq.request")
QUIET_SECONDS = 0.5  # without a new request before several steps are dispatched at once: a new one starts sooner


class Engine:
    """Run one model on one host.

    Not thread-safe: an EngineLoop gives it a thread of its own. Methods that any thread may call say so.
    """

    def __init__(
        self,
        runner: Runner,
        scheduler: Scheduler,
        tokenizer: Tokenizer | None,
        seed: int | None = 0,
        max_decode_steps: int | None = None,
        pace: Pace | None = None,
        speculator: Speculator | None = None,
    ):
        self.runner, self.scheduler, self.tokenizer = runner, scheduler, tokenizer
        self.cfg = runner.cfg
        self.eos_ids = tuple(dict.fromkeys((*self.cfg.eos_ids, *(tokenizer.eos_ids if tokenizer else ()))))
        where = runner.programs.everywhere, runner.programs.history_sharding
        self.sampler = Sampler(self.cfg.vocab, runner.buckets.max_rows, tokenizer, self.eos_ids, *where)
        self.stops = Stops(self.eos_ids, self.sampler.is_done)
        can: dict[str, Any] = dict(generates=not self.cfg.scored, vision=self.cfg.vision)
        self.intake = Intake(scheduler.config, self.sampler, tokenizer, seed, runner.adapters, **can)
        self._max_decode_steps = max_decode_steps
        self.pace = pace or Pace(scheduler.config.max_num_batched_tokens)
        self.speculator = speculator
        self._newcomer = float("-inf")  # when a request last arrived while others ran
        self._inflight: deque[LaunchedStep] = deque()
        self._requests: dict[str, list[Sequence]] = {}
        self._asleep: Asleep | None = None
        self._dropped = False  # sleep(level=2) dropped the weights and no new ones have come
        self._paused = False
        self._generated = self._steps = self._computed = self._padding = 0
        self.predicted: Predictor = predictor(self.cfg, runner.compute, runner.programs.devices)

    # --- requests -----------------------------------------------------------------------------------------------------

    def add(
        self,
        id: str,
        prompt: Prompt,
        params: SamplingParams,
        partial: Mapping[int, PartialOutput] | None = None,
        **more: Any,
    ) -> None:
        """Check and queue a request.

        Args:
            id: The request's id.
            prompt: Text, token ids, or token ids with images.
            params: The sampling parameters.
            partial: For sequences that continue from earlier tokens: index -> those tokens.
            **more: See `Intake.request`.

        Raises:
            RequestError: If the request cannot be run; nothing of it is kept.
        """
        self.enqueue(self.intake.request(id, prompt, params, **more), partial)

    def enqueue(self, request: Request, partial: Mapping[int, PartialOutput] | None = None) -> None:
        """Queue a request that `Intake.request` has checked."""
        if request.id in self._requests:
            raise RequestError(f"request id {request.id!r} is already in use", param="request_id")
        if request.adapter:  # it may have been replaced since the request was checked
            request = replace(request, adapter=self.runner.adapters.find(request.adapter.name))
        sequences = [Sequence(request, index) for index in range(request.params.n)]
        try:
            for seq in sequences:
                self._prepare(seq)
                if partial and seq.index in partial:
                    resume(seq, partial[seq.index])
                self.scheduler.add(seq)
        except BaseException:  # all n or none
            self.scheduler.abort(request.id)
            raise
        self._requests[request.id] = sequences
        if self._inflight:
            self._newcomer = time.monotonic()

    def _prepare(self, seq: Sequence) -> None:
        params = seq.request.params
        if self.tokenizer is not None and seq.request.text:
            detokenizer = self.tokenizer.stream(context=seq.request.prompt[-8:])
            seq.text = OutputText(detokenizer, params.stop, params.include_stop_str_in_output)
        self.stops.watch(seq)
        self.sampler.start(seq)

    def abort(self, id: str, index: int | None = None) -> list[OutputDelta]:
        """End a request, or one of its n sequences, at any time.

        Returns:
            The last deltas of the sequences that had not ended. An unknown id gives none.
        """
        wanted = [seq for seq in self._requests.get(id, ()) if index is None or seq.index == index]
        ended = [seq for seq in wanted if seq.status is not Status.FINISHED]
        for seq in ended:
            self.scheduler.finish(seq, "abort")
        if self.speculator:
            self.speculator.finish(ended)
        now = time.monotonic()
        deltas = self.close([delta_of(seq, [], now) for seq in ended])
        if index is None:
            self._requests.pop(id, None)
        return deltas

    def fail_all(self, message: str) -> list[OutputDelta]:
        """End every request with an internal error and reset the scheduler and what steps share.

        The weights, adapters and compiled steps stay. Results of steps in flight are dropped.

        Returns:
            The last deltas of all sequences, with finish_reason "error".
        """
        self._inflight.clear()
        self.scheduler = Scheduler(self.scheduler.config)
        self.runner.renew()
        self.sampler.release()
        self.pace.rest()
        failed = [seq for each in self._requests.values() for seq in each if seq.status is not Status.FINISHED]
        self._requests.clear()
        for seq in failed:
            seq.status, seq.finish_reason, seq.error, seq.text = Status.FINISHED, "error", message, None
        if self.speculator:
            self.speculator.finish(failed)
        now = time.monotonic()
        return [delta_of(seq, [], now) for seq in failed]

    @property
    def has_work(self) -> bool:
        """Return whether a request is unfinished or a step is in flight."""
        return bool(self._inflight) or self.scheduler.has_work

    def is_done(self, id: str) -> bool:
        """Return whether all sequences of a request have ended."""
        return all(seq.status is Status.FINISHED for seq in self._requests[id])

    def output(self, id: str) -> RequestOutput:
        """Return the output of a finished request and forget the request."""
        sequences = self._requests.pop(id)
        completions = tuple(completion_of(seq, self.runner.weights.version) for seq in sequences)
        first = sequences[0]
        request, scores = first.request, prompt_logprobs(first)
        return RequestOutput(id, request.prompt, completions, first.cached_tokens, scores, request.adapter)

    def completion(self, id: str, index: int) -> CompletionOutput:
        """Return one finished completion of a request whose others may go on."""
        return completion_of(self._requests[id][index], self.runner.weights.version)

    def partial_output(self, id: str, index: int, tokens: int = 0, parts: int = 0) -> PartialOutput:
        """Return what a sequence has so far after its first `tokens` tokens (see `outputs.partial_output`)."""
        return partial_output(self._requests[id][index], tokens, parts)

    def close(self, deltas: list[OutputDelta]) -> list[OutputDelta]:
        """Forget the requests that ended with these deltas; their last delta gets the prompt's log-probabilities."""
        last = {delta.request_id: i for i, delta in enumerate(deltas) if delta.finish_reason}
        for id, i in last.items():
            if self.is_done(id):
                deltas[i] = deltas[i]._replace(prompt_logprobs=self.output(id).prompt_logprobs)
        return deltas

    def stats(self) -> EngineStats:
        """Return a snapshot of the engine's state and counters; any thread may call this."""
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
            speculation=self.speculator.counts if self.speculator else None,
        )

    # --- weights and memory -------------------------------------------------------------------------------------------

    def update_weights(self, params: Params, keep_cache: bool = False) -> int:
        """Replace the weights between two steps, also while asleep.

        Args:
            params: Weights as `dt.load` returns them or as a trainer has them (see models.publish). They are copied,
                so that a train step may donate its own.
            keep_cache: See `swap_weights`.

        Returns:
            The new version.
        """
        self._check_idle("weights are replaced")
        return self.swap_weights(self.published(params), keep_cache)

    def published(self, params: Params, take: bool = False) -> Params:
        """Return weights in the layout that the steps are compiled for (see models.publish); for any thread."""
        return self.runner.published(params, take)

    def read_weights(self, path: str, keep_cache: bool = False, version: int | None = None) -> tuple[Any, ...]:
        """Return the arguments of swap_weights with the weights of a path. Any thread may call it.

        Both versions are in memory until the swap, unless the engine sleeps.
        """
        try:
            params = self.runner.read(path)
        except UserError as error:  # it is about the model that was named here
            raise type(error)(str(error), param="path", code=error.code) from None
        return self.published(params, take=True), keep_cache, version

    def swap_weights(self, published: Params, keep_cache: bool = False, version: int | None = None) -> int:
        """Replace the weights by published ones and empty the prefix cache.

        Args:
            published: The result of `published`.
            keep_cache: Whether running sequences keep the keys and values of the old weights. Otherwise their tokens
                are computed again with the new weights.
            version: The new version; by default one more than the old.

        Returns:
            The new version.
        """
        self._check_idle("weights are replaced")
        version = self.runner.weights.version + 1 if version is None else version
        self.runner.weights = Weights(self.runner.adapters.join(published), version)
        self._dropped = False
        if not keep_cache:
            self.scheduler.preempt_all()
        self.reset_prefix_cache()
        return version

    def replace_draft(self, draft: Params) -> None:
        """Replace the draft model's weights by copies of these, between two steps of an engine that is awake.

        It changes how many draft tokens are accepted, not the output.
        """
        self._check_idle("the draft model's weights are replaced")
        assert self.speculator is not None and not self.sleeping
        self.runner.replace_draft(draft)
        self.speculator.length.forget_acceptance()

    def sleep(self, level: int = 1) -> None:
        """Free the device's memory between two steps.

        The KV pool is freed. Level 1 keeps the weights on the host, level 2 drops them. Running sequences wait and are
        computed again after `wake_up`.
        """
        if level not in (1, 2):
            raise UserError(f"`level` must be 1 (weights go to the host) or 2 (weights are dropped), got {level!r}",
                            param="level")  # fmt: skip
        self._check_idle("the engine goes to sleep")
        if self._asleep is None:
            self.scheduler.preempt_all()
            self.reset_prefix_cache()
            self.sampler.release()
            self._asleep = put_to_sleep(self.runner, level)
        if level == 2:  # also from level 1
            drop_weights(self.runner)
            self._asleep, self._dropped = Asleep(2, None, self._asleep.draft), True

    def wake_up(self) -> None:
        """Allocate the memory again. After level 2, `update_weights` must be called before or after this."""
        if self._asleep is not None:
            wake_up(self.runner, self._asleep)
            self._asleep = None

    @property
    def sleeping(self) -> int:
        """Return the level of the sleep; 0 when awake."""
        asleep = self._asleep  # read once: another thread may ask while this one wakes up
        return asleep.level if asleep else 0

    def pause(self) -> None:
        """Take no steps until `resume`. Running sequences keep their pages; new requests wait."""
        self._paused = True

    def resume(self) -> None:
        """Take steps again after `pause`."""
        self._paused = False

    @property
    def blocked(self) -> str | None:
        """Return why no step can be taken now and what to do; None if one can."""
        return self.weightless or ("the engine is paused: call resume() first" if self._paused else None)

    @property
    def weightless(self) -> str | None:
        """Return why no weights are on the device and what to do; None if they are there."""
        if self._asleep is not None:
            return f"the engine is asleep (level {self.sleeping}): call wake_up() first"
        if self._dropped:
            return "sleep(level=2) dropped the weights: call update_weights(params) first"
        return None

    def _check_idle(self, what: str) -> None:
        if self._inflight:
            raise UserError(f"{what} between steps: call drain() first and use the deltas it returns")

    def reset_prefix_cache(self) -> None:
        """Make all cached prefixes unfindable."""
        self.scheduler.reset_prefix_cache()

    # --- adapters -----------------------------------------------------------------------------------------------------

    def read_adapter(self, name: str, path: str, version: int | None = None) -> tuple[Any, ...]:
        """Read a PEFT folder and return the arguments of `put_adapter`; any thread may call this."""
        return name, self.runner.adapters.read(name, path), version

    def put_adapter(self, name: str, values: Params, version: int | None = None) -> int:
        """Load an adapter, or replace the one of that name, and return its version.

        Requests in progress keep the adapter they started with, in a slot of its own.

        Raises:
            UserError: If the engine is asleep or no slot is free.
        """
        if self.sleeping:
            raise UserError(f"the engine is asleep (level {self.sleeping}): call wake_up() before loading an adapter")
        adapters, weights = self.runner.adapters, self.runner.weights
        loaded = adapters.put(name, values, version, self._used_slots())
        params = weights.params if self._dropped else adapters.rewrite(weights.params, values, loaded)
        self.runner.weights = replace(weights, params=params)
        return loaded.version

    def offer_adapter(self, name: str, values: Params, version: int | None = None) -> int:
        """Load an adapter as `put_adapter` does; return 0 if a slot becomes free when requests have ended."""
        return 0 if self._must_wait(name) and not self.sleeping else self.put_adapter(name, values, version)

    def drop_adapter(self, name: str) -> tuple[int, int]:
        """Unload an adapter; requests in progress keep it.

        Returns:
            The adapter's version, and how many requests still use it or an earlier version.
        """
        version = self.runner.adapters.drop(name).version
        return version, self._users(name, version)

    def await_unused(self, name: str, version: int) -> None:
        """Raise Later, for an EngineLoop, while requests use this version of an adapter or an earlier one."""
        if self._users(name, version):
            raise Later

    def await_place(self, name: str) -> None:
        """Raise Later, for an EngineLoop, until there is a slot for an adapter of this name."""
        if self._must_wait(name):
            raise Later

    def _users(self, name: str, version: int) -> int:
        requests = {seq.request.id: seq.request.adapter for seq in self._adapted()}
        return sum(bool(each) and each.name == name and each.version <= version for each in requests.values())

    def _must_wait(self, name: str) -> bool:
        place = self.runner.adapters.place
        return place(name, self._used_slots()) is None and place(name) is not None

    def _used_slots(self) -> set[int]:
        return {seq.request.adapter.number for seq in self._adapted() if seq.request.adapter}

    def _adapted(self) -> Iterator[Sequence]:
        """Yield the unfinished sequences that have an adapter; they keep it to their end."""
        for sequences in self._requests.values():
            for seq in sequences:
                if seq.request.adapter and seq.status is not Status.FINISHED:
                    yield seq

    # --- steps --------------------------------------------------------------------------------------------------------

    def prepare(self, progress: Progress | None = None) -> None:
        """Compile the steps that every request needs, and measure how long a step with a prompt takes."""
        self.pace.set(self.runner.prepare(self.sampler, self.pace.tokens, progress))

    def step(self, prompts_first: bool = False, ended_only: bool = False) -> list[OutputDelta]:
        """Plan and launch a step, then commit the previous one.

        Args:
            prompts_first: Whether steps are as large as possible and wait for their program to be compiled, for the
                highest throughput. Otherwise no decoding sequence waits for another request.
            ended_only: Whether to return only the deltas of sequences that ended.

        Returns:
            The deltas of the committed step.
        """
        if self.blocked:
            raise UserError(self.blocked)
        speculator = self.speculator
        most = speculator.wanted(self.scheduler, self.runner) if speculator else 0
        if speculator and self._inflight and speculator.must_wait(most, self._inflight[-1].plan):
            return self._commit_next(ended_only)
        began = None if self._inflight else time.perf_counter()
        drafts = speculator.propose(self.scheduler.running, most, self.runner) if speculator and most else None
        limits = None if prompts_first or most else self._limits()
        plan = self.scheduler.schedule(1 if most else self._steps_wanted(), prompts_first, limits, drafts)
        if plan is not None:
            plan.requested = most
            try:
                launched = self._launch(plan, waits=limits is None)
            except BaseException:  # it did not run: undo the plan
                self.scheduler.withdraw(plan)
                self.runner.renew()
                self.sampler.release()
                raise
            launched.began = began
            self._inflight.append(launched)
            if len(self._inflight) < 2:
                return []
        return self._commit_next(ended_only) if self._inflight else []

    def _commit_next(self, ended_only: bool) -> list[OutputDelta]:
        sampled = self._inflight[0].fetch()  # a step whose tokens cannot be fetched stays in flight
        return self._commit(self._inflight.popleft(), sampled, ended_only)

    def drain(self) -> list[OutputDelta]:
        """Commit every step in flight without launching another."""
        deltas = []
        while self._inflight:
            step = self._inflight.popleft()
            deltas += self._commit(step, step.fetch())
        return deltas

    def _steps_wanted(self) -> int:
        if self._max_decode_steps == 1 or time.monotonic() - self._newcomer < QUIET_SECONDS:
            return 1
        rows = len(self.scheduler.running)
        compiled = self.runner.buckets.steps_for(rows)
        return self.runner.steps_ready(rows, max({*steps_in_time(self.pace.decode_seconds)} & {*compiled}))

    def _limits(self) -> StepLimits | None:
        if self.runner.is_warm and self.pace.token_seconds is None:
            return None
        demand = self.scheduler.demand()
        most = self.scheduler.config.max_num_batched_tokens
        wanted = max(self.pace.tokens, demand.decoding + LEAST_TOKENS, demand.least_tokens)
        return self.runner.limits(demand, min(most, wanted))

    def _launch(self, plan: StepPlan, waits: bool = True) -> LaunchedStep:
        requests = {request.id: request for request in map(_REQUEST, plan.rows)}.values()  # few, if each has many rows
        scoring = any(request.params.prompt_logprobs is not None for request in requests)
        scoring = scoring and any(map(wants_prompt_logprobs, plan.rows))
        self.runner.propose(plan, self.sampler)
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

    def _commit(self, launched: LaunchedStep, sampled: np.ndarray, ended_only: bool = False) -> list[OutputDelta]:
        """Commit the tokens [steps, S] that a step sampled."""
        if self.runner.is_compiling or launched.plan.encode:  # a step beside a compiler or an encoder takes longer
            self.pace.rest()
        seconds = self.pace.fetched(launched.plan, launched.padded, bool(self._inflight))
        if launched.hidden is not None:
            keep_prompt_logprobs(launched, self.runner.score)
        gains = self.scheduler.commit(launched.plan, sampled, self.stops)
        if self.speculator:
            self.speculator.learn(launched, gains, seconds, not self._inflight, self.runner)
        scores = keep_logprobs(launched, gains)
        now = time.monotonic()
        self._generated += record_gains(gains, now, launched.version)
        return deltas_of(gains, now, scores, ended_only)
