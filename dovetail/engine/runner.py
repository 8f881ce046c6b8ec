"""Runs plans on the device: weights, pages and last tokens live here, and the steps compiled for each shape.

A launch returns at once; its tokens are fetched when they are needed, while the next step already runs. Sampled tokens
stay on the device, in `last` [slots + 1] (the last slot is for padding), and feed the next step from there.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from dovetail.core.compute import Compute
from dovetail.core.mesh import Placement
from dovetail.core.types import Cache, Paged, Params, Weights
from dovetail.engine.batch import UNKNOWN, Kind, Packer, Shape, StepArrays, unpack
from dovetail.engine.buckets import Buckets
from dovetail.engine.params import MAX_LOGPROBS
from dovetail.engine.plan import StepPlan
from dovetail.engine.sampler import Sampler
from dovetail.models.config import ModelConfig
from dovetail.models.decoder import forward, init_cache, unembed
from dovetail.ops.dispatch import compile_options
from dovetail.ops.paged import token_rows
from dovetail.ops.sample import SampleInputs, adjust, advance, argmax, choose, count_tokens, logprobs


@dataclass
class LaunchedStep:
    """A step under way, its results still on the device: tokens [steps, S], from the whole sampler log-probabilities
    (see ops.sample.logprobs) [steps, S, ...], and where they were asked for the hidden states [T, D]."""

    plan: StepPlan
    tokens: jax.Array
    logprobs: tuple[jax.Array, ...] | None = None
    hidden: jax.Array | None = None
    version: int = 0
    padded: int = 0  # tokens a step computes, with those that fill its shape

    def fetch(self) -> list[list[int]]:
        """The new tokens of each sampling row, in order."""
        by_row = np.asarray(self.tokens).T.tolist()
        return [tokens for tokens, row in zip(by_row, self.plan.rows, strict=False) if row.samples]


MOST_PADDING = 4  # times a step's tokens
SMALL = 128  # tokens
SAMPLER_TABLES = 4  # [rows, vocab] of 32 bits: 3 more than greedily, by the compiler's figures, and the history


class Runner:
    def __init__(
        self,
        cfg: ModelConfig,
        weights: Weights,
        compute: Compute,
        buckets: Buckets,
        page_size: int,
        num_pages: int,
        platform: str | None = None,
        placement: Placement | None = None,
    ):
        self.cfg, self.weights, self.compute, self.buckets = cfg, weights, compute, buckets
        self.page_size, self.platform, self.placement = page_size, platform, placement
        self.packer = Packer(buckets.max_rows, buckets.max_pages)
        self.num_pages = num_pages
        self._allocate()
        self._compiled: dict[tuple, Future] = {}
        self._lock = threading.Lock()
        self._workers = max(2, (os.cpu_count() or 2) // 2)
        self._pool = ThreadPoolExecutor(self._workers, thread_name_prefix="compile")

    def _allocate(self) -> None:
        self.cache: Cache | None = init_cache(
            self.cfg, self.num_pages, self.page_size, self.compute.dtype, self.placement
        )
        everywhere = NamedSharding(self.placement.mesh, PartitionSpec()) if self.placement else None
        self.last = jnp.zeros(self.buckets.max_rows + 1, jnp.int32, device=everywhere)

    def renew(self) -> None:
        """Pages and last tokens anew, where a step that failed has taken them with it: it was given them to keep."""
        if any(array.is_deleted() for array in jax.tree.leaves((self.cache, self.last))):
            self._allocate()

    def launch(self, plan: StepPlan, sampler: Sampler, kind: Kind, keep_hidden: bool = False) -> LaunchedStep:
        keeps_history = kind == "full" and sampler.keeps_history(plan)
        shape = self.buckets.shape_for(plan, kind)
        if not keeps_history and not keep_hidden:
            shape = self._ready(shape, sampler)
        flat = self.packer.pack(plan, shape, trash_slot=self.buckets.max_rows)
        inputs = sampler.inputs(plan, shape.rows, kind)
        history = sampler.history if keeps_history else None  # after `inputs`: it may have written a row of it
        step = self.compiled(shape, inputs, history, keep_hidden)
        out, self.cache, self.last, table = step(self.weights.params, self.cache, self.last, history, flat, inputs)
        if history is not None:
            sampler.history = table
        return LaunchedStep(plan, *out, version=self.weights.version, padded=shape.tokens)

    def _ready(self, shape: Shape, sampler: Sampler) -> Shape:
        """The shape, or while it is compiled in the background the least that is ready and holds it. On a CPU, where
        each token costs, not one of many times as many tokens: compiling is sooner done."""
        if self._is_ready(shape):
            return shape
        holding = [key[0] for key in list(self._compiled) if key[0].holds(shape) and self._is_ready(key[0])]
        least = min(holding, key=lambda s: (s.tokens, s.rows, s.pages), default=shape)
        if shape.rows < shape.tokens and least.tokens <= SMALL:
            return least  # a prompt so short costs little more than reading the weights
        self._compile_later(shape, sampler.blank(shape.rows, shape.kind))
        on_cpu = (self.platform or jax.default_backend()) == "cpu"
        return shape if on_cpu and least.tokens > MOST_PADDING * shape.tokens else least

    def _is_ready(self, shape: Shape) -> bool:
        future = self._compiled.get((shape, False, False))
        return future is not None and future.done() and future.exception() is None

    @property
    def is_compiling(self) -> bool:
        return any(not step.done() for step in list(self._compiled.values()))

    def compiled(self, shape: Shape, inputs=None, history=None, keep_hidden: bool = False) -> Callable:
        """The step for a shape, compiled now unless it was before; another thread may be compiling it already."""
        return self._compile_later(shape, inputs, history, keep_hidden).result()

    def warm_up(
        self,
        sampler: Sampler,
        needed: list[Shape],
        later: list[Shape] | None = None,
        progress: Callable[[str, int, int], None] | None = None,
    ) -> None:
        """Compile ahead, several at a time: wait for those that are needed, leave the others to the background."""
        futures = [self._compile_later(shape, sampler.blank(shape.rows, shape.kind)) for shape in dict.fromkeys(needed)]
        for done, future in enumerate(as_completed(futures), 1):
            future.result()
            if progress:
                progress("compiling steps", done, len(futures))
        # a daemon, and few at a time: it holds up neither the end of the process nor a step that is wanted now
        threading.Thread(target=self._compile_quietly, args=(sampler, later or []), daemon=True).start()

    def _compile_quietly(self, sampler: Sampler, shapes: list[Shape]) -> None:
        room = threading.Semaphore(self._workers // 2)
        for shape in shapes:
            room.acquire()
            try:
                future = self._compile_later(shape, sampler.blank(shape.rows, shape.kind))
            except RuntimeError:  # the process ends: nothing is compiled any more
                return
            future.add_done_callback(lambda _: room.release())

    def _compile_later(self, shape: Shape, inputs=None, history=None, keep_hidden: bool = False) -> Future:
        # the sampler's arrays have one shape for a number of rows, so the shape and what is there say it all
        key = shape, history is not None, keep_hidden
        with self._lock:
            if key not in self._compiled:
                self._compiled[key] = self._pool.submit(self._compile, shape, inputs, history, keep_hidden)
            return self._compiled[key]

    def _compile(self, shape: Shape, inputs, history, keep_hidden: bool) -> Callable:
        def abstract(x):
            sharding = getattr(x, "sharding", None) if self.placement else None  # asleep, x is a form and no array
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

        flat = np.zeros(shape.size, np.int32)
        args = jax.tree.map(abstract, (self.weights.params, self.cache, self.last, history, flat, inputs))
        static: dict[str, Any] = dict(
            cfg=self.cfg, shape=shape, compute=self.compute, platform=self.platform, placement=self.placement
        )
        lowered = run_step.lower(*args, **static, keep_hidden=keep_hidden)
        return lowered.compile(compiler_options=compile_options(self.platform, shape.tokens))

    def score(self, hidden: jax.Array, targets: np.ndarray) -> tuple[jax.Array, ...]:
        """Log-probabilities (see ops.sample.logprobs) of targets [n] after hidden states [n, D]."""
        return _score(self.weights.params, hidden, targets, cfg=self.cfg, compute=self.compute, platform=self.platform)

    def step_memory(self) -> int:
        """Bytes the largest step needs beside weights and pages: as the compiler says of a greedy one, and for a whole
        sampler that many more tables of logits, one of them the penalties' history."""
        analysis = self.compiled(self.buckets.largest()).memory_analysis()  # type: ignore[attr-defined]
        greedy = analysis.temp_size_in_bytes + analysis.output_size_in_bytes - analysis.alias_size_in_bytes
        return int(greedy + SAMPLER_TABLES * self.buckets.max_rows * self.cfg.vocab * 4)


@functools.partial(
    jax.jit,
    static_argnames=("cfg", "shape", "compute", "platform", "placement", "keep_hidden"),
    donate_argnames=("cache", "last", "history"),
)
def run_step(
    params: Params,
    cache: Cache,
    last: jax.Array,
    history: jax.Array | None,
    flat: jax.Array,
    inputs: SampleInputs | None,
    *,
    cfg: ModelConfig,
    shape: Shape,
    compute: Compute,
    platform: str | None = None,
    placement: Placement | None = None,
    keep_hidden: bool = False,
):
    """One dispatch: a step over a ragged batch, or several decode steps in a row. Gives ((tokens, logprobs, hidden),
    cache, last, history); tokens and logprobs have a leading dim of the shape's steps."""
    batch = unpack(flat, shape)

    def context(kv_lens: jax.Array) -> Paged:
        return Paged(batch.tables, kv_lens, batch.cu_q_lens, batch.num_seqs, batch.slots, platform, placement)

    def one(i, tokens, cache, last, history):
        """Step i: feed tokens, sample, remember. Rows that do not sample keep what their slot held."""
        ctx = context(batch.kv_lens + jnp.where(jnp.arange(shape.rows) < batch.num_seqs[0], i, 0))
        row, positions, _ = token_rows(ctx, shape.tokens)
        tokens = jnp.where(tokens == UNKNOWN, last[batch.slots[row]], tokens)
        ends = jnp.maximum(batch.cu_q_lens[1:] - 1, 0)
        wanted = ends if shape.tokens > shape.rows and not keep_hidden else None  # of a prompt only its last token
        with compute.products(platform):
            hidden, new_cache = forward(params, cfg, tokens, positions, ctx, cache, wanted)
            logits = unembed(params, cfg, hidden if wanted is not None else hidden[ends])
        chosen, scores, history = _choose(logits, inputs, i, history)
        slots = jnp.where(batch.samples == 1, batch.slots, last.shape[0] - 1)
        return (chosen, scores), hidden, (new_cache, last.at[slots].set(chosen), history)

    if shape.steps == 1:
        out, hidden, state = one(0, batch.tokens, cache, last, history)
        tokens, scores = jax.tree.map(lambda x: x[None], out)
        return (tokens, scores, hidden if keep_hidden else None), *state
    return _decode_loop(one, batch, (cache, last, history), shape.steps)


def _decode_loop(one: Callable, batch: StepArrays, state: tuple, steps: int):
    """Several decode steps in a row, each fed with what the one before it sampled."""
    cache, last, history = state
    shapes, _, _ = jax.eval_shape(one, 0, batch.tokens, *state)
    out = jax.tree.map(lambda x: jnp.zeros((steps, *x.shape), x.dtype), shapes)
    # the first step may be given tokens by the host; later ones take what was sampled
    last = last.at[batch.slots].set(jnp.where(batch.tokens == UNKNOWN, last[batch.slots], batch.tokens))
    unknown = jnp.full_like(batch.tokens, UNKNOWN)

    def body(i, carry):
        out, state = carry
        new, _, state = one(i, unknown, *state)
        return jax.tree.map(lambda buffer, x: buffer.at[i].set(x), out, new), state

    (tokens, scores), state = jax.lax.fori_loop(0, steps, body, (out, (cache, last, history)))
    return (tokens, scores, None), *state


def _choose(logits: jax.Array, inputs: SampleInputs | None, i: jax.Array | int, history: jax.Array | None):
    """(tokens [S], their log-probabilities where the whole sampler runs, the history with them)."""
    if inputs is None:
        return argmax(logits), None, history
    inputs = advance(inputs, i)
    logits = adjust(logits, inputs, history)
    chosen = choose(logits, inputs)
    if history is not None and inputs.slot is not None:
        history = count_tokens(history, inputs.slot, chosen)
    return chosen, logprobs(logits, chosen, 0 if inputs.top_k is None else MAX_LOGPROBS), history


@functools.partial(jax.jit, static_argnames=("cfg", "compute", "platform"))
def _score(params: Params, hidden, targets, *, cfg: ModelConfig, compute: Compute, platform: str | None):
    with compute.products(platform):
        logits = unembed(params, cfg, hidden)
    return logprobs(logits, targets, MAX_LOGPROBS)
