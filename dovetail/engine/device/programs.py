"""Programs: the compiled steps of an engine.

A StepProgram is a function and the abstract arrays (shape, type, sharding) that it is compiled for. No real array is
needed, so a step can be compiled before there are pages, and for devices that are not here. CompiledSteps holds an
engine's programs by shape: read from disk if an earlier start kept them, else compiled, several at a time.
"""

from __future__ import annotations

import functools
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
from dovetail.core.host import return_freed
from dovetail.core.mesh import Placement
from dovetail.core.reporter import NOTE
from dovetail.engine.device.batch import NUMBERS, Buckets, Shape
from dovetail.engine.device.encoder import EncoderBuckets, EncoderShape, run_encoder
from dovetail.engine.device.following import abstract_followed
from dovetail.engine.device.lowering import Lowering
from dovetail.engine.device.sampler import MAX_BIAS
from dovetail.engine.device.step import (
    DeviceState,
    Unsampled,
    run_decode,
    run_prompts,
    run_proposal,
    run_sampler,
    run_verify,
)
from dovetail.engine.schedule.plan import StepDemand, StepLimits
from dovetail.io.compiled import compile_program, has_program, load_program, program_key
from dovetail.models.config import ModelConfig
from dovetail.models.decoder import abstract_cache
from dovetail.models.draft.draft import DraftModel
from dovetail.models.spec import VISION
from dovetail.ops.dispatch import compile_options
from dovetail.plan.hlo import copies_of, read
from dovetail.plan.serve_memory import feature_width

log = logging.getLogger(__name__)
ProgramShape = Shape | EncoderShape
Compile = Callable[[ProgramShape, int], Any]  # from a shape and a number of pages to the compiled step
TRIM_SECONDS = 1.0  # of compilation, from which on the compiler's memory is returned to the system
MOST_PADDING = 4  # a program with up to this many times a step's tokens is used while the step's own is compiled


class Compilations:
    """Count an engine's compilations, from any thread."""

    def __init__(self):
        self.begun, self.seconds = 0, 0.0
        self._lock = threading.Lock()

    def begin(self) -> None:
        """Count a compilation that starts."""
        with self._lock:
            self.begun += 1

    def end(self, seconds: float) -> None:
        """Add the time of a compilation that ended."""
        with self._lock:
            self.seconds += seconds


class StepProgram(NamedTuple):
    """Hold the program of one shape."""

    shape: ProgramShape
    function: Any  # jitted
    abstract: tuple  # its arguments, as ShapeDtypeStruct
    static: dict[str, Any]
    options: Any  # XLA's

    def compile(self, more: Mapping[str, Any] | None = None, lowering: Lowering | None = None) -> Any:
        """Compile it now.

        Args:
            more: Further options of XLA.
            lowering: Lowers it in another process, if it can.
        """
        options = {**(self.options or {}), **(more or {})}
        lowered = lowering.lower(self) if lowering else None
        lowered = lowered or self.function.lower(*self.abstract, **self.static)
        return lowered.compile(compiler_options=options or None)

    @property
    def key(self) -> str:
        """Return the name under which it is kept on disk."""
        return program_key(*self[2:])

    @property
    def is_kept(self) -> bool:
        """Return whether it is on disk."""
        return has_program(self.key)

    @property
    def title(self) -> str:
        """Return a description for the log."""
        shape = self.shape
        if isinstance(shape, EncoderShape):
            return f"the encoder of {shape.items} x {shape.patches} patches"
        if not shape.tokens:
            return f"the sampler of {shape.rows} rows"
        if shape.proposes:
            return f"the proposal of {shape.drafts} drafts in {shape.rows} rows"
        times = f" x {shape.steps}" if shape.steps > 1 else f" with {shape.drafts} drafts" if shape.drafts else ""
        images = " with images" if shape.images else ""
        return f"a step of {shape.tokens} tokens in {shape.rows} rows{times}{images}"

    def load_or_compile(
        self,
        devices: list[Any],
        ahead: bool,
        counts: Compilations | None = None,
        lowering: Lowering | None = None,
    ) -> Any:
        """Read it from disk if it was kept, else compile and keep it.

        Args:
            devices: The devices to run on.
            ahead: Whether no request waits for it yet, so that it is logged at a lower level.
            counts: Counts the compilation.
            lowering: Lowers it in another process, if it can.
        """
        key, counts = self.key, counts or Compilations()
        step = load_program(key, devices)
        if step is None:
            level = logging.INFO if ahead else NOTE  # with NOTE, a user waits for this one
            log.log(level, "compiling %s; it is kept for later starts", self.title)
            counts.begin()
            start = time.perf_counter()
            step = compile_program(key, functools.partial(self.compile, lowering=lowering))
            counts.end(seconds := time.perf_counter() - start)
            log.log(level, "compiled %s in %.1f s", self.title, seconds)
            if seconds > TRIM_SECONDS:
                return_freed()
        return step


@dataclass(frozen=True)
class Programs:
    """Make the programs of one engine."""

    cfg: ModelConfig
    compute: Compute
    buckets: Buckets
    page_size: int
    platform: str | None = None
    placement: Placement | None = None
    absent: Any = None  # the device to compile for, or the mesh's first, if it is not here
    draft: DraftModel | None = None
    encoder: EncoderBuckets | None = None  # None: the model does not see images
    kv_cache_dtype: str = "auto"  # of the model's pages; a draft model's are in the compute dtype

    @property
    def everywhere(self) -> Any:
        """Return the sharding of arrays that every device has whole."""
        if self.placement:
            return NamedSharding(self.placement.mesh, PartitionSpec())
        return SingleDeviceSharding(self.absent) if self.absent else None

    @property
    def history_sharding(self) -> Any:
        """Return the sharding of the sampler's table of counts: over the vocabulary, as the logits it adjusts."""
        if not self.placement:
            return self.everywhere
        return self.placement.sharding((None, "vocab"), (self.buckets.max_rows, self.cfg.vocab))

    @property
    def devices(self) -> list[Any]:
        """Return the devices that the programs run on."""
        if self.placement:
            return list(self.placement.mesh.devices.flat)
        return [self.absent] if self.absent else jax.devices()[:1]

    @property
    def on_cpu(self) -> bool:
        """Return whether the programs run on a CPU."""
        return self.devices[0].platform == "cpu"

    def all_shapes(self) -> list[ProgramShape]:
        """Return every shape that a plan can have, those that take longest to compile first."""
        return [*(self.encoder.usual() if self.encoder else ()), *self.buckets.usual()]

    @property
    def followed(self) -> Any:
        """Return the abstract arrays of the draft model's state."""
        return abstract_followed(self.draft, self.buckets.max_rows, self.compute.dtype, self.everywhere)

    @property
    def features(self) -> Any:
        """Return the abstract buffer of the features of images; None if the model does not see images."""
        if self.encoder is None or self.cfg.vision is None:
            return None
        width = feature_width(self.cfg.dim, self.cfg.vision.deepstack)
        return self._array((self.encoder.rows, width), self.compute.dtype)

    def pages(self, count: int) -> Any:
        """Return the abstract arrays of a pool of `count` pages, the model's and then the draft model's.

        The latter has a page more, for draft tokens of rows that have no pages for them.
        """
        shape = self.page_size, self.compute.dtype, self.placement, self.platform
        with self.device_kind():
            pages = abstract_cache(self.cfg.layers, count, *shape, kv=self.kv_cache_dtype)
            own = abstract_cache(self.draft.layers, count + 1, *shape) if self.draft else ()
            return self.abstract((*pages, *own))

    def local_pools(self, count: int) -> list[tuple[int, ...]]:
        """Return the shapes of the layers' pages on one device."""
        pools = jax.tree.leaves(self.pages(count))
        return list(dict.fromkeys(x.sharding.shard_shape(x.shape) if x.sharding else x.shape for x in pools))

    def of(self, shape: ProgramShape, params: Any, cache: Any) -> StepProgram:
        """Return the program of a shape with these weights and pages, which may be abstract."""
        if isinstance(shape, EncoderShape):
            return self._encode(shape, params)
        array, slots = self._array, self.buckets.max_rows + 1
        params, cache = self.abstract(without_tower(params)), self.abstract(cache)
        last, tables = array((slots,)), array((slots, self.buckets.max_pages))
        history: Any = jax.ShapeDtypeStruct((slots - 1, self.cfg.vocab), jnp.int32, sharding=self.history_sharding)
        flat = array((shape.size,))
        where: dict[str, Any] = dict(platform=self.platform, placement=self.placement)
        options = compile_options(self.platform, shape.tokens)
        if not shape.tokens:
            inputs = last, history, self._unsampled(shape), self._asked(shape)
            return StepProgram(shape, run_sampler, inputs, where, options)
        static = where | dict(cfg=self.cfg, shape=shape, compute=self.compute, draft=self.draft)
        if shape.proposes:
            own = len(self.cfg.layers)
            inputs = params, cache[:own], cache[own:], tables, last, history, self.followed, flat
            return StepProgram(shape, run_proposal, (*inputs, self._asked(shape)), static, options)
        if shape.is_decode or shape.drafts:
            run = run_verify if shape.drafts else run_decode
            state = DeviceState(cache, last, tables, history, self.followed)
            return StepProgram(shape, run, (params, state, flat, self._asked(shape)), static, options)
        inputs = params, cache, tables, last, flat, self.followed
        return StepProgram(shape, run_prompts, (*inputs, self.features) if shape.images else inputs, static, options)

    def _encode(self, shape: EncoderShape, params: Any) -> StepProgram:
        assert self.cfg.vision is not None
        tower, N, P = self.cfg.vision.tower, shape.items, shape.patches
        patches, positions = self._array((N, P, tower.patch_dim), jnp.uint8), self._array((N, P, 2))
        rows = self._array((N, P // tower.patches_per_feature))
        inputs = self.abstract(params[VISION]), self.features, patches, positions, rows
        static: dict[str, Any] = dict(tower=tower, compute=self.compute, platform=self.platform)
        options = compile_options(self.platform, N * P)
        return StepProgram(shape, run_encoder, inputs, static | dict(placement=self.placement), options)

    def compile(self, shape: ProgramShape, params: Any, pages: int, more: Mapping[str, Any] | None = None) -> Any:
        """Return the compiled step with `pages` pages, from disk if it was kept.

        For absent devices nothing is kept, and `more` are further options of their compiler.
        """
        program = self.of(shape, params, self.pages(pages))
        if not self.absent:
            return program.load_or_compile(self.devices, ahead=True)
        with self.device_kind():
            return program.compile(more)

    def step_memory(self, compile: Compile, pages: int) -> int:
        """Return the bytes that the largest step needs beside weights, pages and the sampler's tables.

        The encoder runs between steps, so that its largest call counts if it needs more than the step.
        """
        largest: list[ProgramShape] = [self.buckets.largest(), *([self.encoder.largest()] if self.encoder else [])]
        found = [compile(shape, pages).memory_analysis() for shape in largest]
        return max(x.temp_size_in_bytes + x.output_size_in_bytes - x.alias_size_in_bytes for x in found)

    def copies_pages(self, compile: Compile, pages: int) -> bool:
        """Return whether the largest step with `pages` pages copies those of a layer; True if it cannot be read."""
        text = compile(self.buckets.largest(), pages).as_text()
        module = read(text or "")
        return not text or any(copies_of(module, dims) for dims in self.local_pools(pages))

    def device_kind(self) -> Any:
        """Return a context for one absent device, in which kernels can ask which TPU it is."""
        if self.placement or not self.absent:
            return nullcontext()
        kind = AbstractDevice(self.absent.device_kind, num_cores=1, platform=self.absent.platform)
        return jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=kind))

    def abstract(self, tree: Any) -> Any:
        """Return the same tree as steps are compiled for it, without arrays."""

        def one(x: Any) -> Any:  # while the engine sleeps, x is abstract already
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding if self.placement else self.everywhere)

        return jax.tree.map(one, tree)

    def _array(self, dims: tuple[int, ...], dtype: Any = jnp.int32) -> Any:
        return jax.ShapeDtypeStruct(dims, dtype, sharding=self.everywhere)

    def _asked(self, shape: Shape) -> dict[str, Any]:
        rows, words = shape.rows, -(-self.cfg.vocab // 32)
        masks = (1 + shape.drafts, rows, words) if shape.drafts and not shape.proposes else (rows, words)
        return dict(
            bias_ids=self._array((rows, MAX_BIAS)),
            bias=self._array((rows, MAX_BIAS), jnp.float32),
            mask=self._array(masks, jnp.uint32),
        )

    def _unsampled(self, shape: Shape) -> Unsampled:
        logits = self._array((shape.rows, self.cfg.vocab), jnp.float32)
        return Unsampled(logits, self._array((shape.rows,)), self._array((len(NUMBERS), shape.rows)))


def without_tower(params: Any) -> Any:
    """Return the weights of a step: every array of a call takes host time, and a tower has hundreds."""
    return {name: part for name, part in params.items() if name != VISION}


class CompiledSteps:
    """Manage an engine's compiled steps by shape; any thread may use it.

    Args:
        program: Returns the program of a shape.
        devices: The devices to run on.
        lowering: Lowers the programs in other processes.
    """

    def __init__(
        self, program: Callable[[ProgramShape], StepProgram], devices: list[Any], lowering: Lowering | None = None
    ):
        self._program: Callable[[], Callable[[ProgramShape], StepProgram] | None] = lambda: program
        self._devices, self._lowering = devices, lowering
        self._futures: dict[ProgramShape, Future] = {}
        self._lock = threading.Lock()
        self.compilations = Compilations()
        cores = os.cpu_count() or 2
        threads = cores if lowering else cores // 2  # those that wait for another process use no core
        self._pool = ThreadPoolExecutor(max(2, threads), thread_name_prefix="compile")

    def belong_to(self, program: Callable[[ProgramShape], StepProgram]) -> None:
        """Take programs from this method of a runner from now on.

        The reference is weak: a runner that is dropped frees its device memory at once, not at the next garbage
        collection.
        """
        self._program = weakref.WeakMethod(program)

    def cancel(self) -> None:
        """Drop what has not begun to compile."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        self.close()

    def close(self) -> None:
        """End the processes that lower programs; what is compiled later is lowered in this one."""
        if self._lowering:
            self._lowering.close()
            self._lowering = None

    def __len__(self) -> int:
        return len(self._futures)

    def __call__(self, shape: ProgramShape) -> Callable:
        """Return the compiled step of a shape, waiting for its compiler if needed."""
        return self.later(shape).result()

    def later(self, shape: ProgramShape, ahead: bool = False) -> Future:
        """Return a future of the compiled step; `ahead`: no request waits for it yet."""
        with self._lock:
            if shape not in self._futures:
                self._futures[shape] = self._pool.submit(self._get, shape, ahead)
            return self._futures[shape]

    def _get(self, shape: ProgramShape, ahead: bool) -> Any:
        program = self._program()
        assert program is not None, "its runner is gone"
        return program(shape).load_or_compile(self._devices, ahead, self.compilations, self._lowering)

    def all(self, shapes: Iterable[ProgramShape], progress: Callable[[str, int, int], None] | None = None) -> None:
        """Compile or load all of these, and wait for them."""
        futures = [self.later(shape, ahead=True) for shape in dict.fromkeys(shapes)]
        try:
            for done, future in enumerate(as_completed(futures), 1):
                future.result()
                if progress:
                    progress("compiling steps", done, len(futures))
        except BaseException:  # Ctrl-C too: Python would wait for all of them before it ends
            self.cancel()
            raise

    def load(self, shapes: Iterable[ProgramShape]) -> None:
        """Load those of these that an earlier start kept."""
        program = self._program()
        assert program is not None, "its runner is gone"
        self.all(shape for shape in shapes if program(shape).is_kept)

    def nearest(self, shape: Shape, waits: bool = True) -> Shape:
        """Return the shape to use for a step of this shape; if another, this one is compiled in the background.

        A ready shape that holds this one without many times its tokens is used instead of one that is not compiled yet.
        Unless the caller `waits` for a compiler, any ready shape that can run the step is used, also one with prompts
        for a decode step.
        """
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
        for part in self._parts(shape):
            self.later(part)

    def ready(self) -> list[Shape]:
        """Return the shapes that can be run now."""
        steps = [shape for shape in list(self._futures) if isinstance(shape, Shape) and shape.tokens]
        return [shape for shape in steps if self.is_ready(shape)]

    def is_ready(self, shape: ProgramShape) -> bool:
        """Return whether a program of this shape can be run now."""
        futures = [self._futures.get(part) for part in self._parts(shape)]
        return all(future is not None and future.done() and future.exception() is None for future in futures)

    @staticmethod
    def _parts(shape: ProgramShape) -> tuple[ProgramShape, ...]:
        """Return the programs of a step: one with prompts is followed by its sampler."""
        return (shape, shape.sampler) if isinstance(shape, Shape) and shape.is_prompts else (shape,)

    @property
    def busy(self) -> bool:
        """Return whether a step is being compiled or loaded."""
        return any(not future.done() for future in list(self._futures.values()))


def limits_of(demand: StepDemand, budget: int, wanted: Shape, ready: list[Shape]) -> StepLimits | None:
    """Return what a step may take of a demand with the programs that are ready; None if it must wait for a compiler.

    Decoding sequences come first: a program without a row for each of them is not used for prompts.

    Args:
        demand: What the scheduler would put into the step.
        budget: Most tokens of the step.
        wanted: The shape for the whole demand.
        ready: The shapes that can be run now.
    """
    if demand.prompts:
        most_tokens = max(budget, MOST_PADDING * wanted.tokens)
        fit = [s for s in ready if s.is_prompts and s.keeps_hidden == demand.scores and s.tokens <= most_tokens]
        fit = [s for s in fit if s.images >= demand.images]
        if any(s.holds(wanted) for s in fit):
            return StepLimits(budget, demand.rows, demand.prompts)
        if some := [s for s in fit if s.rows > demand.decoding and s.tokens >= demand.least_tokens]:
            largest = max(some, key=lambda s: (s.tokens, s.rows))
            return StepLimits(min(budget, largest.tokens), largest.rows, largest.rows - demand.decoding)
    rows = max((s.rows for s in ready if s.steps == 1 and not s.drafts), default=0)
    return StepLimits(budget, rows, 0) if demand.decoding and rows else None
