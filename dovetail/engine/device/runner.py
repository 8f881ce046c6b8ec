"""Runner: runs plans on the device. It holds weights, pages, last tokens and the compiled steps.

A launch returns at once; its tokens are fetched when they are needed, while the next step already runs. Sampled tokens
stay on the device, in `last` [slots + 1] (the last slot is padding's), and feed the next step from there.
LaunchedStep is a step in flight, whose log-probabilities are copied to its sequences.

S rows, T tokens, D model dim.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dovetail.core.formats import BLOCKS
from dovetail.core.types import Cache, Packed, Params, Weights
from dovetail.engine.device.adapters import Adapters
from dovetail.engine.device.arrays import abstract_of, is_abstract, zeros_of
from dovetail.engine.device.batch import Packer, Shape
from dovetail.engine.device.encoder import Encoded, EncoderShape, pack_items
from dovetail.engine.device.following import Followed, with_draft
from dovetail.engine.device.programs import CompiledSteps, Programs, ProgramShape, StepProgram, limits_of, without_tower
from dovetail.engine.device.sampler import Sampler
from dovetail.engine.device.step import DeviceState, StepOutput, score
from dovetail.engine.request.logprobs import Logprobs, Scores, TokenLogprob, Top
from dovetail.engine.request.sequence import Sequence
from dovetail.engine.schedule.plan import UNKNOWN, Gain, PlanRow, StepDemand, StepLimits, StepPlan
from dovetail.io.load import load
from dovetail.models.decoder import forward
from dovetail.models.formats import formats_of
from dovetail.models.publish import publish
from dovetail.models.spec import VISION
from dovetail.ops.adapter import choose

STAND_IN_TOKENS = 64  # of the step that is used while others are not compiled yet
ROWS_AT_ONCE = 8  # whole rows of the page table that one call writes
CHUNK = 128  # prompt positions scored at a time, so that not all their logits are in memory at once
Score = Callable[[jax.Array, np.ndarray], tuple[jax.Array, ...]]  # Runner.score


# --- a launched step and its log-probabilities ------------------------------------------------------------------------


@dataclass
class LaunchedStep:
    """Hold a step in flight; its results are on the device."""

    plan: StepPlan
    tokens: jax.Array  # [steps, S]
    logprobs: tuple[jax.Array, ...] | None = None  # [steps, S, ...]: see ops.sample.logprobs
    hidden: jax.Array | None = None  # [T, D], if requested
    version: int = 0  # of the weights
    padded: int = 0  # tokens that a device step computes, with padding
    waited: bool = False  # whether the launch waited for its program to be compiled
    began: float | None = None  # when it was planned, if nothing was in flight then

    def fetch(self) -> np.ndarray:
        """Return the sampled tokens [steps, S]; columns of rows that do not sample and of padding are meaningless."""
        return np.asarray(self.tokens)


def send_logprobs(launched: LaunchedStep, asked: set[int | None]) -> None:
    """Start copying the requested log-probabilities to the host.

    Args:
        launched: The step.
        asked: The values of `SamplingParams.logprobs` of its rows. The most probable tokens, which are many times as
            much data, are copied only if some row requests them.
    """
    arrays = launched.logprobs if asked != {None} else None
    for array in arrays or ():
        if array.ndim == 2 or any(asked):
            array.copy_to_host_async()


def keep_logprobs(launched: LaunchedStep, gains: list[Gain]) -> list[Scores | None]:
    """Add the log-probabilities of the kept tokens to their sequences; return them for each gain."""
    asked = {seq.request.params.logprobs for seq, _, _ in gains}
    if launched.logprobs is None or not asked - {None}:
        return [None] * len(gains)
    value, rank, *top = launched.logprobs
    rows = len(launched.plan.rows)
    values, ranks = (np.asarray(array)[:, :rows].T.tolist() for array in (value, rank))  # a list for each row
    top = [np.asarray(array) for array in top] if any(asked) else []
    kept: list[Scores | None] = []
    for seq, tokens, i in gains:
        new = None
        if seq.scores is not None:
            new = values[i], ranks[i], None
            if top or len(tokens) < len(values[i]):
                new = _cut(new, len(tokens), [array[:, i] for array in top], seq.request.params.logprobs or 0)
            seq.scores.append(new)
        kept.append(new)
    return kept


def _cut(scores: Scores, count: int, top: list[np.ndarray], most: int) -> Scores:
    """Return the scores of the first `count` tokens, with the `most` most probable tokens beside each."""
    values, ranks, _ = scores
    return values[:count], ranks[:count], _tops([array[:count] for array in top], most) if most else None


def wants_prompt_logprobs(row: PlanRow) -> bool:
    """Return whether a row computes prompt tokens whose log-probabilities are requested."""
    seq = row.seq
    return seq.request.params.prompt_logprobs is not None and seq.index == 0 and row.start < seq.prompt_len - 1


def keep_prompt_logprobs(launched: LaunchedStep, score: Score) -> None:
    """Score the prompt tokens that this step's hidden states predict: position p predicts token p + 1."""
    first = 0
    for row in launched.plan.rows:
        if wants_prompt_logprobs(row):
            _score_row(launched, row, first, score)
        first += row.count


def _score_row(launched: LaunchedStep, row: PlanRow, first: int, score: Score) -> None:
    assert launched.hidden is not None
    prompt, found = row.seq.request.prompt, row.seq.prompt_logprobs
    end = min(row.start + row.count, len(prompt) - 1)
    for start in range(row.start, end, CHUNK):
        targets = prompt[start + 1 : min(start + CHUNK, end) + 1]
        at = np.minimum(first + start - row.start + np.arange(CHUNK), launched.hidden.shape[0] - 1)
        padded = np.zeros(CHUNK, np.int32)
        padded[: len(targets)] = targets
        values, ranks, *top = (np.asarray(a)[: len(targets)] for a in score(launched.hidden[at], padded))
        tops = _tops(top, row.seq.request.params.prompt_logprobs or 0)
        found.update(enumerate(Logprobs(targets, [(values.tolist(), ranks.tolist(), tops)]), start + 1))


def prompt_logprobs(seq: Sequence) -> tuple[TokenLogprob | None, ...] | None:
    """Return one entry per prompt token, if requested.

    The first is None because nothing precedes it, and those of image tokens are: the model does not predict images.
    """
    if seq.request.params.prompt_logprobs is None:
        return None
    images = {i for span in seq.request.spans for i in range(span.start, span.end)}
    return tuple(None if i in images else seq.prompt_logprobs.get(i) for i in range(seq.prompt_len))


def _tops(top: list[np.ndarray], count: int) -> list[Top]:
    """Return the first `count` of log-probabilities and tokens [n, k]."""
    values, ids = (array[:, :count].tolist() for array in top)
    return list(zip(ids, values, strict=True))


# --- the runner -------------------------------------------------------------------------------------------------------


class Runner:
    """Run plans with one set of weights and one KV pool."""

    def __init__(
        self,
        programs: Programs,
        weights: Weights,
        num_pages: int,
        adapters: Adapters,
        steps: CompiledSteps,
        draft: Params | None = None,
    ):
        self.programs, self.adapters, self.draft = programs, adapters, draft
        self.weights, self._formats = weights, formats_of(weights.params)
        self.cfg, self.compute, self.buckets = programs.cfg, programs.compute, programs.buckets
        self.page_size, self.platform, self.placement = programs.page_size, programs.platform, programs.placement
        self.packer = Packer(self.buckets.max_rows)
        self.num_pages, self.is_warm = num_pages, False  # warm: every step that a plan may need is compiled
        self._allocate()
        self.steps = steps
        steps.belong_to(self._program)
        self._set_rows = jax.jit(lambda tables, slots, rows: tables.at[slots].set(rows), donate_argnums=0)

    def _allocate(self) -> None:
        self.cache: Cache | None = zeros_of(self.programs.pages(self.num_pages))
        self.followed: Followed | None = zeros_of(self.programs.followed)
        self.features: jax.Array | None = zeros_of(self.programs.features)  # of images: see device.encoder
        slots = self.buckets.max_rows + 1
        self.last = jnp.zeros(slots, jnp.int32, device=self.programs.everywhere)
        self.tables = jnp.zeros((slots, self.buckets.max_pages), jnp.int32, device=self.programs.everywhere)
        self.packer.forget()

    @property
    def weights(self) -> Weights:
        """Return the weights with their version; set them again after loading an adapter."""
        return self._weights

    @weights.setter
    def weights(self, weights: Weights) -> None:
        self._weights = weights
        params = self.adapters.on(weights.params)  # as steps take them; made once, it takes a millisecond
        self.params: Params = with_draft(params, self.draft)
        self._step_params = without_tower(self.params)

    def replace_draft(self, draft: Params) -> None:
        """Replace the draft model's weights by copies of these; no step may be in flight."""

        def copied(new: jax.Array, old: Any) -> jax.Array:
            return jax.device_put(jnp.array(new, old.dtype, copy=True), old.sharding)

        self.draft = jax.tree.map(copied, draft, self.draft)
        self.weights = self._weights

    def renew(self) -> None:
        """Allocate pages and last tokens again if a step that failed has consumed the donated ones."""
        state = self.cache, self.last, self.tables, self.followed, self.features
        if any(array.is_deleted() for array in jax.tree.leaves(state)):
            self._allocate()

    # --- launching ----------------------------------------------------------------------------------------------------

    def launch(self, plan: StepPlan, sampler: Sampler, keeps_hidden: bool = False, waits: bool = True) -> LaunchedStep:
        """Launch a plan; `waits`: see CompiledSteps.nearest."""
        waited = self._encode(plan.encode)
        shape = self.steps.nearest(self.buckets.shape_for(plan, keeps_hidden), waits)
        launched = self._launch(plan, shape, sampler)
        launched.waited |= waited
        return launched

    def _encode(self, items: Many[Encoded]) -> bool:
        """Launch the encoder for these items; return whether this waited for a compiler."""
        waited = False
        for shape, few in self.programs.encoder.calls(items) if self.programs.encoder else ():
            waited |= not self.is_warm and not self.steps.is_ready(shape)
            self._run_encoder(shape, few)
        return waited

    def _run_encoder(self, shape: EncoderShape, items: list[Encoded]) -> None:
        assert self.cfg.vision is not None and self.features is not None
        encode = self.steps(shape)  # first: it may fail, and the buffer is donated
        inputs = pack_items(shape, items, self.cfg.vision.tower, nowhere=self.features.shape[0])
        self.features = encode(self.params[VISION], self.features, *inputs)

    def _launch(self, plan: StepPlan, shape: Shape, sampler: Sampler) -> LaunchedStep:
        flat, asked = self._packed(plan, shape, sampler)
        waited = not self.is_warm and not self.steps.is_ready(shape)
        run = self._prompts if shape.is_prompts else self._decode
        out = run(shape, flat, asked, sampler)
        return LaunchedStep(plan, *out, version=self.weights.version, padded=shape.tokens, waited=waited)

    def _packed(self, plan: StepPlan, shape: Shape, sampler: Sampler) -> tuple[np.ndarray, dict[str, Any]]:
        """Return a plan's vector, and the arrays of the sampler with more than a number per row."""
        inputs = sampler.inputs(plan, shape.rows, 0 if shape.proposes else shape.drafts)
        flat, too_many = self.packer.pack(plan, shape, inputs)
        for start in range(0, len(too_many), ROWS_AT_ONCE):
            self._write_tables(too_many[start : start + ROWS_AT_ONCE])
        return flat, dict(bias_ids=inputs.bias_ids, bias=inputs.bias, mask=inputs.mask)

    def _decode(self, shape: Shape, flat: np.ndarray, asked: dict[str, Any], sampler: Sampler) -> StepOutput:
        assert self.cache is not None
        step = self.steps(shape)
        state = DeviceState(self.cache, self.last, self.tables, sampler.history, self.followed)
        out, state = step(self._step_params, state, flat, asked)
        self.cache, self.last, self.tables, sampler.history, self.followed = state
        return out

    def _prompts(self, shape: Shape, flat: np.ndarray, asked: dict[str, Any], sampler: Sampler) -> StepOutput:
        step, sample = self.steps(shape), self.steps(shape.sampler)  # both, before the pages are donated
        images = (self.features,) if shape.images else ()
        given = self._step_params, self.cache, self.tables, self.last, flat, self.followed
        (left, hidden), state = step(*given, *images)
        self.cache, self.tables, self.followed = state
        out, (self.last, sampler.history) = sample(self.last, sampler.history, left, asked)
        return out._replace(hidden=hidden)

    def propose(self, plan: StepPlan, sampler: Sampler) -> None:
        """Replace the UNKNOWN draft tokens of rows whose masks depend on each token by those of the draft model.

        This waits for the device.
        """
        late = [(i, row) for i, row in enumerate(plan.rows) if row.seq.single_step and row.drafts[:1] == (UNKNOWN,)]
        if late:
            verify = self.buckets.shape_for(plan)
            shape = self.steps.nearest(replace(verify, proposes=True))
            found = np.asarray(self._propose(plan, shape, sampler))
            for i, row in late:
                row.drafts = tuple(found[: len(row.drafts), i].tolist())

    def _propose(self, plan: StepPlan, shape: Shape, sampler: Sampler) -> jax.Array:
        assert self.cache is not None
        run, own = self.steps(shape), len(self.cfg.layers)
        flat, asked = self._packed(plan, shape, sampler)
        given = self.cache[:own], self.cache[own:], self.tables, self.last, sampler.history, self.followed
        found, (pages, self.tables) = run(self._step_params, *given, flat, asked)
        self.cache = (*self.cache[:own], *pages)
        return found

    def _write_tables(self, rows: list[tuple[int, list[int]]]) -> None:
        slots = np.full(ROWS_AT_ONCE, self.buckets.max_rows, np.int32)
        tables = np.zeros((ROWS_AT_ONCE, self.buckets.max_pages), np.int32)
        for i, (slot, pages) in enumerate(rows):
            slots[i], tables[i, : len(pages)] = slot, pages
        self.tables = self._set_rows(self.tables, slots, tables)

    def score(self, hidden: jax.Array, targets: np.ndarray) -> tuple[jax.Array, ...]:
        """Return the log-probabilities (see ops.sample.logprobs) of targets [CHUNK] after hidden states [CHUNK, D]."""
        return score(
            without_tower(self.weights.params),
            hidden,
            targets,
            cfg=self.cfg,
            compute=self.compute,
            platform=self.platform,
        )

    def hidden_states(self, params: Params, tokens: jax.Array, count: jax.Array, adapter: jax.Array) -> jax.Array:
        """Return the final hidden states [1, T, D] of tokens [1, T], of which the first `count` are a prompt's.

        `adapter` is the number of its slot, or 0.
        """
        positions = jnp.arange(tokens.shape[1])[None]
        ctx = Packed((positions < count).astype(jnp.int32), platform=self.platform, placement=self.placement)
        with self.compute.products(self.platform):
            return forward(choose(params, jnp.full_like(tokens, adapter)), self.cfg, tokens, positions, ctx)[0]

    def read(self, path: str) -> Params:
        """Return the weights of a path, for `published`; any thread may call this."""
        blocks = next((form for _, form in self._formats if form.name in BLOCKS), None)
        held = None if blocks is None else "gguf_int8" if blocks.activations else "gguf"
        return load(path, self.compute.dtype, self.placement, quantization=held).params

    def published(self, params: Params, take: bool = False) -> Params:
        """Return weights in the layout that the steps are compiled for (see models.publish); for any thread."""
        return publish(params, self.cfg, self.compute.dtype, self.placement, take, self._formats)

    # --- compiling ----------------------------------------------------------------------------------------------------

    def limits(self, demand: StepDemand, budget: int) -> StepLimits:
        """Return what the next step may take of `demand` without waiting for a compiler.

        What it cannot take is compiled in the background. If nothing can go on, the step takes all and waits.
        """
        most = self.buckets.max_rows
        if self.is_warm or not demand.rows:
            return StepLimits(budget, most, most)
        tokens = min(budget, demand.decoding + demand.tokens)
        decode = self.buckets.decode(demand.decoding)
        wanted = self.buckets.mixed(tokens, demand.rows, demand.scores, demand.images) if demand.prompts else decode
        if self.steps.is_ready(wanted):
            return StepLimits(budget, most, most)
        self.steps.have(wanted)
        return limits_of(demand, budget, wanted, self.steps.ready()) or StepLimits(budget, most, most)

    def steps_ready(self, rows: int, steps: int) -> int:
        """Return how many decode steps, up to `steps`, a dispatch can have now; more are compiled in the background."""
        return steps if steps == 1 or self._has(self.buckets.decode(rows, steps)) else 1

    def drafts_ready(self, rows: int, drafts: int) -> bool:
        """Return whether a verify step with this many draft tokens per row can run now; if not, it is compiled."""
        return self._has(self.buckets.verify(rows, drafts))

    def proposal_ready(self, rows: int, drafts: int) -> bool:
        """Return whether draft tokens can be proposed for the host now; if not, the program is compiled."""
        return self._has(self.buckets.proposal(rows, drafts))

    def _has(self, shape: Shape) -> bool:
        """Return whether a program can run now; if not, it is compiled in the background."""
        if self.is_warm or self.steps.is_ready(shape):
            return True
        self.steps.have(shape)
        return False

    def warm_up(self, sampler: Sampler, progress: Callable[[str, int, int], None] | None = None) -> None:
        """Compile all steps, and run each once without a sequence.

        What CUDA sets up when a program first runs would delay the first requests (by 0.7 s for one of them on an
        H200).
        """
        shapes, encoders = self.buckets.usual(), self.programs.encoder.usual() if self.programs.encoder else []
        self._compile_score()
        self.steps.all(self.programs.all_shapes(), progress)
        self.steps.close()
        for shape in encoders:
            self._run_encoder(shape, [])
        for shape in shapes:
            if shape.tokens:
                (self._propose if shape.proposes else self._launch)(StepPlan([]), shape, sampler)
        jax.block_until_ready((self.last, self.features))
        self.is_warm = True

    def prepare(self, sampler: Sampler, tokens: int, progress: Callable[[str, int, int], None] | None = None) -> float:
        """Compile the steps that every request needs.

        These are a decode step, and a short step with prompts (of at most `tokens`) that is used while others are
        compiled; for a model that sees images, also one with images, and the encoder.

        Returns:
            Seconds per token of the step with prompts.
        """
        prompts, *_ = needed = self._needed(tokens)
        if self.programs.encoder:
            images = self.buckets.mixed(min(tokens, STAND_IN_TOKENS), 1, images=True)
            needed += [images, *(shape for shape in self.programs.encoder.usual() if shape.items == 1)]
        self.steps.all(needed, progress)
        seconds = []
        for _ in range(2):  # the first run includes setting up
            start = time.perf_counter()
            jax.block_until_ready(self._launch(StepPlan([]), prompts, sampler).tokens)
            seconds.append(time.perf_counter() - start)
        return min(seconds) / prompts.tokens

    def load_kept(self) -> None:
        """Load the few steps that a request alone needs, if an earlier start compiled them.

        For a CPU, where compiling all steps at the start would take too long. Others are loaded in the background when
        they are wanted: each takes tens of megabytes.
        """
        self.steps.load(self._needed(STAND_IN_TOKENS))

    def _needed(self, tokens: int) -> list[Any]:
        """Return the shapes that any request needs, the step with prompts first."""
        prompts = self.buckets.mixed(min(tokens, STAND_IN_TOKENS), 1)
        return [prompts, prompts.sampler, self.buckets.decode(1)]

    @property
    def is_compiling(self) -> bool:
        """Return whether a step is being compiled."""
        return not self.is_warm and self.steps.busy

    def _program(self, shape: ProgramShape) -> StepProgram:
        if isinstance(shape, Shape) and shape.keeps_hidden:  # here, so that the loop does not wait for this one either
            self._compile_score()
        return self.programs.of(shape, self.params, self.cache)

    def _compile_score(self) -> None:
        """Run `score` once on zeros: its program does not depend on the step whose hidden states it takes."""
        hidden = jnp.zeros((CHUNK, self.cfg.dim), self.compute.dtype, device=self.programs.everywhere)
        jax.block_until_ready(self.score(hidden, np.zeros(CHUNK, np.int32)))


# --- sleep ------------------------------------------------------------------------------------------------------------
# Freed memory goes back to jax. Whether other processes can have it depends on jax's allocator: on GPUs it keeps its
# memory unless XLA_PYTHON_CLIENT_ALLOCATOR=platform.


@dataclass(frozen=True)
class Asleep:
    """Hold the state of a sleeping engine."""

    level: int
    host: Params | None  # level 1 keeps the weights here; level 2 drops them
    draft: Params | None = None  # the draft model's weights, which both levels keep here


def put_to_sleep(runner: Runner, level: int) -> Asleep:
    """Free pages and features, and move the weights to the host or drop them; no step may be in flight.

    The runner keeps both as abstract arrays, so that steps can be compiled meanwhile.
    """
    weights = runner.weights
    host = jax.device_get(weights.params) if level == 1 and not is_abstract(weights.params) else None
    freed = runner.cache, runner.features
    runner.cache, runner.features = abstract_of(freed)
    for array in jax.tree.leaves(freed):
        array.delete()  # at once, whatever else refers to it
    draft, runner.draft = jax.device_get(runner.draft), abstract_of(runner.draft)
    drop_weights(runner)
    return Asleep(level, host, draft)


def drop_weights(runner: Runner) -> None:
    """Replace the weights by abstract arrays."""
    runner.weights = Weights(abstract_of(runner.weights.params), runner.weights.version)


def wake_up(runner: Runner, asleep: Asleep) -> None:
    """Allocate pages and features, and move the weights back from the host unless new ones have come meanwhile."""
    weights, params = runner.weights, runner.weights.params
    runner.draft = _placed(asleep.draft, runner.draft)
    if asleep.host is not None and is_abstract(params):
        params = _placed(asleep.host, params)
    runner.weights = Weights(params, weights.version)
    runner.cache, runner.features = zeros_of((runner.cache, runner.features))


def _placed(host: Any, like: Any) -> Any:
    return jax.tree.map(lambda x, abstract: jax.device_put(x, abstract.sharding), host, like)
