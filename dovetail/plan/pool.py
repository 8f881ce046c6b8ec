"""What an engine holds on one device: weights, KV pages and its largest step, counted before anything is allocated.

Weights and pages lie as the engine lays them out (models.publish, models.spec.cache_shapes, core.mesh.SERVE): key heads
that the tensor axis does not divide are whole on every device, as a latent is, and a layer with a window keeps all
tokens, for all layers share one table of pages. The engine decides the same from what its devices say; a test
compares them.

`spread` is another layout, of a replica over several machines, which this engine does not run: with more devices than
key heads each device holds the key head of its query heads, as vLLM has it, in place of all of them.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any, cast

import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractDevice, AbstractMesh

from dovetail.core.chips import Chip
from dovetail.core.mesh import MESH_AXES, SERVE, Placement
from dovetail.core.spec import ParamSpec, leaf_dtype, leaves
from dovetail.models.config import Attention, Layer, ModelConfig
from dovetail.models.publish import serving_spec
from dovetail.models.spec import cache_shapes

# Of a chip's memory, what jax may take: on a GPU what dovetail/__init__.py asks for, on a TPU what its runtime leaves
USABLE = {"tpu": 0.975, "cuda": 0.95, "cpu": 1.0}
FRACTION = 0.97  # of that, what the engine takes (engine.options)
CPU_FRACTION = 0.2  # of a CPU's memory, for the pages alone
SLACK = 512 * 2**20  # what the allocator loses between pieces (engine.memory)
PAGE = {"tpu": 128, "cuda": 16, "cpu": 16}  # tokens (engine.build)
STEP_TOKENS = {"tpu": 16384, "cuda": 16384, "cpu": 8192}  # most of one step (engine.build)
SAMPLER_TABLES = 4  # [rows, vocab] of 32 bits beside the step's own (engine.program)
# How weights and pages may be held, in bytes. The engine computes with the first four; of the others, PLANNED_ONLY.
HELD = {"bf16": 2.0, "f16": 2.0, "f32": 4.0, "tf32": 4.0, "int8": 1.0, "fp8": 1.0, "int4": 0.5}
PLANNED_ONLY = ("int8", "fp8", "int4")  # to know what they would give: the engine has neither such weights nor pages


@dataclass(frozen=True)
class Held:
    """Bytes on one of `tensor` devices."""

    tensor: int
    weights: int
    per_token: int  # of KV pages
    page: int  # tokens
    step: int  # the largest step, estimated
    room: int | None  # for pages; None: the memory is not known

    @property
    def pages(self) -> int | None:
        """That fit."""
        return None if self.room is None else max(0, self.room // (self.per_token * self.page))

    @property
    def tokens(self) -> int | None:
        return None if self.pages is None else self.pages * self.page

    def sequences(self, length: int) -> int | None:
        """Of so many tokens that fit at a time; a sequence takes whole pages."""
        return None if self.pages is None else self.pages // -(-length // self.page)


def held(
    cfg: ModelConfig,
    chip: Chip | None,
    tensor: int = 1,
    *,
    dtype: str = "bf16",
    kv: str = "",
    rows: int = 256,
    memory: int | None = None,
    page: int = 0,
    step_tokens: int = 0,
    spread: bool = False,
) -> Held:
    """Return what one device holds. `chip` None is a CPU, of which `memory` bytes are free. `rows`: most sequences of
    a step. `page` and `step_tokens`: the engine's own choice unless given."""
    platform = platform_of(chip)
    page, step_tokens = page or PAGE[platform], step_tokens or STEP_TOKENS[platform]
    weights = sum(size for _, size in local_weights(cfg, chip, tensor, dtype, spread))
    per_token = sum(row for row in local_rows(cfg, chip, tensor, kv or dtype, spread) if row is not None)
    step = _step_bytes(cfg, tensor, step_tokens, rows, HELD[compute_dtype(dtype)])
    total = memory or (chip.device_hbm if chip else None)
    if total is None:
        room = None
    elif platform == "cpu":
        room = int((total - weights) * CPU_FRACTION)
    else:
        room = int(total * USABLE[platform] * FRACTION) - weights - step - SLACK
    return Held(tensor, weights, per_token, page, step, room)


def platform_of(chip: Chip | None) -> str:
    """As jax calls it. A CPU has no device_kind in the table."""
    kind = chip.kinds[0] if chip and chip.kinds else ""
    return "tpu" if kind.startswith("TPU") else "cuda" if kind else "cpu"


def compute_dtype(held_as: str) -> str:
    """What is computed in where weights are held as `held_as`."""
    return "bf16" if held_as in PLANNED_ONLY else held_as


@functools.lru_cache(maxsize=64)
def placement(chip: Chip | None, tensor: int) -> Placement | None:
    """Of devices that are nowhere; None: a single one, as the engine has it."""
    if tensor == 1:
        return None
    kind = chip.kinds[0] if chip and chip.kinds else "cpu"
    device = AbstractDevice(kind, num_cores=1, platform=platform_of(chip))
    sizes = tuple(tensor if name == "tensor" else 1 for name in MESH_AXES)
    return Placement(cast(Any, AbstractMesh(sizes, MESH_AXES, abstract_device=device)), SERVE)


@functools.lru_cache(maxsize=256)
def local_weights(
    cfg: ModelConfig, chip: Chip | None, tensor: int, dtype: str, spread: bool = False
) -> tuple[tuple[ParamSpec, int], ...]:
    """Return every weight of the engine's form with its bytes on one device."""
    place = placement(chip, tensor)
    return tuple((one, _bytes(one, place, dtype, spread)) for _, one in leaves(serving_spec(cfg, place)))


def _bytes(one: ParamSpec, place: Placement | None, dtype: str, spread: bool) -> int:
    """Vectors (norms, biases) are never held in less than what is computed in."""
    own = leaf_dtype(one, _numpy_dtype(compute_dtype(dtype)))
    each = HELD[dtype] if dtype in PLANNED_ONLY and len(one.shape) > 1 and one.dtype is None else own.itemsize
    return int(local_size(one, place, spread) * each)


def local_size(one: ParamSpec, place: Placement | None, spread: bool = False) -> int:
    """Return the elements of a weight on one device."""
    parts = _parts(place.partition(one.axes, one.shape), place) if place else 1
    if spread and place and "kv_heads" in one.axes:
        parts = max(parts, math.gcd(one.shape[one.axes.index("kv_heads")], place.size("kv_heads")))
    return math.prod(one.shape) // parts


def local_rows(cfg: ModelConfig, chip: Chip | None, tensor: int, kv: str, spread: bool = False) -> list[int | None]:
    """Return the bytes of one token in each layer's pages on one device; None for a layer that reads another's."""
    place, platform = placement(chip, tensor), platform_of(chip)
    shapes = cache_shapes(cfg, 1, 1, _numpy_dtype(compute_dtype(kv)), place, platform)
    return [
        None if shape is None else int(math.prod(shape) // page_parts(layer, place, spread) * HELD[kv])
        for layer, shape in zip(cfg.layers, shapes, strict=True)
    ]


def page_parts(layer: Layer, place: Placement | None, spread: bool = False) -> int:
    """Return over how many devices a layer's pages are split."""
    if spread and place and isinstance(layer.attn, Attention):
        return math.gcd(layer.attn.kv_heads, place.size("kv_heads"))
    return _parts(layer.attn.pages_partition(place), place) if place else 1


def _parts(partition: Any, place: Placement) -> int:
    names = [name for part in partition if part for name in ((part,) if isinstance(part, str) else part)]
    return math.prod(place.mesh.shape[name] for name in names)


def _numpy_dtype(name: str) -> np.dtype:
    return jnp.dtype({"bf16": jnp.bfloat16, "f16": jnp.float16, "f32": jnp.float32, "tf32": jnp.float32}[name])


def _step_bytes(cfg: ModelConfig, tensor: int, tokens: int, rows: int, itemsize: float) -> int:
    """Of the largest step: the residual stream and its norm, a layer's widest products, the sampler's tables. The
    engine asks the compiler; on an H200 this is 2.7 GiB where the pool of an 8B shape says 2.4 to 3.4."""
    widest = max(_widest(layer, tensor) for layer in cfg.layers)
    return int(tokens * itemsize * (3 * cfg.dim + widest) + SAMPLER_TABLES * rows * cfg.vocab * 4)


def _widest(layer: Layer, tensor: int) -> int:
    """Elements per token: gate, up and their product, or a token's copies for its experts and theirs."""
    plain = 3 * layer.mlp.width // tensor if layer.mlp else 0
    if not layer.moe:
        return plain
    shared = layer.moe.shared.width if layer.moe.shared else 0
    return plain + 3 * (layer.moe.router.top_k * layer.moe.width + shared) // tensor
