"""What is compiled for a shape: a function, and the forms (shape, type, place) of what it is given.

No array is needed, so a step can be compiled before there are pages, and for devices that are not here.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AbstractDevice, AbstractMesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from dovetail.core.compute import Compute
from dovetail.core.mesh import Placement
from dovetail.core.note import NOTE
from dovetail.engine.device.batch import NUMBERS, Shape
from dovetail.engine.device.buckets import Buckets
from dovetail.engine.device.sampler import MAX_BIAS
from dovetail.engine.device.step import DeviceState, Unsampled, run_decode, run_prompts, run_sampler
from dovetail.engine.schedule.plan import StepDemand, StepLimits
from dovetail.io.compiled import compile_program, has_program, load_program, program_key
from dovetail.models.config import ModelConfig
from dovetail.models.decoder import abstract_cache
from dovetail.ops.dispatch import compile_options

log = logging.getLogger(__name__)
MOST_PADDING = 4  # times a step's tokens: a program that is so much larger is used while its own is compiled
SAMPLER_TABLES = 4  # [rows, vocab] of 32 bits that a step needs beyond the compiler's figure, for the whole sampler


class Compilations:
    """What an engine has compiled, counted from any thread."""

    def __init__(self):
        self.begun, self.seconds = 0, 0.0
        self._lock = threading.Lock()

    def begin(self) -> None:
        with self._lock:
            self.begun += 1

    def end(self, seconds: float) -> None:
        with self._lock:
            self.seconds += seconds


class StepProgram(NamedTuple):
    """One shape's step."""

    shape: Shape
    function: Any
    forms: tuple
    static: dict[str, Any]
    options: Any  # XLA's

    def compile(self, told: Mapping[str, Any] | None = None) -> Any:
        options = {**(self.options or {}), **(told or {})}
        return self.function.lower(*self.forms, **self.static).compile(compiler_options=options or None)

    @property
    def key(self) -> str:
        return program_key(*self[2:])

    @property
    def is_kept(self) -> bool:
        return has_program(self.key)

    @property
    def title(self) -> str:
        shape = self.shape
        if not shape.tokens:
            return f"the sampler of {shape.rows} rows"
        times = f" x {shape.steps}" if shape.steps > 1 else ""
        return f"a step of {shape.tokens} tokens in {shape.rows} rows{times}"

    def kept(self, devices: list[Any], ahead: bool, counts: Compilations | None = None) -> Any:
        """Read it from disk where an earlier start kept it, else compile it; `ahead` of any request that needs it."""
        key, counts = self.key, counts or Compilations()
        step = load_program(key, devices)
        if step is None:
            level = logging.INFO if ahead else NOTE  # a user waits for this one
            log.log(level, "compiling %s, once: it is kept", self.title)
            counts.begin()
            start = time.perf_counter()
            step = compile_program(key, self.compile)
            counts.end(seconds := time.perf_counter() - start)
            log.log(level, "compiled %s in %.1f s", self.title, seconds)
        return step


@dataclass(frozen=True)
class Programs:
    """Those of one engine."""

    cfg: ModelConfig
    compute: Compute
    buckets: Buckets
    page_size: int
    platform: str | None = None
    placement: Placement | None = None
    absent: Any = None  # the device to compile for, or the mesh's first, where they are not here

    @property
    def everywhere(self) -> Any:
        if self.placement:
            return NamedSharding(self.placement.mesh, PartitionSpec())
        return SingleDeviceSharding(self.absent) if self.absent else None

    @property
    def history_sharding(self) -> Any:
        """Return the layout of the sampler's table of counts: over the vocabulary, as the logits that it adjusts."""
        if not self.placement:
            return self.everywhere
        return self.placement.sharding((None, "vocab"), (self.buckets.max_rows, self.cfg.vocab))

    @property
    def devices(self) -> list[Any]:
        if self.placement:
            return list(self.placement.mesh.devices.flat)
        return [self.absent] if self.absent else jax.devices()[:1]

    def pages(self, count: int) -> Any:
        """The form of a pool of so many."""
        where = self.placement, self.platform
        with self.for_its_kind():
            return self._form(abstract_cache(self.cfg, count, self.page_size, self.compute.dtype, *where))

    def of(self, shape: Shape, params: Any, cache: Any) -> StepProgram:
        """The step with these weights and pages, arrays or forms."""
        array, slots = self._array, self.buckets.max_rows + 1
        params, cache = self._form(params), self._form(cache)
        last, tables = array((slots,)), array((slots, self.buckets.max_pages))
        history: Any = jax.ShapeDtypeStruct((slots - 1, self.cfg.vocab), jnp.int32, sharding=self.history_sharding)
        flat = array((shape.size,))
        where: dict[str, Any] = dict(platform=self.platform, placement=self.placement)
        options = compile_options(self.platform, shape.tokens)
        if not shape.tokens:
            return StepProgram(
                shape, run_sampler, (last, history, self._left(shape), self._asked(shape)), where, options
            )
        static = where | dict(cfg=self.cfg, shape=shape, compute=self.compute)
        if shape.is_decode:
            state = DeviceState(cache, last, tables, history)
            return StepProgram(shape, run_decode, (params, state, flat, self._asked(shape)), static, options)
        return StepProgram(shape, run_prompts, (params, cache, tables, last, flat), static, options)

    def compile(self, shape: Shape, params: Any, pages: int, told: Mapping[str, Any] | None = None) -> Any:
        """The step with so many pages, from disk where it was kept; for devices that are not here nothing is, and their
        compiler may be told more."""
        program = self.of(shape, params, self.pages(pages))
        if not self.absent:
            return program.kept(self.devices, ahead=True)
        with self.for_its_kind():
            return program.compile(told)

    def step_memory(self, params: Any, pages: int) -> int:
        """Bytes the largest step needs beside weights and so many pages, as the compiler says, and the sampler's own
        tables."""
        found = self.compile(self.buckets.largest(), params, pages).memory_analysis()
        compiled = found.temp_size_in_bytes + found.output_size_in_bytes - found.alias_size_in_bytes
        return int(compiled + SAMPLER_TABLES * self.buckets.max_rows * self.cfg.vocab * 4)

    def for_its_kind(self) -> Any:
        """A context for one device that is not here: kernels ask which TPU it is."""
        if self.placement or not self.absent:
            return nullcontext()
        kind = AbstractDevice(self.absent.device_kind, num_cores=1, platform=self.absent.platform)
        return jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=kind))

    def _form(self, tree: Any) -> Any:
        def one(x: Any) -> Any:  # asleep, x is a form already
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding if self.placement else self.everywhere)

        return jax.tree.map(one, tree)

    def _array(self, dims: tuple[int, ...], dtype: Any = jnp.int32) -> Any:
        return jax.ShapeDtypeStruct(dims, dtype, sharding=self.everywhere)

    def _asked(self, shape: Shape) -> dict[str, Any]:
        rows = shape.rows
        return dict(
            bias_ids=self._array((rows, MAX_BIAS)),
            bias=self._array((rows, MAX_BIAS), jnp.float32),
            mask=self._array((rows, -(-self.cfg.vocab // 32)), jnp.uint32),
        )

    def _left(self, shape: Shape) -> Unsampled:
        logits = self._array((shape.rows, self.cfg.vocab), jnp.float32)
        return Unsampled(logits, self._array((shape.rows,)), self._array((len(NUMBERS), shape.rows)))


class CompiledSteps:
    """From any thread. `program`: what a shape's step is, a runner's method."""

    def __init__(self, program: Callable[[Shape], StepProgram], devices: list[Any]):
        # weak: a runner that is dropped frees its device memory at once, not when Python looks for garbage
        self._program, self._devices = weakref.WeakMethod(program), devices
        self._futures: dict[Shape, Future] = {}
        self._lock = threading.Lock()
        self.compilations = Compilations()
        self._pool = ThreadPoolExecutor(max(2, (os.cpu_count() or 2) // 2), thread_name_prefix="compile")

    def __len__(self) -> int:
        return len(self._futures)

    def __call__(self, shape: Shape) -> Callable:
        """The step for a shape, compiled now unless it was before; another thread may be compiling it already."""
        return self.later(shape).result()

    def later(self, shape: Shape, ahead: bool = False) -> Future:
        """`ahead`: of any request that needs it."""
        with self._lock:
            if shape not in self._futures:
                self._futures[shape] = self._pool.submit(self._get, shape, ahead)
            return self._futures[shape]

    def _get(self, shape: Shape, ahead: bool) -> Any:
        program = self._program()
        assert program is not None, "its runner is gone"
        return program(shape).kept(self._devices, ahead, self.compilations)

    def all(self, shapes: Iterable[Shape], progress: Callable[[str, int, int], None] | None = None) -> None:
        """Have these, all of them."""
        futures = [self.later(shape, ahead=True) for shape in dict.fromkeys(shapes)]
        for done, future in enumerate(as_completed(futures), 1):
            future.result()
            if progress:
                progress("compiling steps", done, len(futures))

    def load(self, shapes: Iterable[Shape]) -> None:
        """Have those of these that an earlier start kept."""
        program = self._program()
        assert program is not None, "its runner is gone"
        self.all(shape for shape in shapes if program(shape).is_kept)

    def nearest(self, shape: Shape, waits: bool = True) -> Shape:
        """Return the shape; or where it is not compiled yet and one that holds it is, without many times as many
        tokens, that one, while this one is compiled in the background. Unless the caller `waits` for a compiler, any
        shape that can run the step is taken, also one with prompts for a step that decodes."""
        if self.is_ready(shape):
            return shape
        self.have(shape)
        ready = self.ready()
        holding = [other for other in ready if other.holds(shape)]
        near = [other for other in holding if other.tokens <= MOST_PADDING * shape.tokens]
        if not waits and not near:
            near = holding or [other for other in ready if other.can_run(shape)]
        return min(near, key=lambda s: (s.tokens, s.rows, s.pages), default=shape)

    def have(self, shape: Shape) -> None:
        """Compile a step in the background, with the sampler that follows it."""
        for part in (shape,) if shape.is_decode else (shape, shape.sampler):
            self.later(part)

    def ready(self) -> list[Shape]:
        """Return the steps that can be run now."""
        return [shape for shape in list(self._futures) if shape.tokens and self.is_ready(shape)]

    def is_ready(self, shape: Shape) -> bool:
        parts = (shape, shape.sampler) if shape.tokens and not shape.is_decode else (shape,)
        futures = [self._futures.get(part) for part in parts]
        return all(future is not None and future.done() and future.exception() is None for future in futures)

    @property
    def busy(self) -> bool:
        return any(not future.done() for future in list(self._futures.values()))


def limits_of(demand: StepDemand, budget: int, wanted: Shape, ready: list[Shape]) -> StepLimits | None:
    """Return what a step of `budget` tokens may take of `demand` with programs that are `ready`, where `wanted` would
    be the program for all of it. None: nothing can go on before another program is compiled.

    All who decode come first: a program without a row for each of them is not used for prompts."""
    if demand.prompts:
        most_tokens = max(budget, MOST_PADDING * wanted.tokens)
        fit = [s for s in ready if not s.is_decode and s.keeps_hidden == demand.scores and s.tokens <= most_tokens]
        if any(s.holds(wanted) for s in fit):
            return StepLimits(budget, demand.rows, demand.prompts)
        if some := [s for s in fit if s.rows > demand.decoding]:
            largest = max(some, key=lambda s: (s.tokens, s.rows))
            return StepLimits(min(budget, largest.tokens), largest.rows, largest.rows - demand.decoding)
    rows = max((s.rows for s in ready if s.steps == 1), default=0)
    return StepLimits(budget, rows, 0) if demand.decoding and rows else None
