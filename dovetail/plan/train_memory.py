"""Count the memory of a training step on one device from the declared weights, before anything is allocated.

Weights, optimizer moments and gradients follow the sharding rules leaf by leaf. Activations are each layer's saved
values by remat policy, plus one layer's working set. The peak is at one of four points of a step:

- the end of the forward pass, where a loop over groups of layers holds the last group's saved values twice;
- the loss, with all saved values and a chunk of logits;
- the first layer of the backward pass, with its working set in place of the logits;
- the update, with all gradients and no saved values, or before it the backward pass of a vision tower, which is last.

The backward pass frees activations while it creates gradients, so both are never complete at the same time, except
that a loop over layers holds its gradients as stacked arrays from its first iteration to its last.

On an H200 the count is within 5% of the measured memory in eleven runs: dense models, mixtures of experts, adapters,
with and without remat and microsteps (tests/plan/test_memory.py). plan.serve_memory counts an engine's.

D model dim, V vocabulary, F width of the feed-forward, E devices along the expert axis.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from jax.sharding import AbstractMesh

from dovetail.core.chips import LOGITS_BYTES, logit_chunks
from dovetail.core.compute import compute_of
from dovetail.core.mesh import MESH_AXES, TRAIN, Placement
from dovetail.core.spec import leaves
from dovetail.core.training import Training
from dovetail.models.config import Attention, Layer, ModelConfig
from dovetail.models.frozen import frozen_bytes
from dovetail.models.lora import Lora, lora_spec
from dovetail.models.mtp import mtp_depth, mtp_layer, with_mtp
from dovetail.models.repeats import repeats
from dovetail.models.spec import VISION, spec

PLANNED = 0.92  # the share of a device's memory that a plan may fill; fragmentation and the runtime take the rest
# The same share of a host's memory: while a checkpoint is written, the host holds the state twice more. Measured with
# 135M weights: 9.3 GiB where 4.9 GiB were estimated, 6.3 GiB before the first save.
PLANNED_HOST = 0.5
BYTES = {name: compute_of(name).dtype.itemsize for name in ("bf16", "f32", "tf32")}
# A loop over layers without remat saves this many times as much: all residuals of autodiff, many of them in f32.
# Outside of loops XLA recomputes the cheap ones. Counted: 2.0 for Llama's layers, 2.2 for Qwen3's with QK norms.
LOOPED = 2.1
# The same of an encoder's blocks (ViT), whose layer norms alone keep more: (14 D + 2 F) / (8 D + 2 F) with F = 4 D.
# XLA's CPU compiler holds bf16 as f32, so that the norms' values take no more than others: (10 D + 2 F).
LOOPED_ENCODER, LOOPED_ENCODER_HOST = 1.4, 1.13
LANES = 128  # a TPU pads heads to whole lanes
DOCUMENTS = 16  # cuDNN keeps softmax sums for this many documents per row (15 and the padding: train.prepare)
# A GPU's loop over microsteps: the share by which the heap that XLA lays out exceeds the values in it. Compiled for an
# H200 by jax 0.10.2 and 0.11.2: 0 and 7% for Qwen3-0.6B, 3 and 5% for LoRA of Llama-3.1-8B; without a loop, 0 to 2%.
HOLES = 0.04
_SPLITS = ("fsdp", "expert", "context", "tensor")  # the axes that split weights
Axes = Mapping[str, int]  # mesh axis -> devices along it
Shape = tuple[tuple[int, ...], tuple[str | None, ...]]  # a weight's shape and logical axes


@dataclass(frozen=True)
class TrainMemory:
    """Hold the bytes on one device at the peak of a training step."""

    weights: int  # master weights, the copy in the compute dtype, the average (ema) if there is one
    frozen: int  # weights that are read but not trained
    optimizer: int
    gradients: int
    gathered: int  # the gathered weights of two layers and of the head, and the head's gradient
    activations: int
    logits: int  # a chunk of logits and of their gradient

    @property
    def total(self) -> int:
        """Return the sum of all parts."""
        # not by fields(): a search reads it many thousand times
        return (
            self.weights + self.frozen + self.optimizer + self.gradients
            + self.gathered + self.activations + self.logits
        )  # fmt: skip


def memory(
    cfg: ModelConfig,
    settings: Training,
    axes: Axes,
    remat: str,
    rows: int,
    on_host: bool = False,
    on_tpu: bool = False,
    documents: int = 0,
) -> TrainMemory:
    """Return the memory of a step with `rows` rows per device and microstep.

    Args:
        cfg: The model.
        settings: The recipe.
        axes: Devices along each mesh axis.
        remat: The remat policy.
        rows: Rows of the batch on each device in one microstep.
        on_host: Count as XLA's CPU compiler allocates: bf16 is held as f32, and outside of loops every residual of
            autodiff is saved, whatever the remat policy.
        on_tpu: Count as on a TPU: attention outputs are padded to whole lanes, and softmax sums are saved once.
        documents: The documents per row, padding included, that attention keeps softmax sums for; 0: DOCUMENTS.
    """
    mtp, tensor = mtp_layers(cfg, settings), axes.get("tensor", 1)
    itemsize = 4 if on_host else BYTES[settings.precision.compute]
    splits = tuple((name, axes.get(name, 1)) for name in _SPLITS)
    models = settings.step_models
    elements, moments, gathered = _elements(cfg, mtp, settings.optimizer.name, splits, models.adapter)
    frozen = sum(_frozen(model or cfg, held, settings.precision.compute, splits) for model, held in models.frozen)
    state = functools.partial(
        TrainMemory, elements * bytes_per_weight(settings, on_host), frozen, 4 * moments, gathered=gathered * itemsize
    )
    shards = math.prod(axes.get(name, 1) for name in ("data", "fsdp", "expert"))
    in_parts = rows * shards < settings.batch
    sums = 4 * elements if in_parts else 0  # gradient accumulator over microsteps
    held = 1 + HOLES * (in_parts and not on_host and not on_tpu)
    stacked = elements * itemsize if settings.scan else 0  # gradients of a loop over layers
    copied = stacked if cfg.images else 0  # an encoder's weights are stacked in the step
    tokens = rows * settings.length // axes.get("context", 1)
    kept_all = on_host and not settings.scan
    remat = "none" if kept_all else remat
    saved, working = activations_of(cfg, mtp, tensor, axes.get("expert", 1), remat, on_tpu, documents)
    looped = _looped(cfg, on_host, kept_all) if remat == "none" and (settings.scan or kept_all) else 1
    saved = int(tokens * itemsize * saved * looped * held) + copied
    working *= tokens * itemsize
    items, patches = models.images
    tower = tower_saved(cfg, models.adapter, tensor, patches * kept_all) * rows * items * patches * itemsize
    saved += tower if remat == "none" else 0
    group = int(saved * _group(cfg)) if settings.scan else 0
    in_forward = state(gradients=sums, activations=saved + group, logits=0)
    in_loss = state(gradients=sums, activations=saved, logits=_logits(cfg, settings, tensor, tokens))
    in_backward = state(gradients=sums + stacked, activations=saved + working, logits=0)
    in_update = state(
        gradients=sums + elements * BYTES[settings.precision.params], activations=max(working, tower), logits=0
    )
    return max(in_forward, in_loss, in_backward, in_update, key=lambda moment: moment.total)


def _looped(cfg: ModelConfig, on_host: bool, kept_all: bool) -> float:
    if not cfg.images:
        return LOOPED
    encoder = cfg.images.tower.encoder
    if kept_all:
        D, F, scores = encoder.dim, encoder.width, encoder.heads * cfg.max_len
        return host_block(D, F, scores) / (8 * D + 2 * F)
    return LOOPED_ENCODER_HOST if on_host else LOOPED_ENCODER


def host_block(D: int, F: int, scores: int) -> int:
    """Return the elements per patch of an encoder block that XLA's CPU compiler keeps outside of loops.

    It merges recomputed values with the first ones: those of the activation function and of attention are kept too.
    """
    return 10 * D + 4 * F + 3 * scores


@functools.lru_cache(maxsize=64)
def _group(cfg: ModelConfig) -> float:
    """Return the share of all layers that one loop body holds: their saved values are stacked when the body ends."""
    periods = [one.period for one in repeats(cfg) if one.times > 1]
    return max([period for period in periods if period > 1], default=0) / len(cfg.layers)


def _logits(cfg: ModelConfig, settings: Training, tensor: int, tokens: int) -> int:
    """Return the bytes of a chunk of logits and of its gradient in the compute dtype; 0 without logits of tokens."""
    if cfg.scored or cfg.images:
        return 0
    vocab = cfg.vocab // (tensor if cfg.vocab % tensor == 0 else 1)
    itemsize = BYTES[settings.precision.logits or settings.precision.compute]
    _, chunk = logit_chunks(tokens, max(1, LOGITS_BYTES // (itemsize * vocab)))
    return chunk * vocab * (itemsize + BYTES[settings.precision.compute])


# --- the state --------------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=4096)
def _elements(
    cfg: ModelConfig, mtp: int, optimizer: str, axes: tuple[tuple[str, int], ...], adapter: Any
) -> tuple[int, int, int]:
    """Return the elements on one device: (trained weights, optimizer moments, gathered weights)."""
    placement = placement_of(dict(axes))
    elements = moments = 0
    for shape, count in shapes_of(cfg, mtp, adapter).items():
        local = local_size(shape, placement)
        elements += local * count
        moments += moments_of(optimizer, shape, local) * count
    trains_head = any("vocab" in shape[1] for shape in shapes_of(cfg, mtp, adapter))
    return elements, moments, _gathered(cfg, dict(axes), trains_head)


def _frozen(cfg: ModelConfig, held: str, compute: str, axes: tuple[tuple[str, int], ...]) -> int:
    return frozen_bytes(cfg, held, compute_of(held if held in BYTES else compute).dtype, placement_of(dict(axes)))


def bytes_per_weight(settings: Training, on_host: bool = False) -> int:
    """Return the bytes per trained weight: master, compute copy if its dtype differs, average and reference if kept."""
    master, compute = BYTES[settings.precision.params], BYTES[settings.precision.compute]
    copy = 4 if on_host else compute
    reference = 4 + (copy if compute != 4 else 0) if settings.step_models.reference else 0
    return master + (copy if compute != master else 0) + (master if settings.ema else 0) + reference


def moments_of(optimizer: str, shape: Shape, local: int) -> int:
    """Return the f32 numbers that the optimizer keeps for a weight with `local` elements on the device."""
    dims = sorted(shape[0])[-2:]
    is_matrix = len(shape[0]) >= 2
    if optimizer == "muon":  # one momentum per layer matrix, Adam's two moments for the rest
        return local if is_matrix and "vocab" not in shape[1] else 2 * local
    if optimizer == "adafactor" and is_matrix and dims[0] >= 128:  # a mean over each of the two largest dims
        return math.ceil(local / dims[0]) + math.ceil(local / dims[1])
    return local if optimizer == "adafactor" else 2 * local


def _gathered(cfg: ModelConfig, axes: Axes, trains_head: bool) -> int:
    """Return the elements of gathered weights, in the compute dtype (an f32 element counts as two).

    A layer's weights are gathered over fsdp and context while they are used, the next layer's are gathered at the same
    time, and a layer's gradient is complete before it is scattered. The head is gathered too. Its gradient, in f32, is
    summed over the chunks of the loss.
    """
    whole = placement_of({**axes, "fsdp": 1, "context": 1})
    embedding = local_size(((cfg.vocab, cfg.dim), ("vocab", "embed")), whole)
    split = axes.get("fsdp", 1) * axes.get("context", 1) > 1
    largest = max(sum(local_size(shape, whole) for shape in kind) for kind in _layer_kinds(cfg))
    return (3 * largest + embedding) * split + 2 * embedding * trains_head


def placement_of(axes: Axes) -> Placement:
    """Return a training placement on an abstract mesh."""
    mesh = AbstractMesh(tuple(axes.get(name, 1) for name in MESH_AXES), MESH_AXES)
    return Placement(cast(Any, mesh), TRAIN)


def local_size(shape: Shape, placement: Placement) -> int:
    """Return the elements of a weight on one device."""
    parts = placement.partition(shape[1], shape[0])
    names = [name for part in parts if part for name in ((part,) if isinstance(part, str) else part)]
    return math.prod(shape[0]) // math.prod(placement.mesh.shape[name] for name in names)


@functools.lru_cache(maxsize=64)
def shapes_of(cfg: ModelConfig, mtp: int, adapter: Any) -> Counter[Shape]:
    """Return how many trained weights have each shape."""
    specs = with_mtp(spec(cfg), cfg) if mtp else spec(cfg)
    if adapter is not None:
        specs = lora_spec(cfg, adapter) if isinstance(adapter, Lora) else adapter.trained_spec()
    return Counter((leaf.shape, leaf.axes) for _, leaf in leaves(specs))


@functools.lru_cache(maxsize=64)
def _layer_kinds(cfg: ModelConfig) -> list[list[Shape]]:
    """Return the weights of one layer of each kind."""
    specs = spec(cfg)
    if cfg.images:
        kinds = [specs[tower]["layers"][0] for tower in ("vision", "text") if tower in specs]
    else:
        kinds = [specs["layers"][i] for i in {layer: i for i, layer in enumerate(cfg.layers)}.values()]
    return [[(leaf.shape, leaf.axes) for _, leaf in leaves(kind)] for kind in kinds]


def mtp_layers(cfg: ModelConfig, settings: Training) -> int:
    """Return the number of trained multi-token prediction layers."""
    return mtp_depth(cfg) if settings.step_models.mtp else 0


# --- activations ------------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=1024)
def activations_of(
    cfg: ModelConfig, mtp: int, tensor: int, expert: int, remat: str, on_tpu: bool = False, documents: int = 0
) -> tuple[int, int]:
    """Return the elements per token (saved from forward to backward over all layers, one layer's working set)."""
    layers = Counter(cfg.layers + (mtp_layer(cfg),) * mtp)
    how = (tensor, expert, remat, on_tpu, documents)
    saved = sum(_saved(cfg.dim, layer, *how) * n for layer, n in layers.items())
    return 2 * cfg.dim + saved, max(_working(cfg.dim, layer, *how) for layer in layers)


def _saved(D: int, layer: Layer, tensor: int, expert: int, remat: str, on_tpu: bool = False, documents: int = 0) -> int:
    """Return the elements per token that one layer saves under a remat policy."""
    turned, products, out = layer.attn.activations(tensor)
    kept = _padded(out, layer.attn.heads // tensor or 1, LANES if on_tpu else 1)
    hidden, ends = _feed_forward_elements(D, layer, tensor, expert)
    gated = layer.mlp is None or layer.mlp.gated
    sums = 2 * (1 if on_tpu or not gated else documents or DOCUMENTS) * layer.attn.heads // tensor  # of softmax, f32
    if remat == "full":
        return D
    if remat == "attention":
        return D + kept + sums
    if remat == "dots":  # the outputs of products; with a post-norm also that of the last one, or of its experts' sum
        # autodiff keeps no rows of the experts' last product, but libtpu's steps hold as much (docs/tpu.md)
        return (2 + layer.post_norm) * D + products + kept + sums + (1 + gated) * hidden + ends * on_tpu
    # The inputs of products and kernels. The gradient of a rotation needs nothing, that of a QK norm its input.
    norms = 2 * (layer.pre_norm + layer.post_norm)
    plain = isinstance(layer.attn, Attention) and not layer.attn.qk_norm
    return (2 + norms) * D + products + (0 if plain else turned) + out + sums + (2 + gated) * hidden + ends


@functools.lru_cache(maxsize=64)
def tower_saved(cfg: ModelConfig, adapter: Any, tensor: int, kept: int = 0) -> int:
    """Return the elements per patch that the blocks of a vision tower save; 0 if nothing of the tower is trained.

    `kept`: the patches of an item, to count what XLA's CPU compiler keeps; 0 on other devices.
    """
    trained = adapter is None or (isinstance(adapter, Lora) and VISION in lora_spec(cfg, adapter))
    if cfg.vision is None or not trained:
        return 0
    shapes = [(leaf.axes, leaf.shape) for _, leaf in leaves(cfg.vision.tower.spec())]
    ups = [shape[0] // tensor for axes, shape in shapes if axes == ("mlp", "embed")]
    downs = [shape for axes, shape in shapes if axes == ("embed", "mlp")]
    if kept:
        heads = sum(shape[1] for axes, shape in shapes if axes == ("embed", "heads", None))
        return sum(host_block(D, F, 0) for D, F in downs) + 3 * heads * kept
    return sum(8 * D + F // tensor for D, F in downs) + sum(ups)


def _padded(out: int, heads: int, lanes: int) -> int:
    """Return the elements of attention's output with each head padded to whole lanes."""
    return heads * math.ceil(out / heads / lanes) * lanes


def _working(D: int, layer: Layer, tensor: int, expert: int, remat: str, on_tpu: bool, documents: int) -> int:
    """Return the elements per token of one layer's backward pass: its largest gradients and its recomputed values."""
    hidden, ends = _feed_forward_elements(D, layer, tensor, expert)
    saved = functools.partial(_saved, D, layer, tensor, expert, on_tpu=on_tpu, documents=documents)
    again = max(0, saved(remat="none") - saved(remat=remat))
    return again + 3 * D + 3 * hidden + ends


def _feed_forward_elements(D: int, layer: Layer, tensor: int, expert: int) -> tuple[int, int]:
    """Return (F of one product, the elements of a token's copies for its experts).

    Experts on E devices see the tokens of all E devices.
    """
    hidden, ends = (layer.mlp.width if layer.mlp else 0), 0
    if layer.moe:
        copies = layer.moe.router.top_k * expert
        hidden += copies * layer.moe.width + (layer.moe.shared.width if layer.moe.shared else 0)
        ends = copies * D
    return hidden // tensor, ends
