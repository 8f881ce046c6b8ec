"""AbstractEngine: an engine's steps compiled for devices that are not here, for `dovetail compile serve`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from dovetail.core.chips import chip_of
from dovetail.core.compute import compute_of
from dovetail.core.errors import UserError
from dovetail.core.mesh import Placement, param_sharding
from dovetail.core.spec import held_bytes, leaf_dtype, tree_map
from dovetail.core.types import Paged
from dovetail.engine.build import pages_that_fit, placement_of, programs_for
from dovetail.engine.device.adapters import with_adapters
from dovetail.engine.device.batch import Shape
from dovetail.engine.device.programs import Programs
from dovetail.engine.options import EngineOptions
from dovetail.models.config import ModelConfig
from dovetail.models.latent import Latent
from dovetail.models.publish import serving_spec
from dovetail.models.spec import flops_per_token
from dovetail.ops.dispatch import choose_latent, choose_paged
from dovetail.ops.kernels.tpu.needs import why_not_ragged
from dovetail.plan.serve_memory import USABLE


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
    def layer_shapes(self) -> list[tuple[int, ...]]:
        """Return the shapes of the layers' pages on one device, each kind once."""
        layers = jax.tree.leaves(self.programs.pages(self.pages))
        return list(dict.fromkeys(layer.sharding.shard_shape(layer.shape) for layer in layers))

    def corners(self) -> list[Shape]:
        """Return the smallest and the largest decode step and the largest step with prompts."""
        buckets = self.programs.buckets
        decode = [shape for shape in buckets.usual() if shape.tokens and shape.is_decode and shape.steps == 1]
        rows = sorted(decode, key=lambda shape: shape.rows)
        return list(dict.fromkeys([rows[0], rows[-1], buckets.largest()]))

    def compile(self, shape: Shape, more: Mapping[str, Any] | None = None) -> Any:
        """Compile a step; `more` are further options of XLA."""
        return self.programs.compile(shape, self.params, self.pages, more)

    def argument_bytes(self, shape: Shape) -> int:
        """Return the bytes of a step's arguments on one device: weights, pages and the sampler's arrays."""
        return held_bytes(self.programs.of(shape, self.params, self.programs.pages(self.pages)).abstract)

    def flops(self, shape: Shape) -> float:
        """Return one device's FLOPs without attention over pages; only a row's last token is unembedded."""
        head = 2.0 * self.cfg.vocab * self.cfg.dim
        tokens = shape.tokens * (flops_per_token(self.cfg) - head) + shape.rows * head
        return tokens / len(self.programs.devices)

    def moved(self, shape: Shape) -> tuple[float, float]:
        """Return the least and the most bytes of one device's memory that a step reads.

        The least are the weights that its tokens use (with experts, each token's own at most), the most all weights and
        all pages.
        """
        size = self.programs.compute.dtype.itemsize
        used = flops_per_token(self.cfg) / 2 * size / len(self.programs.devices)
        some = any(layer.moe for layer in self.cfg.layers)
        return min(self.weight_bytes, used * (shape.tokens if some else 1)), self.weight_bytes + self.pool_bytes

    def kernels(self, shape: Shape) -> list[str]:
        """Return the attention kernel of each kind of layer, and if it is not upstream's, why."""
        pages = self.programs.pages(self.pages)
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
        reason = why_not_ragged(q, attn.kv_heads, *where) if programs.platform == "tpu" else None
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
    programs = programs_for(cfg, options, compute, placement, devices[0])
    params = with_adapters(_abstract_params(cfg, compute.dtype, placement), cfg, options, compute.dtype, placement)
    limit = int(chip.device_hbm * USABLE["tpu"]) if chip else 0
    return AbstractEngine(programs, params, pages_that_fit(programs, params, options, [_Empty(limit)]))


def _abstract_params(cfg: ModelConfig, dtype: Any, placement: Placement | None) -> Any:
    def one(spec: Any) -> Any:
        return jax.ShapeDtypeStruct(spec.shape, leaf_dtype(spec, dtype), sharding=param_sharding(placement, spec))

    return tree_map(one, serving_spec(cfg, placement))
