"""Count the memory of an engine on one device: weights, KV pages and the largest step.

`dovetail plan` and RL call `held` and `beside_trainer` before anything is allocated; the engine calls `pool_room`,
`bytes_beside` and `num_pages` with what its devices and the compiler report. Weights and pages are laid out as the
engine does (models.publish, models.spec.cache_shapes, core.mesh.SERVE): key heads that the tensor axis does not divide
are whole on every device, as latents are, and a layer with a window keeps all tokens, because all layers share one page
table.

`spread` is another layout, for a replica over several machines, which this engine does not run: with more devices than
key heads, each device holds the key head of its query heads, as in vLLM.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractDevice, AbstractMesh

from dovetail.core.chips import Chip
from dovetail.core.errors import OutOfMemoryError
from dovetail.core.host import available_memory
from dovetail.core.mesh import MESH_AXES, SERVE, Placement, array_shardings
from dovetail.core.spec import ParamSpec, leaves, num_bytes, num_params
from dovetail.models.config import Attention, Layer, ModelConfig
from dovetail.models.draft.draft import DraftModel
from dovetail.models.formats import rounded_formats
from dovetail.models.publish import serving_spec
from dovetail.models.spec import VISION, cache_shapes, kv_bytes_per_token, spec
from dovetail.models.towers.vision import Tower

# The defaults of gpu_memory_utilization, block_size and max_num_batched_tokens are declared in engine.options, which
# plan may not import; a test compares both.
# The share of a chip's memory that jax may use: on a GPU what dovetail/__init__.py sets; on a TPU what its runtime
# leaves (not measured here).
USABLE = {"tpu": 0.975, "cuda": 0.95, "cpu": 1.0}
MEMORY_UTILIZATION = 0.97  # the share of that for weights, pages and steps together
CPU_MEMORY_UTILIZATION = 0.2  # the share of a CPU's free memory for pages: the machine is often a laptop
SLACK = 512 * 2**20  # bytes that the allocator loses to fragmentation
PAGE = {"tpu": 128, "cuda": 16, "cpu": 16}  # tokens per page: a TPU's kernel reads long pages faster
STEP_TOKENS = {"tpu": 16384, "cuda": 16384, "cpu": 8192}  # the most tokens of one step
MOST_PATCHES = 16384  # of an encoder call with several images: more do not make an accelerator faster
SAMPLER_TABLES = 4  # [rows, vocab] tables of 32 bits that the sampler needs besides the compiled step
# Beside a trainer on the same device, pages take at most this share of it, and the largest step about this many bytes.
BESIDE_POOL_SHARE = 0.3
BESIDE_STEP_BYTES = 2 * 2**30
# Bytes per element of pages, and of weights that are not QUANTIZED, whose scales are counted too (core.formats). The
# engine computes in the first four, and has no pages in others.
HELD = {"bf16": 2.0, "f16": 2.0, "f32": 4.0, "tf32": 4.0, "int8": 1.0, "fp8": 1.0, "int4": 0.5}
QUANTIZED = ("int8", "fp8", "int4")


# --- planned ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Held:
    """Hold the bytes on one of `tensor` devices."""

    tensor: int
    weights: int
    per_token: int  # KV bytes per token
    page: int  # tokens per page
    step: int  # bytes of the largest step or of the vision encoder, and of its buffer of features, estimated
    room: int | None  # bytes for pages; None: the memory is not known

    @property
    def pages(self) -> int | None:
        """Return how many pages fit."""
        return None if self.room is None else max(0, self.room // (self.per_token * self.page))

    @property
    def tokens(self) -> int | None:
        """Return how many tokens the pages hold."""
        return None if self.pages is None else self.pages * self.page

    def sequences(self, length: int) -> int | None:
        """Return how many sequences of `length` tokens fit at a time; a sequence takes whole pages."""
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
    draft: DraftModel | None = None,
) -> Held:
    """Return what one device of an engine holds.

    Args:
        cfg: The model.
        chip: The kind of chip; None for a CPU with `memory` free bytes.
        tensor: Devices per replica.
        dtype: How weights are held, a key of HELD.
        kv: How KV pages are held; default: as weights.
        rows: The most sequences of a step.
        memory: Bytes of one device, if known better than from the chip's table.
        page: Tokens per page; default: the engine's choice.
        step_tokens: The most tokens of a step; default: the engine's choice.
        spread: Whether the replica spans several machines (see the module's docstring).
        draft: The draft model, whose weights and pages are counted with the model's.
    """
    platform = platform_of(chip)
    page, step_tokens = page or PAGE[platform], step_tokens or STEP_TOKENS[platform]
    weights = sum(size for _, size in local_weights(cfg, chip, tensor, dtype, spread))
    per_token = sum(row for row in local_rows(cfg.layers, chip, tensor, kv or dtype, spread) if row is not None)
    drafting = held_draft(draft, chip, tensor, dtype, kv) if draft else HeldDraft(0, 0)
    weights, per_token = weights + drafting.weights, per_token + drafting.per_token
    size = HELD[compute_dtype(dtype)]
    step = step_estimate(cfg, tensor, step_tokens, rows, size)
    step += feature_bytes(cfg, step_tokens, size)
    total = memory or (chip.device_hbm if chip else None)
    if total is None:
        room = None
    elif platform == "cpu":
        room = int((total - weights) * CPU_MEMORY_UTILIZATION)
    else:
        room = pool_room(total * USABLE[platform], None, weights, step)
    if room is not None:
        room -= drafting.per_token * page  # the engine's scratch page for draft tokens
    return Held(tensor, weights, per_token, page, step, room)


class HeldDraft(NamedTuple):
    """Hold the bytes of a draft model on one device."""

    weights: int
    per_token: int


def held_draft(draft: DraftModel, chip: Chip | None, tensor: int, dtype: str, kv: str = "") -> HeldDraft:
    """Return what one device holds of a draft model; the arguments are those of `held`."""
    place, rows = placement(chip, tensor), local_rows(draft.layers, chip, tensor, kv or dtype)
    weights = sum(_bytes(one, place, dtype, False) for _, one in leaves(draft.spec()))
    return HeldDraft(weights, sum(row for row in rows if row is not None))


def platform_of(chip: Chip | None) -> str:
    """Return the chip's platform as jax names it. A CPU has no device_kind in the table."""
    kind = chip.kinds[0] if chip and chip.kinds else ""
    return "tpu" if kind.startswith("TPU") else "cuda" if kind else "cpu"


def compute_dtype(held_as: str) -> str:
    """Return the compute dtype of weights that are held as `held_as`."""
    return "bf16" if held_as in QUANTIZED else held_as


@functools.lru_cache(maxsize=64)
def placement(chip: Chip | None, tensor: int) -> Placement | None:
    """Return the engine's placement on an abstract mesh; None for a single device."""
    if tensor == 1:
        return None
    kind = chip.kinds[0] if chip and chip.kinds else "cpu"
    device = AbstractDevice(kind, num_cores=1, platform=platform_of(chip))
    sizes = tuple(tensor if name == "tensor" else 1 for name in MESH_AXES)
    return Placement(cast(Any, AbstractMesh(sizes, MESH_AXES, abstract_device=device)), SERVE)


@functools.lru_cache(maxsize=256)
def local_weights(
    cfg: ModelConfig, chip: Chip | None, tensor: int, dtype: str, spread: bool = False, tower: bool = True
) -> tuple[tuple[ParamSpec, int], ...]:
    """Return every weight in the engine's layout with its bytes on one device; `tower`: those of a vision tower too."""
    place = placement(chip, tensor)
    whole = serving_spec(cfg, place, rounded_formats(spec(cfg), dtype))
    specs = {name: part for name, part in whole.items() if tower or name != VISION}
    return tuple((one, _bytes(one, place, dtype, spread)) for _, one in leaves(specs))


def _bytes(one: ParamSpec, place: Placement | None, dtype: str, spread: bool) -> int:
    """Return a weight's bytes on one device."""
    own = _numpy_dtype(compute_dtype(dtype))
    if place is None:
        return num_bytes(one, own)
    arrays, places = one.arrays(own), array_shardings(place, one, own)
    held = sum(math.prod(x) // _parts(places[name].spec, place) * kind.itemsize for name, (x, kind) in arrays.items())
    return held * local_size(one, place, spread) // local_size(one, place)


def local_size(one: ParamSpec, place: Placement | None, spread: bool = False) -> int:
    """Return the elements of a weight on one device."""
    parts = _parts(place.partition(one.axes, one.shape), place) if place else 1
    if spread and place and "kv_heads" in one.axes:
        parts = max(parts, math.gcd(one.shape[one.axes.index("kv_heads")], place.size("kv_heads")))
    return math.prod(one.shape) // parts


def local_rows(
    layers: tuple[Layer, ...], chip: Chip | None, tensor: int, kv: str, spread: bool = False
) -> list[int | None]:
    """Return the bytes of one token in each layer's pages on one device; None for a layer that reads another's."""
    place, platform = placement(chip, tensor), platform_of(chip)
    dtype = _numpy_dtype(compute_dtype(kv))
    shapes = cache_shapes(layers, 1, 1, dtype, place, platform, kv)

    def row_bytes(layer: Layer, shape: tuple[int, ...]) -> int:
        itemsize = HELD[kv] if kv == "int4" else layer.attn.page_dtype(dtype, kv).itemsize
        return int(math.prod(shape) // page_parts(layer, place, spread) * itemsize)

    return [None if shape is None else row_bytes(layer, shape) for layer, shape in zip(layers, shapes, strict=True)]


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


def step_estimate(cfg: ModelConfig, tensor: int, tokens: int, rows: int, itemsize: float) -> int:
    """Estimate the bytes that the largest step, or the largest call of a vision encoder, needs on a device.

    Args:
        cfg: The model.
        tensor: Devices per replica.
        tokens: The most tokens of a step.
        rows: The most sequences of a step.
        itemsize: Bytes of an activation's element.
    """
    return max(_step_bytes(cfg, tensor, tokens, rows, itemsize), _encoder_bytes(cfg, tensor, itemsize))


def _step_bytes(cfg: ModelConfig, tensor: int, tokens: int, rows: int, itemsize: float) -> int:
    """Estimate the largest step: residual stream and norm, a layer's widest products, the sampler's tables.

    The engine asks the compiler instead. On an H200 the estimate for an 8B model is 2.7 GiB, the compiler's 2.4 to 3.4.
    """
    widest = max(_widest(layer, tensor) for layer in cfg.layers)
    return int(tokens * itemsize * (3 * cfg.dim + widest)) + sampler_bytes(rows, cfg.vocab)


def feature_bytes(cfg: ModelConfig, step_tokens: int, itemsize: float) -> int:
    """Return the bytes of the buffer that the features of images are kept in; 0 if the model does not see images."""
    if cfg.vision is None:
        return 0
    rows = feature_rows(cfg.vision.tower, step_tokens, cfg.max_len)
    return int(rows * feature_width(cfg.dim, cfg.vision.deepstack) * itemsize)


def feature_rows(tower: Tower, step_tokens: int, max_len: int) -> int:
    """Return the rows of that buffer: one for each token of a step, and as many as the largest item needs."""
    return max(step_tokens, most_patches(tower, max_len) // tower.patches_per_feature)


def most_patches(tower: Tower, max_len: int) -> int:
    """Return the most patches of an item whose features fit a sequence of `max_len` tokens."""
    return max(tower.min_patches, min(tower.max_patches, max_len * tower.patches_per_feature))


def largest_item(tower: Tower) -> int:
    """Return the most image tokens of an item."""
    return tower.max_patches // tower.patches_per_feature


def feature_width(dim: int, deepstack: tuple[int, ...]) -> int:
    """Return the width of a feature: an embedding, and one more for each layer that adds further features."""
    return dim * (1 + len(deepstack))


def _encoder_bytes(cfg: ModelConfig, tensor: int, itemsize: float) -> int:
    """Estimate the largest call of a vision encoder: residual stream and norm, and the widest product of a block.

    For 16 images of 1,024 patches in four blocks of SigLIP-B, libtpu's compiler needs 239 MiB, and 264 are estimated.
    """
    if cfg.vision is None:
        return 0
    tower = cfg.vision.tower
    widths = [dict(zip(one.axes, one.shape, strict=True)) for _, one in leaves(tower.spec()) if "mlp" in one.axes]
    widest = max((3 * each.get("embed", 0) + 2 * each["mlp"] // tensor for each in widths), default=3 * cfg.dim)
    return int(max(MOST_PATCHES, most_patches(tower, cfg.max_len)) * itemsize * widest)


def _widest(layer: Layer, tensor: int) -> int:
    """Return the elements per token of gate, up and their product, or of a token's copies for its experts."""
    plain = 3 * layer.mlp.width // tensor if layer.mlp else 0
    if not layer.moe:
        return plain
    shared = layer.moe.shared.width if layer.moe.shared else 0
    return plain + 3 * (layer.moe.router.top_k * layer.moe.width + shared) // tensor


def sampler_bytes(rows: int, vocab: int) -> int:
    """Return the bytes of the sampler's tables."""
    return SAMPLER_TABLES * rows * vocab * 4


# --- beside a trainer -------------------------------------------------------------------------------------------------


def rollout_pool(cfg: ModelConfig, sequences: int, length: int, itemsize: int, hbm: int | None) -> int:
    """Return the bytes of KV pages beside a trainer: all sequences at full length, capped at a share of the device.

    Args:
        cfg: The model.
        sequences: The most sequences that the engine runs at a time.
        length: Tokens of the longest sequence.
        itemsize: Bytes per element of the pages.
        hbm: Bytes of one device; None if not known.
    """
    page = max(PAGE.values())
    wanted = sequences * (-(-(length + 1) // page) * page) * kv_bytes_per_token(cfg, itemsize)
    return min(wanted, int(hbm * BESIDE_POOL_SHARE)) if hbm else wanted


def beside_trainer(cfg: ModelConfig, itemsize: int, pool: int, hbm: int | None) -> dict[str, int]:
    """Return the bytes of an engine that shares a trainer's device, by part. `pool`: bytes of its KV pages."""
    return {
        "engine's weights": num_params(spec(cfg)) * itemsize,
        "engine's pages": pool,
        "engine's steps": min(BESIDE_STEP_BYTES, hbm // 8) if hbm else 0,  # a small device takes small steps
    }


# --- as devices and compiler report -----------------------------------------------------------------------------------


def pool_room(limit: float, utilization: float | None, weights: int, step: int, free: float = math.inf) -> int:
    """Return the bytes for KV pages on a GPU or TPU: a share of `limit` beside the weights, at most what is free.

    Args:
        limit: Bytes of the device that jax may use.
        utilization: The share of `limit` for weights, pages and steps; default: MEMORY_UTILIZATION.
        weights: Bytes of the weights.
        step: Bytes of the largest step.
        free: Bytes that are free now, with the weights loaded: a trainer or another engine may hold the rest.
    """
    share = int(limit * (utilization or MEMORY_UTILIZATION)) - weights
    return int(min(share, free)) - step - SLACK


def pool_bytes(utilization: float | None, weights: int, step: int, devices: Sequence[Any] = ()) -> int:
    """Return the bytes of each device that the KV pool may take, beside the loaded weights and the largest step.

    On a CPU the pool takes a share of the available memory, page cache included, within a container's limit; steps use
    the rest.

    Args:
        utilization: The share of a device that the engine may use; None: the default of the platform.
        weights: Bytes of the engine's weights on a device.
        step: Bytes of the largest step.
        devices: The engine's devices; default: jax's first.
    """
    stats = [device.memory_stats() for device in devices or jax.local_devices()[:1]]
    if not all(each and "bytes_limit" in each for each in stats):
        return int((available_memory() or 0) * (utilization or CPU_MEMORY_UTILIZATION))
    limit = min(each["bytes_limit"] for each in stats)
    free = min(each["bytes_limit"] - each.get("bytes_in_use", 0) for each in stats)
    return pool_room(limit, utilization, weights, step, free)


def num_pages(kv_bytes: int, page_bytes: int, page_size: int, most: int) -> int:
    """Return how many pages fit into `kv_bytes`, at most `most` (every sequence at its longest).

    Raises:
        OutOfMemoryError: Fewer than two pages fit.
    """
    pages = min(kv_bytes // page_bytes, most)
    if pages < 2:
        raise OutOfMemoryError(
            f"no room for the KV cache: {kv_bytes / 2**30:.2f} GiB are left for it and a page of {page_size} tokens "
            f"takes {page_bytes / 2**20:.2f} MiB. Raise gpu_memory_utilization or "
            "kv_cache_memory_bytes, lower max_num_batched_tokens, or free other memory of the device"
        )
    return int(pages)


def expected_pages(room: int, page_bytes: int, estimate: int, most: int) -> int:
    """Return the pages that should fit beside a step of about `estimate` bytes, which may need a quarter more.

    They take at least half of the room: a small device may have room for the step, but not for its estimate.
    """
    pages = min(max(room - estimate * 5 // 4, room // 2) // page_bytes, most)
    return most if pages == most else max(1, round_pages(pages))


def bytes_beside(
    pages: int,
    room: int,
    page_bytes: int,
    layer_bytes: int,
    most: int,
    step_bytes: Callable[[int], int],
    copies_pages: Callable[[int], bool],
) -> tuple[int, int]:
    """Return (bytes of the largest step, bytes that it grows by with every page).

    A step that copies pages, at least those of one layer, needs as much memory as they take; if it does and that
    matters, a second measurement gives the growth. It compiles the step again, which takes 20 seconds for a model of 48
    layers on a GPU.

    Args:
        pages: The pages to measure with.
        room: Bytes for the pool and the step together.
        page_bytes: Bytes of a page over all layers.
        layer_bytes: Bytes of a page of the largest layer.
        most: The most pages that the engine can use.
        step_bytes: Compiles the largest step for a number of pages and returns its bytes.
        copies_pages: Returns whether the step that was compiled for a number of pages copies those of a layer.
    """
    measured = step_bytes(pages)
    fits_anyway = most * page_bytes + 2 * measured <= room
    if pages == 1 or fits_anyway or measured < pages * layer_bytes or not copies_pages(pages):
        return measured, 0
    copied = max(0, measured - step_bytes(pages // 2)) // (pages - pages // 2)
    return measured - copied * pages, copied


def round_pages(pages: int) -> int:
    """Round down by at most 1.5%: steps are compiled for this number, and the free memory differs between starts."""
    step = 1 << max(0, pages.bit_length() - 7)
    return pages // step * step


def coarse_pages(pages: int) -> list[int]:
    """Return the page counts to choose from on a CPU, where the free memory differs much between starts.

    The first is `pages` rounded down to a power of two, or to one and a half times that. The others are next to it: an
    earlier start may have compiled for them.
    """
    steps = [size for power in range(pages.bit_length() + 1) for size in (2 << power, 3 << power)]
    own = max(i for i, size in enumerate(steps) if size <= max(2, pages))
    return [steps[own], steps[own + 1], *steps[max(0, own - 1) : own]]
