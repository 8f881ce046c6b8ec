"""Prepare a run before any data is read: derive the plan, make the mesh, and compile the steps."""

from __future__ import annotations

import functools
import platform as machine
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import numpy as np
import optax

from dovetail.core.chips import chip_of, usable_bytes
from dovetail.core.compute import Compute, compute_of
from dovetail.core.errors import RecipeError
from dovetail.core.host import host_memory
from dovetail.core.mesh import TRAIN, Placement, make_mesh, num_slices
from dovetail.core.training import Training
from dovetail.core.types import Batch, Params, num_rows
from dovetail.models.config import ModelConfig, scored
from dovetail.ops.dispatch import compile_options
from dovetail.plan.derive import Derived, derive
from dovetail.plan.train_memory import TrainMemory, memory
from dovetail.train.external import model_config
from dovetail.train.objective import Objective, step_context
from dovetail.train.optim import Rate, learning_rate, make_optimizer
from dovetail.train.rows import check_columns
from dovetail.train.state import TrainState, abstract_state, init_state
from dovetail.train.step import Evaluate, Step, kept_copy, make_eval, make_step

DOCUMENTS = (1, 15, 63, 255)  # documents per row; one more for the padding makes a power of two


@dataclass(frozen=True)
class Ready:
    """Hold a recipe and its objective on a mesh. `settings` has no open keys."""

    cfg: ModelConfig
    objective: Objective
    derived: Derived
    placement: Placement
    optimizer: optax.GradientTransformation
    rate: Rate
    platform: str

    @property
    def settings(self) -> Training:
        """Return the recipe with every key derived."""
        return self.derived.settings

    @property
    def compute(self) -> Compute:
        """Return the type of the computation."""
        return compute_of(self.settings.precision.compute)

    @cached_property
    def abstract_state(self) -> TrainState:
        """Return the training state that checkpoints hold, as shapes with shardings."""
        state, companion = abstract_state(self.specs, self.settings, self.optimizer, self.placement), None
        if self.objective.companion:
            companion = self.objective.companion.abstract(self.cfg, self.placement)
        return replace(state, companion=companion)

    @cached_property
    def carried_state(self) -> TrainState:
        """Return the training state that steps carry, as shapes with shardings."""
        masters = self.abstract_state.params
        shapes = jax.eval_shape(self._copy, masters)

        def placed(master: Any, kept: Any) -> Any:
            return kept and jax.ShapeDtypeStruct(kept.shape, kept.dtype, sharding=master.sharding)

        return replace(self.abstract_state, copy=jax.tree.map(placed, masters, shapes))

    def carried(self, state: TrainState) -> TrainState:
        """Return a new or restored state as steps carry it: with its weights in the compute dtype."""
        places = jax.tree.map(lambda leaf: leaf.sharding, self.carried_state.copy)
        return replace(state, copy=jax.jit(self._copy, out_shardings=places)(state.params))

    def _copy(self, params: Params) -> Any:
        return kept_copy(params, self.specs, self.compute)

    @cached_property
    def abstract_batch(self) -> Batch:
        """Return a batch as shapes with shardings."""
        return self._abstract_batch(self.settings)

    def _abstract_batch(self, settings: Training, entries: tuple[int, ...] = ()) -> Batch:
        return self.objective.abstract_batch(settings, self.objective.columns, self.placement, entries)

    @cached_property
    def specs(self) -> Any:
        """Return the specs of the trained weights."""
        return self.objective.specs(self.cfg)

    def lower(
        self, documents: int | None = None, rows: int | None = None, entries: tuple[int, ...] = ()
    ) -> jax.stages.Lowered:
        """Lower the training step.

        Args:
            documents: The most documents of a row; None: any number.
            rows: Rows of the batch in this process; default: all of a step's.
            entries: Entries of each of the batch's table columns; by default 1.
        """
        settings = self._settings_for(rows)
        ctx = step_context(settings, self.placement, self.platform, documents)
        step = make_step(self.cfg, settings, self.objective, self.optimizer, self.rate, ctx)
        places = jax.tree.map(lambda leaf: leaf.sharding, self.carried_state)
        jitted = jax.jit(step, donate_argnums=0, out_shardings=(places, None))
        batch = self._abstract_batch(settings, entries)
        return jitted.trace(self.carried_state, batch, *self._abstract_frozen).lower(
            lowering_platforms=(self.platform,)
        )

    def compile(
        self,
        documents: int | None = None,
        rows: int | None = None,
        entries: tuple[int, ...] = (),
        options: Mapping[str, Any] | None = None,
    ) -> Step:
        """Compile the training step; `options` are added to the compiler options. For the others see `lower`."""
        options = options_of(self.placement, self.platform, self.settings.tokens_per_step) | dict(options or {})
        return self._given_frozen(compiled(self.lower(documents, rows, entries), options))

    def _settings_for(self, rows: int | None) -> Training:
        """Return the settings with this many rows in the process, and as many rows per microstep as before."""
        batch = self.settings.batch if rows is None else rows * self.rows_here()[1]
        if batch == self.settings.batch:
            return self.settings
        parts = batch * (self.settings.accumulate or 1) // self.settings.batch
        return replace(self.settings, batch=batch, accumulate=max(1, parts))

    def rows_of(self, batch: Batch) -> int:
        """Return how many rows of a batch that `put` returned are in this process."""
        return num_rows(batch) // self.rows_here()[1]

    @property
    def _tables(self) -> list[str]:
        return [name for name, one in self.objective.columns.items() if one.table]

    def entries_of(self, batch: Batch) -> tuple[int, ...]:
        """Return the number of entries of each of the batch's table columns."""
        return tuple(batch.columns[name].shape[1] if name in batch.columns else 1 for name in self._tables)

    def bucket(self, documents: int) -> int | None:
        """Return the bound to compile for when rows hold `documents`: one of a few sizes for cuDNN, else None."""
        if self.platform != "cuda":
            return None
        return next((n for n in DOCUMENTS if n >= documents), self.settings.length)

    def memory(self, documents: int) -> TrainMemory:
        """Return the planned memory of the step for rows of this many documents; `derived.memory` is for any rows."""
        bound, settings = self.bucket(documents), self.settings
        if bound is None or self.derived.is_state_only:
            return self.derived.memory
        sums = 1 if bound == 1 else bound + 1  # for one document cuDNN needs no bounds (ops.kernels.gpu.packed)
        assert settings.remat and settings.per_device
        return memory(self.cfg, settings, self.derived.axes, settings.remat, settings.per_device, documents=sums)

    def evaluate(self) -> Evaluate:
        """Return the compiled function (params, batch, the state's reference) -> (sums, their divisor)."""
        fn = make_eval(self.cfg, self.objective, step_context(self.settings, self.placement, self.platform))
        frozen = self._abstract_frozen[0] if self._abstract_frozen else None

        @functools.cache
        def program(entries: tuple[int, ...]) -> Any:
            state, batch = self.abstract_state, self._abstract_batch(self.settings, entries)
            return jax.jit(fn).lower(state.params, batch, frozen, state.reference).compile()

        program((1,) * len(self._tables))  # what does not fit is refused before the first step
        return lambda params, batch, reference: program(self.entries_of(batch))(params, batch, self.frozen, reference)

    @cached_property
    def frozen(self) -> Any:
        """Return the objective's frozen weights, loaded when first used."""
        return self.objective.frozen.load(self.cfg, self.placement) if self.objective.frozen else None

    @property
    def _abstract_frozen(self) -> tuple:
        return (self.objective.frozen.abstract(self.cfg, self.placement),) if self.objective.frozen else ()

    def _given_frozen(self, program: Any) -> Any:
        return functools.partial(_with_frozen, program, self.frozen) if self.objective.frozen else program

    def init(self, params: Params | None = None) -> TrainState:
        """Return a new state with these weights, or with random ones."""
        state = init_state(self.cfg, self.specs, self.settings, self.optimizer, self.placement, params)
        companion = self.objective.companion
        state = replace(state, companion=companion.init(self, state.params)) if companion else state
        return self.carried(state)

    def rows_here(self) -> tuple[int, int]:
        """Return (which share of a batch's rows this process loads, number of shares)."""
        mask: Any = self.abstract_batch.loss_mask
        places = mask.sharding.addressable_devices_indices_map(mask.shape).values()
        spans = [index[0].indices(mask.shape[0])[:2] for index in places]
        first, last = min(start for start, _ in spans), max(stop for _, stop in spans)
        return first // (last - first), mask.shape[0] // (last - first)

    def put(self, rows: Batch) -> Batch:
        """Return this process's rows (see rows_here) as its part of the global batch."""
        wanted = self._abstract_batch(self.settings, self.entries_of(rows))
        check_columns(rows, wanted)
        if jax.process_count() == 1:
            return jax.tree.map(lambda x, f: jax.device_put(np.asarray(x, f.dtype), f.sharding), rows, wanted)
        return jax.tree.map(
            lambda x, f: jax.make_array_from_process_local_data(f.sharding, np.asarray(x, f.dtype), f.shape),
            rows,
            wanted,
        )

    def place(self, rows: Batch, placement: Placement | None = None) -> Batch:
        """Return rows, with any columns, on the devices of `placement` (default: this one's); single process only."""
        placement = placement or self.placement

        def one(x: Any, second: str | None = "length") -> jax.Array:
            axes = ("batch", second, None)[: x.ndim]
            return jax.device_put(x, placement.sharding(axes, x.shape))

        columns = {name: one(x, None if name in self._tables else "length") for name, x in rows.columns.items()}
        return replace(jax.tree.map(one, replace(rows, columns={})), columns=columns)


def _with_frozen(program: Any, frozen: Any, state: Any, batch: Batch) -> Any:
    return program(state, batch, frozen)


def prepare(
    settings: Training, objective: Objective, devices: Sequence[Any] | None = None, platform: str | None = None
) -> Ready:
    """Derive and place a recipe on the present devices, or on those given, such as a topology's."""
    cfg = model_config(settings.model)
    cfg = scored(cfg) if settings.scores else cfg
    devices = list(devices if devices is not None else _all_but(objective.spare_devices))
    objective.check(cfg)
    first = devices[0]
    own = set(jax.local_devices())
    here = [
        device for device in devices if device in own
    ]  # other processes' devices and a topology's do not report memory
    on_host = bool(here) and first.platform == "cpu"
    usable = host_share(len(here)) if on_host else usable_bytes(here[0]) if here else None
    chip = chip_of(first)
    beside = objective.beside(cfg, usable or (chip.device_hbm if chip else None))
    derived = derive(cfg, settings, chip, len(devices), num_slices(devices), usable, on_host, beside)
    platform = platform or ("cuda" if first.platform == "gpu" else str(first.platform))
    return make_ready(cfg, derived, objective, Placement(make_mesh(derived.axes, devices), TRAIN), platform)


def _all_but(spare: int) -> list[Any]:
    devices = jax.devices()
    if spare >= len(devices):
        raise RecipeError(
            f"engine.devices and reference.devices take {spare} of the {len(devices)} devices and leave none for the "
            "trainer: lower them, or set 0 to share devices",
            param="engine.devices",
        )
    return devices[: len(devices) - spare]


def make_ready(cfg: ModelConfig, derived: Derived, objective: Objective, placement: Placement, platform: str) -> Ready:
    """Return a derived recipe on a mesh. On an abstract mesh it can only be lowered."""
    settings = derived.settings
    cfg = cfg.within(settings.length)
    rate = learning_rate(settings.schedule, settings.optimizer.lr, settings.total_steps)
    optimizer = make_optimizer(settings.optimizer, rate, objective.specs(cfg), platform)
    return Ready(cfg, objective, derived, placement, optimizer, rate, platform)


def host_share(devices: int) -> int | None:
    """Return the bytes of memory for each CPU device; this process has `devices` of them.

    The devices of all processes on a host share its memory. The result is the least of all hosts, because every process
    must derive the same plan.
    """
    rows = [(zlib.crc32(machine.node().encode()) >> 1, (host_memory() or 0) >> 20, devices)]
    if jax.process_count() > 1:
        from jax.experimental import multihost_utils

        rows = multihost_utils.process_allgather(np.asarray(rows[0], np.int32)).tolist()  # MiB fit into 31 bits
    return least_share(rows)


def least_share(rows: Sequence[Sequence[int]]) -> int | None:
    """Return the least bytes per device of rows (host, its MiB or 0 if not known, devices of a process there)."""
    shares = []
    for host in {host for host, _, _ in rows}:
        memory = min(size for at, size, _ in rows if at == host)
        shares.append((memory << 20) // sum(count for at, _, count in rows if at == host))
    return min(shares) or None


# --- compiler options -------------------------------------------------------------------------------------------------


# The sparse cores of these chips communicate while the others compute. Without these options libtpu (0.0.42, 0.0.48)
# turns each gather of weights over a 3D torus into an all-reduce, with twice the bytes and without overlap.
SPARSE_CORES = ("v5p", "TPU7x")
_BY_THEM = "xla_tpu_enable_sparse_core_collective_offload"
BY_SPARSE_CORES: Mapping[str, Any] = {
    f"{_BY_THEM}_all_gather": True,
    f"{_BY_THEM}_2d_all_gather": True,
    f"{_BY_THEM}_3d_all_gather": True,
    f"{_BY_THEM}_all_reduce": True,
    f"{_BY_THEM}_reduce_scatter": True,
    "xla_tpu_enable_sparse_core_reduce_scatter_v2": True,
    "xla_enable_async_all_gather": True,
    "xla_tpu_enable_async_collective_fusion_fuse_all_gather": False,
    "xla_tpu_prefer_async_allgather_to_allreduce": True,
}
# Sum the stacked gradients of a loop over layers after the loop, not in every iteration.
SUMMED_BEHIND_LOOPS: Mapping[str, Any] = {"xla_while_loop_all_reduce_dus_code_motion_max_size_bytes": 1 << 40}
_UNKNOWN = re.compile(r"No such compile option: '(\w+)'")


def options_of(placement: Placement, platform: str, tokens: int) -> dict[str, Any]:
    """Return the compiler options for a step of `tokens` tokens."""
    given = dict(compile_options(platform, tokens) or {})
    mesh = placement.mesh
    if platform != "tpu" or mesh.size == 1:
        return given
    chip = chip_of(mesh.devices.flat[0])
    if chip and chip.name in SPARSE_CORES:
        given |= BY_SPARSE_CORES
    if mesh.size == mesh.shape["data"]:  # split weights would have to be gathered after the loop
        given |= SUMMED_BEHIND_LOOPS
    return given


def compiled(lowered: jax.stages.Lowered, options: dict[str, Any]) -> jax.stages.Compiled:
    """Compile with those of the options that this compiler knows."""
    try:
        return lowered.compile(compiler_options=options or None)
    except jax.errors.JaxRuntimeError as error:
        unknown = _UNKNOWN.search(str(error))
        if unknown is None or unknown[1] not in options:
            raise
        return compiled(lowered, {name: value for name, value in options.items() if name != unknown[1]})
