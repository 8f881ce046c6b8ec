"""From a model's config and weights to an Engine: its shapes, its KV pool, its scheduler's limits. Whether the weights
came from a checkpoint or from a trainer in this process makes no difference here."""

from __future__ import annotations

from typing import Any

import jax

from dovetail.core.chips import chip_of
from dovetail.core.compute import Compute, compute_of
from dovetail.core.mesh import SERVE, Placement, make_mesh
from dovetail.core.types import Params, Weights
from dovetail.engine.buckets import Buckets
from dovetail.engine.engine import Engine
from dovetail.engine.memory import held_bytes, num_pages, pool_bytes, round_pages
from dovetail.engine.options import EngineOptions
from dovetail.engine.runner import Runner
from dovetail.engine.scheduler import Scheduler, SchedulerConfig
from dovetail.io.tokenizer import Tokenizer
from dovetail.models.config import ModelConfig
from dovetail.models.spec import flops_per_token

TPU_TABLE_BYTES = 2**19  # of a core's 1 MiB of SMEM: libtpu took a table of 256 x 512 and refused one of 256 x 1,024


def placement_of(options: EngineOptions) -> Placement | None:
    """Where the weights and pages lie; None: on one device."""
    count = options.tensor_parallel
    return Placement(make_mesh({"tensor": count}, jax.devices()[:count]), SERVE) if count > 1 else None


def compute_for(options: EngineOptions, params: Params) -> Compute:
    """As it was asked for, or the weights' own; on a CPU, where bf16 is slow or emulated, f32."""
    if options.dtype is not None:
        return compute_of(options.dtype)
    return compute_of("f32" if jax.default_backend() == "cpu" else params["embed"].dtype)


def build_engine(
    cfg: ModelConfig,
    params: Params,
    options: EngineOptions,
    tokenizer: Tokenizer | None = None,
    placement: Placement | None = None,
) -> Engine:
    """`params`: published (see models.publish), in the type of `compute_for` and on `placement`."""
    on_cpu = jax.default_backend() == "cpu"
    max_len = _max_len(cfg, options.max_model_len)
    cfg = cfg.within(max_len)
    page_size = page_size_for(options, max_len)
    max_pages = -(-max_len // page_size)
    max_tokens = options.max_num_batched_tokens or (8192 if on_cpu else 16384)
    weights, compute = Weights(params), compute_for(options, params)
    buckets = Buckets(options.max_num_seqs, max_tokens, max_pages, **_sizes(cfg, options, compute))

    def make_runner(pages: int) -> Runner:
        return Runner(cfg, weights, compute, buckets, page_size, pages, placement=placement)

    pages = _pages_that_fit(make_runner(1), options)
    config = SchedulerConfig(
        options.max_num_seqs, max_tokens, max_len, page_size, pages, options.prefix_caching, options.policy
    )
    return Engine(make_runner(pages), Scheduler(config), tokenizer, options.seed, options.multi_step)


def _sizes(cfg: ModelConfig, options: EngineOptions, compute: Compute) -> dict[str, Any]:
    """Of Buckets, what depends on the device."""
    chip = chip_of(jax.devices()[0])
    sizes: dict[str, Any] = dict(multi_step=options.multi_step)
    if chip:  # the weights that a token uses (of experts, its own) are read, and take two operations each for every row
        flops = flops_per_token(cfg) / options.tensor_parallel
        reading = flops / 2 * compute.dtype.itemsize / chip.bandwidth
        sizes |= dict(step_seconds=(reading, flops / chip.device_bf16))
    if jax.default_backend() == "cpu":
        sizes |= dict(few_rows=(1, 2), least_rows=8, least_tokens=32, growth=4, tokens_a_row=64, halves=False)
    return sizes


def page_size_for(options: EngineOptions, max_len: int, platform: str | None = None) -> int:
    """As given; else 16 tokens, and on a TPU, whose kernel reads long pages faster, 128 or as many more as it takes for
    the table of all rows' pages to fit the memory that the kernel wants it in."""
    if (platform or jax.default_backend()) != "tpu":
        return options.page_size or 16
    size = options.page_size or 128
    while (table := options.max_num_seqs * -(-max_len // size) * 4) > TPU_TABLE_BYTES:
        if options.page_size:
            raise ValueError(
                f"page_size={size} makes a table of {table / 2**20:.1f} MiB for {options.max_num_seqs} sequences of "
                f"{max_len} tokens, and a TPU's kernel has room for {TPU_TABLE_BYTES / 2**20:.1f}: leave page_size "
                "out, or lower max_model_len or max_num_seqs"
            )
        size *= 2
    return size


def _pages_that_fit(trial: Runner, options: EngineOptions) -> int:
    """How many pages the pool gets beside what this runner, which has one, holds and needs."""
    kv_bytes = options.kv_bytes
    if kv_bytes is None:
        step_bytes = 0 if jax.default_backend() == "cpu" else trial.step_memory()
        devices = list(trial.placement.mesh.local_mesh.devices.flat) if trial.placement else ()
        kv_bytes = pool_bytes(options.memory_fraction, held_bytes(trial.weights.params), step_bytes, devices)
    most = options.max_num_seqs * trial.buckets.max_pages
    pages = num_pages(kv_bytes, held_bytes(trial.cache), trial.page_size, most)
    return pages if options.kv_bytes or pages == most else round_pages(pages)


def _max_len(cfg: ModelConfig, asked: int | None) -> int:
    if asked is not None and not 2 <= asked <= cfg.max_len:
        raise ValueError(f"max_model_len must be between 2 and the model's own {cfg.max_len}; got {asked}")
    return cfg.max_len if asked is None else asked
