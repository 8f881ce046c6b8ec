"""Runs plans on the device: weights, pages and last tokens live here, and the steps compiled for each shape.

A launch returns at once; its tokens are fetched when they are needed, while the next step already runs. Sampled tokens
stay on the device, in `last` [slots + 1] (the last slot is for padding), and feed the next step from there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from dovetail.core.compute import Compute
from dovetail.core.mesh import Placement
from dovetail.core.types import Cache, Weights
from dovetail.engine.batch import NUMBERS, Packer, Shape
from dovetail.engine.buckets import Buckets
from dovetail.engine.plan import StepPlan
from dovetail.engine.sampler import MAX_BIAS, Sampler
from dovetail.engine.step import DeviceState, StepOutput, Unsampled, run_decode, run_prompts, run_sampler, score
from dovetail.engine.steps import Steps
from dovetail.io.compiled import program_key
from dovetail.models.config import ModelConfig
from dovetail.models.decoder import init_cache
from dovetail.ops.dispatch import compile_options, import_kernels

ROWS_AT_ONCE = 8  # whole rows of the page table that one call writes
SAMPLER_TABLES = 4  # [rows, vocab] of 32 bits that a step needs beyond the compiler's figure, for the whole sampler


@dataclass
class LaunchedStep:
    """A step under way, its results still on the device: tokens [steps, S], log-probabilities (see ops.sample.logprobs)
    [steps, S, ...], and where they were asked for the hidden states [T, D]."""

    plan: StepPlan
    tokens: jax.Array
    logprobs: tuple[jax.Array, ...] | None = None
    hidden: jax.Array | None = None
    version: int = 0
    padded: int = 0  # tokens a step computes, with those that fill its shape

    def fetch(self) -> np.ndarray:
        """The new tokens [steps, S]: a column for each of the plan's rows, also those that do not sample, and more."""
        return np.asarray(self.tokens)


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
        self.everywhere = NamedSharding(placement.mesh, PartitionSpec()) if placement else None
        self.packer = Packer(buckets.max_rows)
        self.num_pages = num_pages
        self._allocate()
        import_kernels(platform)  # a step from disk calls them and traces nothing
        devices = list(placement.mesh.devices.flat) if placement else jax.devices()[:1]
        self.steps = Steps(self._compile, self._key, devices)
        self._set_rows = jax.jit(lambda tables, slots, rows: tables.at[slots].set(rows), donate_argnums=0)

    def _allocate(self) -> None:
        self.cache: Cache | None = init_cache(
            self.cfg, self.num_pages, self.page_size, self.compute.dtype, self.placement
        )
        slots = self.buckets.max_rows + 1
        self.last = jnp.zeros(slots, jnp.int32, device=self.everywhere)
        self.tables = jnp.zeros((slots, self.buckets.max_pages), jnp.int32, device=self.everywhere)
        self.packer.forget()

    def renew(self) -> None:
        """Pages and last tokens anew, where a step that failed has taken them with it: it was given them to keep."""
        if any(array.is_deleted() for array in jax.tree.leaves((self.cache, self.last, self.tables))):
            self._allocate()

    def launch(self, plan: StepPlan, sampler: Sampler, keeps_hidden: bool = False) -> LaunchedStep:
        return self._launch(plan, self.steps.nearest(self.buckets.shape_for(plan, keeps_hidden)), sampler)

    def warm_up(self, sampler: Sampler, progress: Callable[[str, int, int], None] | None = None) -> None:
        """Have the usual steps, and run each once without a sequence: what CUDA sets up for a program when it first
        runs would hold up the first requests (on an H200 one of them by 0.7 s)."""
        shapes = self.buckets.usual()
        self.steps.all(shapes, progress)
        for shape in shapes:
            if shape.tokens:
                self._launch(StepPlan([]), shape, sampler)
        jax.block_until_ready(self.last)

    def _launch(self, plan: StepPlan, shape: Shape, sampler: Sampler) -> LaunchedStep:
        inputs = sampler.inputs(plan, shape.rows)
        flat, too_many = self.packer.pack(plan, shape, inputs)
        for start in range(0, len(too_many), ROWS_AT_ONCE):
            self._write_tables(too_many[start : start + ROWS_AT_ONCE])
        asked = dict(bias_ids=inputs.bias_ids, bias=inputs.bias, mask=inputs.mask)
        run = self._decode if shape.is_decode else self._prompts
        out = run(shape, flat, asked, sampler)
        return LaunchedStep(plan, *out, version=self.weights.version, padded=shape.tokens)

    def _decode(self, shape: Shape, flat: np.ndarray, asked: dict[str, Any], sampler: Sampler) -> StepOutput:
        assert self.cache is not None
        step, state = self.steps(shape), DeviceState(self.cache, self.last, self.tables, sampler.history)
        out, (self.cache, self.last, self.tables, sampler.history) = step(self.weights.params, state, flat, asked)
        return out

    def _prompts(self, shape: Shape, flat: np.ndarray, asked: dict[str, Any], sampler: Sampler) -> StepOutput:
        step, sample = self.steps(shape), self.steps(shape.sampler)  # both, before the pages are handed over
        (left, hidden), state = step(self.weights.params, self.cache, self.tables, self.last, flat)
        self.cache, self.tables = state
        out, (self.last, sampler.history) = sample(self.last, sampler.history, left, asked)
        return out._replace(hidden=hidden)

    def _write_tables(self, rows: list[tuple[int, list[int]]]) -> None:
        slots = np.full(ROWS_AT_ONCE, self.buckets.max_rows, np.int32)
        tables = np.zeros((ROWS_AT_ONCE, self.buckets.max_pages), np.int32)
        for i, (slot, pages) in enumerate(rows):
            slots[i], tables[i, : len(pages)] = slot, pages
        self.tables = self._set_rows(self.tables, slots, tables)

    def score(self, hidden: jax.Array, targets: np.ndarray) -> tuple[jax.Array, ...]:
        """Log-probabilities (see ops.sample.logprobs) of targets [n] after hidden states [n, D]."""
        return score(self.weights.params, hidden, targets, cfg=self.cfg, compute=self.compute, platform=self.platform)

    @property
    def is_compiling(self) -> bool:
        return self.steps.busy

    # --- compiling ----------------------------------------------------------------------------------------------------

    def _compile(self, shape: Shape) -> Any:
        function, forms, static, options = self._program(shape)
        return function.lower(*forms, **static).compile(compiler_options=options)

    def _key(self, shape: Shape) -> str:
        return program_key(*self._program(shape)[1:])

    def _program(self, shape: Shape) -> tuple[Any, tuple, dict[str, Any], Any]:
        """(what a shape's step is, the shapes and types of what it is given, what is static, XLA's options)."""
        S, V = shape.rows, self.cfg.vocab

        def array(dims: tuple[int, ...], dtype: Any = jnp.int32) -> Any:
            return jax.ShapeDtypeStruct(dims, dtype, sharding=self.everywhere)

        def form(x: Any) -> Any:  # asleep, x is a form and no array
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding if self.placement else None)

        params, cache, last, tables = jax.tree.map(form, (self.weights.params, self.cache, self.last, self.tables))
        history, flat = array((self.buckets.max_rows, V)), array((shape.size,))
        asked = dict(
            bias_ids=array((S, MAX_BIAS)),
            bias=array((S, MAX_BIAS), jnp.float32),
            mask=array((S, -(-V // 32)), jnp.uint32),
        )
        where: dict[str, Any] = dict(platform=self.platform, placement=self.placement)
        options = compile_options(self.platform, shape.tokens)
        if not shape.tokens:
            left = Unsampled(array((S, V), jnp.float32), array((S,)), array((len(NUMBERS), S)))
            return run_sampler, (last, history, left, asked), where, options
        static = where | dict(cfg=self.cfg, shape=shape, compute=self.compute)
        if shape.is_decode:
            state = DeviceState(cache, last, tables, history)
            return run_decode, (params, state, flat, asked), static, options
        return run_prompts, (params, cache, tables, last, flat), static, options

    def step_memory(self) -> int:
        """Bytes the largest step needs beside weights and pages, as the compiler says, and the sampler's own tables."""
        analysis = self.steps(self.buckets.largest()).memory_analysis()  # type: ignore[attr-defined]
        compiled = analysis.temp_size_in_bytes + analysis.output_size_in_bytes - analysis.alias_size_in_bytes
        return int(compiled + SAMPLER_TABLES * self.buckets.max_rows * self.cfg.vocab * 4)
