"""Everything of a run that can be known and compiled before any data is read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import numpy as np
import optax

from dovetail.core.chips import chip_of, usable_bytes
from dovetail.core.mesh import TRAIN, Placement, make_mesh, num_slices
from dovetail.core.types import Batch, Params
from dovetail.models.config import ModelConfig
from dovetail.train.derive import Derived, derive
from dovetail.train.model import read_model
from dovetail.train.optim import Rate, make_optimizer
from dovetail.train.schedule import learning_rate
from dovetail.train.settings import Pretrain
from dovetail.train.state import TrainState, batch_form, init_state, state_form, train_specs
from dovetail.train.step import Step, make_eval, make_step

DOCUMENTS = (1, 15, 63, 255)  # with the padding at a row's end a power of two


@dataclass(frozen=True)
class Ready:
    """A recipe on a mesh. `settings` has nothing left open."""

    cfg: ModelConfig
    derived: Derived
    placement: Placement
    optimizer: optax.GradientTransformation
    rate: Rate
    platform: str

    @property
    def settings(self) -> Pretrain:
        return self.derived.settings

    @cached_property
    def form(self) -> TrainState:
        return state_form(self.cfg, self.settings, self.optimizer, self.placement)

    def lower(self, documents: int | None = None) -> jax.stages.Lowered:
        """The step for batches whose rows hold no more than so many documents."""
        step = make_step(self.cfg, self.settings, self.optimizer, self.rate, self.placement, self.platform, documents)
        places = jax.tree.map(lambda leaf: leaf.sharding, self.form)
        jitted = jax.jit(step, donate_argnums=0, out_shardings=(places, None))
        return jitted.trace(self.form, batch_form(self.settings, self.placement)).lower(
            lowering_platforms=(self.platform,)
        )

    def compile(self, documents: int | None = None) -> Step:
        # cuBLAS's products are as good as those XLA would make itself, and half the compile time is choosing among them
        options: dict[str, Any] | None = {"xla_gpu_enable_triton_gemm": False} if self.platform == "cuda" else None
        return self.lower(documents).compile(compiler_options=options)  # type: ignore[return-value]

    def bucket(self, documents: int) -> int | None:
        """The bound to compile for when rows hold `documents`: a few sizes where it matters (cuDNN), else none."""
        if self.platform != "cuda":
            return None
        return next((n for n in DOCUMENTS if n >= documents), self.settings.length)

    def evaluate(self) -> Any:
        """(params, batch) -> (sum of -log p, targets), compiled."""
        fn = make_eval(self.cfg, self.settings, self.placement, self.platform)
        return jax.jit(fn).lower(self.form.params, batch_form(self.settings, self.placement)).compile()

    def init(self, params: Params | None = None) -> TrainState:
        return init_state(self.cfg, self.settings, self.optimizer, self.placement, params)

    def rows_here(self) -> tuple[int, int]:
        """(which share of a batch's rows this process loads, of how many)."""
        form: Any = batch_form(self.settings, self.placement).tokens
        places = form.sharding.addressable_devices_indices_map(form.shape).values()
        spans = [index[0].indices(form.shape[0])[:2] for index in places]
        first, last = min(start for start, _ in spans), max(stop for _, stop in spans)
        return first // (last - first), form.shape[0] // (last - first)

    def put(self, rows: Batch) -> Batch:
        """This process's rows (see rows_here) as its part of the batch of all."""
        form = batch_form(self.settings, self.placement)
        if jax.process_count() == 1:
            return jax.tree.map(lambda x, f: jax.device_put(np.asarray(x, f.dtype), f.sharding), rows, form)
        return jax.tree.map(
            lambda x, f: jax.make_array_from_process_local_data(f.sharding, np.asarray(x, f.dtype), f.shape), rows, form
        )


def prepare(settings: Pretrain, devices: Sequence[Any] | None = None, platform: str | None = None) -> Ready:
    """Lay a recipe over the devices that are there, or over those given (of a topology that is not, say)."""
    cfg = read_model(settings.model)
    devices = list(devices if devices is not None else jax.devices())
    first = devices[0]
    derived = derive(cfg, settings, chip_of(first), len(devices), num_slices(devices), _usable(devices))
    platform = platform or ("cuda" if first.platform == "gpu" else str(first.platform))
    return make_ready(cfg, derived, Placement(make_mesh(derived.axes, devices), TRAIN), platform)


def make_ready(cfg: ModelConfig, derived: Derived, placement: Placement, platform: str) -> Ready:
    """A derived recipe on a mesh, which may be an abstract one: then it can be lowered, and nothing else."""
    settings = derived.settings
    rate = learning_rate(settings.schedule, settings.optimizer.lr, settings.total_steps)
    optimizer = make_optimizer(settings.optimizer, rate, train_specs(cfg, settings), platform)
    return Ready(cfg, derived, placement, optimizer, rate, platform)


def _usable(devices: Sequence[Any]) -> int | None:
    """The memory that one of the devices has, if one is this process's: others, and those of a topology, do not say."""
    own = set(jax.local_devices())
    return next((usable_bytes(device) for device in devices if device in own), None)
