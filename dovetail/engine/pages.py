"""Choose how many pages an engine's pool has, beside its weights and its largest step.

The page count is part of the shape of every step. It is known when the largest step is compiled, which takes longest,
so that the other steps are compiled meanwhile for the count that is expected (StepsAhead).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
from jax.errors import JaxRuntimeError

from dovetail.core.spec import held_bytes
from dovetail.engine.device.lowering import Lowering, why_not_apart
from dovetail.engine.device.programs import Compile, CompiledSteps, Programs, ProgramShape
from dovetail.engine.options import EngineOptions
from dovetail.plan.serve_memory import (
    bytes_beside,
    coarse_pages,
    expected_pages,
    num_pages,
    pool_bytes,
    round_pages,
    sampler_bytes,
    step_estimate,
)  # fmt: skip

SETTLED = 0.96  # the share of the pages that fit, from which on an expected number of pages is kept


def warms_up(options: EngineOptions) -> bool:
    """Return whether the start compiles every step."""
    return options.warm_up if options.warm_up is not None else jax.default_backend() != "cpu"


class StepsAhead:
    """Compile an engine's steps before its page count is known.

    Args:
        programs: The engine's programs.
        params: Its weights as steps take them, which may be abstract.
        all_steps: Whether the start compiles every step.
    """

    def __init__(self, programs: Programs, params: Any, all_steps: bool):
        self.params, self._programs, self._all_steps = params, programs, all_steps
        self._pages = 0
        self._steps: CompiledSteps | None = None

    def __enter__(self) -> StepsAhead:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        if kind and self._steps:  # Python would wait for all of them before it ends
            self._steps.cancel()

    def compile(self, shape: ProgramShape, pages: int) -> Any:
        """Return a compiled step; with the first page count, all others begin to be compiled."""
        if self._steps is None:
            self._pages, self._steps = pages, self._steps_of(pages)
            for each in (shape, *(self._programs.all_shapes() if self._all_steps else ())):
                self._steps.later(each, ahead=True)
        if pages == self._pages:
            return self._steps(shape)
        return self._programs.compile(shape, self.params, pages)

    def settled(self, pages: int) -> CompiledSteps:
        """Return the steps with this page count; those of another one that are not compiled yet are dropped."""
        if self._steps and pages == self._pages:
            return self._steps
        if self._steps:
            self._steps.cancel()
        return self._steps_of(pages)

    def _steps_of(self, pages: int) -> CompiledSteps:
        programs, pool = self._programs, self._programs.pages(pages)
        lowers = self._all_steps and not why_not_apart(programs.placement)
        of = functools.partial(programs.of, params=programs.abstract(self.params), cache=pool)
        return CompiledSteps(of, programs.devices, Lowering(programs, self.params, pool) if lowers else None)


def pages_that_fit(
    programs: Programs, params: Any, options: EngineOptions, devices: Sequence[Any] = (), compile: Compile | None = None
) -> int:
    """Return how many pages the pool gets beside the weights, which may be abstract, and the largest step.

    `compile` is StepsAhead's, or by default that of the programs.
    """
    most, first = options.max_num_seqs * programs.buckets.max_pages, held_bytes(programs.pages(1))
    page_bytes = held_bytes(programs.pages(2)) - first
    scratch = first - page_bytes  # the page more that a draft model has
    if options.kv_cache_memory_bytes is not None:
        return num_pages(options.kv_cache_memory_bytes - scratch, page_bytes, programs.page_size, most)
    if programs.cfg.scored:  # a reward model uses no pages: the fewest that a pool may have
        return programs.buckets.max_pages
    room = pool_bytes(options.gpu_memory_utilization, held_bytes(params), 0, devices)
    room -= scratch + held_bytes(programs.features)
    if not programs.on_cpu:
        own: Compile = lambda shape, pages: programs.compile(shape, params, pages)  # noqa: E731
        return _measured_pages(programs, compile or own, room, page_bytes, most)
    pages = num_pages(room, page_bytes, programs.page_size, most)
    return most if pages == most else _kept_pages(programs, params, pages, most)


def _measured_pages(programs: Programs, compile: Compile, room: int, page_bytes: int, most: int) -> int:
    """Return how many pages fit beside the largest step.

    The step is compiled for the pages that should fit by an estimate of its bytes. If they do, and hardly more would,
    these are the pages, and the engine need not compile its slowest program again for another number.
    """
    cfg, rows = programs.cfg, programs.buckets.max_rows
    tensor = programs.placement.mesh.shape["tensor"] if programs.placement else 1
    estimate = step_estimate(cfg, tensor, programs.buckets.largest().tokens, rows, programs.compute.dtype.itemsize)
    layer_bytes = max(held_bytes(layer) for layer in programs.pages(1))
    given: tuple[Any, ...] = room, page_bytes, layer_bytes, most
    given += tuple(functools.partial(f, compile) for f in (programs.step_memory, programs.copies_pages))
    expected = expected_pages(room, page_bytes, estimate, most)
    try:
        step_bytes, copied = bytes_beside(expected, *given)
    except JaxRuntimeError as error:  # libtpu compiles no program that does not fit
        if "RESOURCE_EXHAUSTED" not in str(error) or expected == 1:
            raise
        step_bytes, copied = bytes_beside(expected // 2, *given)
    room -= step_bytes + sampler_bytes(rows, cfg.vocab)
    pages = num_pages(room, page_bytes + copied, programs.page_size, most)
    if pages == most:
        return most
    return expected if SETTLED * pages <= expected <= pages else round_pages(pages)


def _kept_pages(programs: Programs, params: Any, pages: int, most: int) -> int:
    """Return `pages` rounded coarsely, or a count next to it that an earlier start compiled its steps for.

    The page count is part of a program's shape, and the available memory differs from start to start.
    """
    choices = [min(most, count) for count in coarse_pages(pages)]
    shapes = [shape for shape in programs.buckets.first() if shape.tokens]  # a sampler does not depend on pages

    def is_kept(count: int) -> bool:
        pool = programs.pages(count)
        return any(programs.of(shape, params, pool).is_kept for shape in shapes)

    return next(filter(is_kept, choices), choices[0])
