"""Build an Engine from a model's config and weights: its shapes, its KV pool and its scheduler's limits.

It makes no difference whether the weights came from a checkpoint or from a trainer in this process. An
AbstractEngine has the same steps, compiled for devices that are not here, for `dovetail compile serve`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from dovetail.core.chips import chip_of
from dovetail.core.compute import Compute, compute_of
from dovetail.core.errors import UnsupportedError, UserError
from dovetail.core.mesh import SERVE, Placement, make_mesh
from dovetail.core.spec import held_bytes, tree_map
from dovetail.core.types import Paged, Params, Weights
from dovetail.engine.device.adapters import adapters_for, check_adapters, with_adapters
from dovetail.engine.device.batch import LEAST_TOKENS, Buckets, Shape
from dovetail.engine.device.encoder import EncoderBuckets, EncoderShape
from dovetail.engine.device.following import with_draft
from dovetail.engine.device.kernels import prepare_kernels
from dovetail.engine.device.programs import Programs, ProgramShape
from dovetail.engine.device.runner import Runner
from dovetail.engine.device.torch_runner import TorchRunner
from dovetail.engine.engine import Engine
from dovetail.engine.options import EngineOptions, platform_default
from dovetail.engine.pages import StepsAhead, pages_that_fit, warms_up
from dovetail.engine.schedule.scheduler import Scheduler, SchedulerConfig
from dovetail.engine.schedule.step_time import Pace
from dovetail.engine.spec.draft_weights import draft_choices, load_draft_of, open_draft_of, outline_draft_of
from dovetail.engine.spec.speculator import speculator_of
from dovetail.io.tokenizer import Tokenizer
from dovetail.models.config import ModelConfig
from dovetail.models.draft.draft import DraftModel
from dovetail.models.formats import formats_of, rounded_formats
from dovetail.models.latent import Latent
from dovetail.models.publish import serving_spec
from dovetail.models.spec import VISION, flops_per_token, spec
from dovetail.ops.dispatch import choose_latent, choose_paged
from dovetail.ops.kernels.tpu.needs import TABLE_BYTES, table_bytes, why_not_ragged
from dovetail.ops.quant.weight import abstract_weight, is_quantized
from dovetail.plan.prediction import chip_here
from dovetail.plan.serve_memory import USABLE, largest_item

if TYPE_CHECKING:
    from dovetail.interop.torch.language_model import TorchLanguageModel

CPU_SIZES: dict[str, Any] = dict(  # fields of Buckets on a CPU, where padding costs time
    few_rows=(1, 2), least_rows=8, least_tokens=LEAST_TOKENS, tokens_a_row=1024, halves=False, few_hidden=False,
)  # fmt: skip
TORCH_MAX_LEN = 4096  # default most tokens of a torch module's sequence: each decode step reads a cache of all of them
TORCH_STEP_TOKENS = 512  # most prompt tokens of one of its steps


def placement_of(options: EngineOptions, devices: Sequence[Any] = (), always: bool = False) -> Placement | None:
    """Return the placement of weights and pages; None for one device, unless `always`.

    Args:
        options: The engine's options.
        devices: The devices, of which the first ones are used; by default jax's.
        always: Whether to return a placement for one device too.
    """
    count, chosen = options.tensor_parallel_size, (devices or jax.devices())[: options.tensor_parallel_size]
    if len(chosen) < count:
        raise UserError(
            f"`tensor_parallel_size` must be at most the number of devices, {len(chosen)}, got {count}",
            param="tensor_parallel_size",
        )
    return Placement(make_mesh({"tensor": count}, chosen), SERVE) if count > 1 or always else None


def compute_for(options: EngineOptions, params: Params) -> Compute:
    """Return the types to compute in: the option's, or the weights' own, or f32 on a CPU, where bf16 is slow."""
    if options.dtype is not None:
        return compute_of(options.dtype)
    return compute_of("f32" if jax.default_backend() == "cpu" else params["embed"].dtype)


def check_model(cfg: ModelConfig, options: EngineOptions) -> None:
    """Raise UserError for options that do not fit this model; called before its weights are read."""
    if cfg.images is not None:
        raise UserError("a model of images alone cannot be served: use a language model", param="model")
    page_size_for(options, _max_len(cfg, options.max_model_len))
    _check_images(cfg, options)
    check_adapters(cfg, options)
    open_draft_of(options.speculative_config, cfg, options.is_dummy)


def build_engine(
    cfg: ModelConfig,
    params: Params,
    options: EngineOptions,
    tokenizer: Tokenizer | None = None,
    placement: Placement | None = None,
    draft: DraftModel | None = None,
) -> Engine:
    """Build an engine.

    Args:
        cfg: The model's config.
        params: Published weights (see models.publish), in the type of `compute_for` and on `placement`.
        options: The engine's options.
        tokenizer: The model's, if it has one.
        placement: The result of `placement_of`.
        draft: A draft model in place of the one that the options name; its weights are random (see
            `Engine.replace_draft`).
    """
    compute = compute_for(options, params)
    config, dummy = options.speculative_config, options.is_dummy
    draft, draft_params = load_draft_of(config, cfg, compute.dtype, placement, dummy, draft)
    programs = programs_for(cfg, options, compute, placement, draft=draft)
    adapters = adapters_for(cfg, options, compute.dtype, placement, formats_of(params))
    params = adapters.join(params)
    buckets, page_size = programs.buckets, programs.page_size
    devices = list(placement.mesh.local_mesh.devices.flat) if placement else ()
    prepare_kernels(programs.platform, bool(formats_of(params)))  # a step from disk calls them without tracing
    with StepsAhead(programs, with_draft(adapters.on(params), draft_params), warms_up(options)) as ahead:
        pages = pages_that_fit(programs, ahead.params, options, devices, ahead.compile)
        runner = Runner(programs, Weights(params), pages, adapters, ahead.settled(pages), draft_params)
    limits = SchedulerConfig(
        options.max_num_seqs, buckets.max_tokens, _max_len(cfg, options.max_model_len), page_size, pages,
        options.enable_prefix_caching, options.scheduling_policy,
        encoder_rows=programs.encoder.rows if programs.encoder else 0,
        whole_images=bool(cfg.vision and cfg.vision.block_mask),
    )  # fmt: skip
    pace = Pace(buckets.max_tokens, _token_seconds(cfg, options, programs))
    speculator = speculator_of(config, buckets.drafts)
    return Engine(runner, Scheduler(limits), tokenizer, options.seed, options.max_decode_steps, pace, speculator)


def build_torch_engine(model: TorchLanguageModel, options: EngineOptions) -> Engine:
    """Build an engine that runs a PyTorch module, one sequence at a time."""
    wanted = options.max_model_len or min(model.config.max_len, TORCH_MAX_LEN)
    max_len, page_size = _max_len(model.config, wanted), options.block_size or 16
    most = min(options.max_num_batched_tokens or TORCH_STEP_TOKENS, TORCH_STEP_TOKENS, max(16, max_len))
    tokens = 1 << most.bit_length() - 1  # a power of two
    limits = SchedulerConfig(
        1, tokens, max_len, page_size, -(-max_len // page_size), enable_prefix_caching=False,
        policy=options.scheduling_policy,
    )  # fmt: skip
    runner: Any = TorchRunner(model, max_len, tokens, page_size)  # it has what an Engine calls of a Runner
    return Engine(runner, Scheduler(limits), model.tokenizer, options.seed, max_decode_steps=1)


def _token_seconds(cfg: ModelConfig, options: EngineOptions, programs: Programs) -> float | None:
    """Estimate the seconds per prompt token on a CPU, where a step of thousands would stop all streams for seconds.

    Return None elsewhere, and if `max_num_batched_tokens` is given.
    """
    if not programs.on_cpu or options.max_num_batched_tokens:
        return None
    chip = chip_here(programs.devices[0])
    return flops_per_token(cfg) / chip.bf16 if chip else None


def programs_for(
    cfg: ModelConfig,
    options: EngineOptions,
    compute: Compute,
    placement: Placement | None = None,
    absent: Any = None,
    draft: DraftModel | None = None,
) -> Programs:
    """Return the programs of an engine with these options; `absent` and `draft`: see Programs."""
    if options.backend == "torch":
        raise UserError('`backend="torch"` is for a model that `LLM` loads from a folder', param="backend")
    device = absent or jax.devices()[0]
    max_len = _max_len(cfg, options.max_model_len)
    cfg = cfg.within(max_len)
    page_size = page_size_for(options, max_len, device.platform)
    max_tokens = options.max_num_batched_tokens or platform_default("max_num_batched_tokens", device.platform)
    sizes, drafts = _sizes(cfg, options, compute, device), draft_choices(options.speculative_config, draft)
    images = dict(images=cfg.vision is not None, mrope=bool(cfg.vision and cfg.vision.mrope))
    sizes |= dict(drafts=drafts, proposes=draft is not None, **images)
    buckets = Buckets(options.max_num_seqs, max_tokens, -(-max_len // page_size), **sizes)
    platform = device.platform if absent else None
    encoder = _encoder(cfg, buckets, max_len, device)
    _check_kv_cache(cfg, options.kv_cache_dtype)
    kv = options.kv_cache_dtype
    return Programs(cfg, compute, buckets, page_size, platform, placement, absent, draft, encoder, kv)


def _check_kv_cache(cfg: ModelConfig, kv: str) -> None:
    if kv != "auto" and all(layer.attn.page_dtype("bfloat16", kv) == jnp.bfloat16 for layer in cfg.layers):
        raise UnsupportedError(
            f"`kv_cache_dtype` {kv} requires layers that attend to all earlier tokens by keys and values; {cfg.family} "
            "has latents or sliding windows alone: leave it at auto",
            param="kv_cache_dtype",
        )


def _encoder(cfg: ModelConfig, buckets: Buckets, max_len: int, device: Any) -> EncoderBuckets | None:
    if cfg.vision is None:
        return None
    # a CPU computes several items no faster than one by one
    items, least = ((1,), 64) if device.platform == "cpu" else ((1, 4, 16), 512)
    return EncoderBuckets.of(cfg.vision.tower, buckets.max_tokens, max_len, items, least)


def _check_images(cfg: ModelConfig, options: EngineOptions) -> None:
    """Raise UserError if an image that must be computed in one step has more tokens than a step."""
    tokens = options.max_num_batched_tokens
    if tokens and cfg.vision and cfg.vision.block_mask:
        least = largest_item(cfg.vision.tower) + options.max_num_seqs
        if tokens < least:
            raise UserError(
                f"`max_num_batched_tokens` must be at least {least} with this model, because a step computes an image "
                f"as a whole beside {options.max_num_seqs} sequences, got {tokens}",
                param="max_num_batched_tokens",
            )


def _sizes(cfg: ModelConfig, options: EngineOptions, compute: Compute, device: Any) -> dict[str, Any]:
    """Return the fields of Buckets that depend on the device."""
    chip = chip_of(device)
    sizes: dict[str, Any] = dict(max_decode_steps=options.max_decode_steps)
    if chip:  # a decode step reads the weights that a token uses, and computes two operations each for every row
        flops = flops_per_token(cfg) / options.tensor_parallel_size
        reading = flops / 2 * compute.dtype.itemsize / chip.bandwidth
        sizes |= dict(step_seconds=(reading, flops / chip.device_bf16))
    if device.platform == "cpu":
        sizes |= CPU_SIZES
    return sizes


def page_size_for(options: EngineOptions, max_len: int, platform: str | None = None) -> int:
    """Return the tokens of a page: the option's or the platform's default.

    On a TPU the default is doubled until the page table of all rows fits the kernel's SMEM.
    """
    platform = platform or jax.default_backend()
    size = options.block_size or platform_default("block_size", platform)
    if platform != "tpu":
        return size
    while (table := table_bytes(options.max_num_seqs, -(-max_len // size))) > TABLE_BYTES:
        if options.block_size:
            raise UserError(
                f"`block_size` must be larger for {options.max_num_seqs} sequences of {max_len} tokens: with {size} "
                f"the page table takes {table / 2**20:.1f} MiB, and a TPU's kernel has {TABLE_BYTES / 2**20:.1f} MiB "
                "of SMEM. Leave it out, or lower max_model_len or max_num_seqs",
                param="block_size",
            )
        size *= 2
    return size


def _max_len(cfg: ModelConfig, asked: int | None) -> int:
    if asked is not None and not 2 <= asked <= cfg.max_len:
        raise UserError(
            f"`max_model_len` must be between 2 and the model's own {cfg.max_len}, got {asked}", param="max_model_len"
        )
    return cfg.max_len if asked is None else asked


# --- without devices --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class AbstractEngine:
    """Describe an engine without arrays."""

    programs: Programs
    params: Any  # abstract weights
    pages: int  # of the pool that the engine would have

    @property
    def cfg(self) -> ModelConfig:
        """Return the model's config."""
        return self.programs.cfg

    @property
    def weight_bytes(self) -> int:
        """Return the bytes of the weights on one device."""
        return held_bytes(self.params)

    @property
    def pool_bytes(self) -> int:
        """Return the bytes of the KV pool on one device."""
        return held_bytes(self.programs.pages(self.pages))

    @property
    def tower_bytes(self) -> int:
        """Return the bytes of the vision tower's weights on one device, which `weight_bytes` contains."""
        return held_bytes(self.params.get(VISION, ()))

    @property
    def layer_shapes(self) -> list[tuple[int, ...]]:
        """Return the shapes of the layers' pages on one device, each kind once."""
        return self.programs.local_pools(self.pages)

    def corners(self) -> list[ProgramShape]:
        """Return the smallest and the largest decode and verify steps, the largest with prompts, and encoder calls."""
        buckets = self.programs.buckets
        usual = sorted((s for s in buckets.usual() if s.tokens), key=lambda shape: (shape.rows, shape.tokens))
        decode = [shape for shape in usual if shape.is_decode and shape.steps == 1]
        verify = [shape for shape in usual if shape.drafts and not shape.proposes]
        ends = [*decode[:1], *decode[-1:], *verify[:1], *verify[-1:]]
        encoder = self.programs.encoder
        calls = [encoder.usual()[0], encoder.largest()] if encoder else []
        return list(dict.fromkeys([*ends, replace(buckets.largest(), images=buckets.images), *calls]))

    def compile(self, shape: ProgramShape, more: Mapping[str, Any] | None = None) -> Any:
        """Compile a step; `more` are further options of XLA."""
        return self.programs.compile(shape, self.params, self.pages, more)

    def argument_bytes(self, shape: ProgramShape) -> int:
        """Return the bytes of a program's arguments on one device: weights, pages and the sampler's arrays."""
        return held_bytes(self.programs.of(shape, self.params, self.programs.pages(self.pages)).abstract)

    def flops(self, shape: ProgramShape) -> float:
        """Return one device's FLOPs without attention over pages and a draft model's.

        Only a row's last token is unembedded, except in a verify step.
        """
        if isinstance(shape, EncoderShape):
            assert self.cfg.vision is not None
            return shape.items * self.cfg.vision.tower.flops(shape.patches) / len(self.programs.devices)
        head = 2.0 * self.cfg.vocab * self.cfg.dim
        unembedded = shape.tokens if shape.drafts else shape.rows
        tokens = shape.tokens * (flops_per_token(self.cfg) - head) + unembedded * head
        return tokens / len(self.programs.devices)

    def moved(self, shape: ProgramShape) -> tuple[float, float]:
        """Return the least and the most bytes of one device's memory that a program reads.

        The least are the weights that its tokens use (with experts, each token's own at most), the most all weights and
        all pages. An encoder call reads its arguments.
        """
        if isinstance(shape, EncoderShape):
            return self.tower_bytes, self.argument_bytes(shape)
        size = self.programs.compute.dtype.itemsize
        used = flops_per_token(self.cfg) / 2 * size / len(self.programs.devices)
        some = any(layer.moe for layer in self.cfg.layers)
        return min(self.weight_bytes, used * (shape.tokens if some else 1)), self.weight_bytes + self.pool_bytes

    def kernels(self, shape: Shape) -> list[str]:
        """Return the paged attention kernel of each kind of layer of the model, and if it is not upstream's, why."""
        pages = self.programs.pages(self.pages)[: len(self.cfg.layers)]
        with self.programs.device_kind():
            found = [self._kernel(shape, layer.attn, own) for layer, own in zip(self.cfg.layers, pages, strict=True)]
        return list(dict.fromkeys(name for name in found if name))

    def _kernel(self, shape: Shape, attn: Any, pages: Any) -> str:
        programs = self.programs
        tables = jax.ShapeDtypeStruct((shape.rows, shape.pages), jnp.int32)
        if pages is None:  # it reads another layer's pages
            return ""
        if isinstance(attn, Latent):
            q = self._queries(shape, attn.heads, attn.kv_rank + attn.rope_dim)
            ctx = Paged(tables, tables, tables, tables, placement=programs.placement)  # type: ignore[arg-type]
            return f"{choose_latent(programs.platform, q, attn.kv_rank, ctx, pages)}, over latents"
        q, sinks = self._queries(shape, attn.heads, attn.head_dim), tables if attn.sinks else None
        where = sinks, programs.placement, tables
        name = choose_paged(programs.platform, q, attn.kv_heads, *where, pages)  # type: ignore[arg-type]
        reason = why_not_ragged(q, attn.kv_heads, *where, attn.block_mask) if programs.platform == "tpu" else None
        return f"{name} (not upstream's: {reason})" if reason else name

    def _queries(self, shape: Shape, heads: int, dim: int) -> Any:
        return jax.ShapeDtypeStruct((shape.tokens, heads, dim), self.programs.compute.dtype)


@dataclass(frozen=True)
class _Empty:
    """Imitate a device with all its memory free."""

    limit: int

    def memory_stats(self) -> dict[str, int]:
        return {"bytes_limit": self.limit}


def abstract_engine(cfg: ModelConfig, options: EngineOptions, devices: Sequence[Any]) -> AbstractEngine:
    """Return the engine that these options would make on the first of the devices; weights are bf16 by default."""
    count, chip = options.tensor_parallel_size, chip_of(devices[0])
    if count > len(devices):
        raise UserError(
            f"`tensor_parallel_size` must be at most the {len(devices)} devices of the topology, got {count}",
            param="tensor_parallel_size",
        )
    placement, compute = placement_of(options, devices), compute_of(options.dtype or "bf16")
    draft = outline_draft_of(options.speculative_config, cfg, options.is_dummy)
    programs = programs_for(cfg, options, compute, placement, devices[0], draft)
    formats = rounded_formats(spec(cfg), options.quantization or "")
    params = _abstract_params(serving_spec(cfg, placement, formats), compute.dtype, placement, devices[0].platform)
    params = with_adapters(params, cfg, options, compute.dtype, placement)
    if draft:
        params = with_draft(params, _abstract_params(draft.spec(), compute.dtype, placement, devices[0].platform))
    limit = int(chip.device_hbm * USABLE["tpu"]) if chip else 0
    return AbstractEngine(programs, params, pages_that_fit(programs, params, options, [_Empty(limit)]))


def _abstract_params(specs: Any, dtype: Any, placement: Placement | None, platform: str) -> Any:
    def one(leaf: Any) -> Any:
        weight = abstract_weight(leaf, dtype, placement)
        return replace(weight, platform=platform) if is_quantized(weight) else weight

    return tree_map(one, specs)
