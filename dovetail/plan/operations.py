"""List the products of a model on one device with their shapes, FLOPs, and bytes read and written.

They are derived from the declared weights. Each product counts as if it ran alone: it reads both factors once and
writes its result once, except the attention scores, which all our kernels keep on the chip. Other operations (norms,
rotations, lookups) are left out, because they compute little. Weights that are split over fsdp or context are gathered
before they are multiplied; tensor and expert split the products themselves.

m rows, k the dim that is summed over, n columns.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from dovetail.core.errors import UserError
from dovetail.core.mesh import TRAIN
from dovetail.core.spec import ParamSpec, leaves
from dovetail.core.training import Training
from dovetail.models.config import Attention, Latent, ModelConfig
from dovetail.models.spec import text_spec
from dovetail.plan.plans import MeshPlan, axes_of
from dovetail.plan.train_memory import BYTES

Axes = Mapping[str, int]  # mesh axis -> devices along it
HEADS = ("head", "embed", "score")  # the weights that the last layer's output is multiplied with
_MULTIPLIED = ("tensor", "expert")  # the axes along which a product itself is split


@dataclass(frozen=True)
class Operation:
    """Hold `times` equal products of a step on one device, each with `copies` in parallel (heads, experts)."""

    name: str  # the weight's, such as `mlp.down`; or `attention scores` or `attention values`
    phase: str  # forward, recomputed, gradient of the input, gradient of the weight
    m: int
    k: int
    n: int
    copies: int
    flops: float  # of all copies: a multiply and an add for each of m x k x n
    read: float  # bytes
    written: float
    times: int

    @property
    def bytes(self) -> float:
        """Return the bytes read and written."""
        return self.read + self.written

    @property
    def part(self) -> str:
        """Return the part of the model that it belongs to."""
        if self.name in HEADS:
            return "head"
        if self.name.startswith("attention"):
            return "attention"
        first = self.name.partition(".")[0]
        return {"attn": "projections", "moe": "experts"}.get(first, "feed-forward")

    def seconds(self, peak: float, bandwidth: float) -> float:
        """Return the time of one at a device's rates (FLOP/s, bytes/s): the slower of the two bounds it."""
        return max(self.flops / peak, self.bytes / bandwidth)


def training_operations(cfg: ModelConfig, settings: Training, plan: MeshPlan) -> tuple[Operation, ...]:
    """Return the products of one step. Queries of a causal row see half of it on average, less with a window."""
    axes, itemsize = axes_of(plan.mesh), BYTES[settings.precision.compute]
    tokens = plan.rows * settings.length // plan.mesh.context
    forward = list(_weights(cfg, axes, tokens, tokens, plan.mesh.expert, itemsize, itemsize))
    for attn, layers in _attentions(cfg).items():
        most = attn.keys_seen(settings.length)
        seen = most - most**2 / (2 * settings.length)
        sizes = _Attended(plan.rows, settings.length // plan.mesh.context, round(seen), settings.length)
        forward += _attention(attn, axes, sizes, layers, itemsize, absorbed=False)
    gradients = _gradients(forward, trained=settings.step_models.adapter is None)
    step = [*forward, *_recomputed(forward, plan.remat), *gradients]
    return tuple(replace(one, times=one.times * plan.microsteps) for one in step)


def serving_operations(
    cfg: ModelConfig,
    axes: Axes,
    sequences: int,
    context: int,
    queries: int = 1,
    weight_bytes: float = 2,
    cache_bytes: float = 2,
) -> tuple[Operation, ...]:
    """Return the products of one step of an engine. Only a sequence's last token is unembedded.

    Args:
        cfg: The model.
        axes: The engine's mesh.
        sequences: Sequences of the step.
        context: Tokens of each sequence before the step.
        queries: Tokens of each sequence in the step: 1 for decoding, more for (a chunk of) a prompt.
        weight_bytes: Bytes per element of the weights.
        cache_bytes: Bytes per element of the KV pages.

    Raises:
        UserError: A count is out of range.
    """
    for name, value, least in (("sequences", sequences, 1), ("queries", queries, 1), ("context", context, 0)):
        if value < least:
            raise UserError(f"`{name}` must be at least {least}, got {value}", param=name)
    step = list(_weights(cfg, axes, sequences * queries, sequences, 1, 2, weight_bytes))
    for attn, layers in _attentions(cfg).items():
        seen = max(1, round(attn.keys_seen(context + queries / 2)))
        sizes = _Attended(sequences, queries, seen, max(1, round(attn.keys_seen(context + queries))))
        step += _attention(attn, axes, sizes, layers, cache_bytes, absorbed=queries == 1)
    return tuple(step)


# --- products with weights --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Weight:
    """Hold the part of a weight that one device multiplies."""

    name: str
    n: int  # output dim
    k: int  # input dim
    experts: int  # 0: not a weight of experts
    active: float  # the share of the tokens that an expert sees


def _weights(
    cfg: ModelConfig, axes: Axes, tokens: int, sampled: int, together: int, itemsize: float, weight: float
) -> Iterator[Operation]:
    """Yield the products with weights.

    `sampled` tokens are unembedded; `together` is the number of devices whose tokens an expert sees; `itemsize` and
    `weight` are the bytes per element of activations and weights.
    """
    splits = tuple((name, axes.get(name, 1)) for name in _MULTIPLIED)
    for one, layers in _local_weights(cfg, splits).items():
        rows, copies = float(sampled if one.name in HEADS else tokens), 1  # rows: of all copies together
        if one.experts:
            # few tokens reach only some of the experts, and only those are read
            copies = max(1, round(one.experts * (1 - (1 - one.active) ** (rows * together))))
            rows *= together * one.active * one.experts
        read, flops = rows * one.k * itemsize + copies * one.k * one.n * weight, 2 * rows * one.k * one.n
        m, written = max(1, round(rows / copies)), rows * one.n * itemsize
        yield Operation(one.name, "forward", m, one.k, one.n, copies, flops, read, written, layers)


@functools.lru_cache(maxsize=256)
def _local_weights(cfg: ModelConfig, splits: tuple[tuple[str, int], ...]) -> Counter[_Weight]:
    """Return the weights with the number of layers that have each."""
    tree, found = text_spec(cfg), Counter()
    for name in (name for name in tree if name != "layers"):
        found.update(_one(path, leaf, dict(splits)) for path, leaf in leaves({name: tree[name]}) if leaf.active)
    kinds = Counter(cfg.layers)
    for layer, i in {layer: i for i, layer in enumerate(cfg.layers)}.items():
        for path, leaf in leaves(tree["layers"][i]):
            if leaf.active:
                found[_one(path, leaf, dict(splits))] += kinds[layer]
    return found


def _one(path: str, leaf: ParamSpec, axes: Axes) -> _Weight:
    """Return a device's part of a weight.

    Weights are [out, in]. Attention's output projection has two input dims, and experts have a leading dim.
    """
    dims = [_local(dim, TRAIN.axes_of(name), axes) for dim, name in zip(leaf.shape, leaf.axes, strict=True)]
    experts = dims.pop(0) if leaf.axes[0] == "experts" else 0
    into = 2 if path == "attn.o" else 1
    return _Weight(path, math.prod(dims[:-into]), math.prod(dims[-into:]), experts, leaf.active)


def _local(dim: int, names: tuple[str, ...], axes: Axes) -> int:
    split = math.prod(axes.get(name, 1) for name in names if name in _MULTIPLIED)
    return dim // split if dim % split == 0 else dim


# --- attention --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Attended:
    sequences: int
    queries: int  # of each sequence
    seen: int  # keys that a query sees on average
    held: int  # keys that are read


def _attentions(cfg: ModelConfig) -> Counter[Attention | Latent]:
    return Counter(layer.attn for layer in cfg.layers)


def _attention(
    attn: Attention | Latent, axes: Axes, sizes: _Attended, layers: int, itemsize: float, absorbed: bool
) -> Iterator[Operation]:
    """Yield the two products of attention. Queries that share a key head are rows of one product.

    `absorbed`: queries attend to a latent as it is cached, instead of to the keys and values projected from it.
    """
    heads, kv_heads, key, value = _dims(attn, absorbed)
    heads = _local(heads, ("tensor",), axes)
    kv_heads = min(_local(kv_heads, ("tensor",), axes), heads)
    m, copies = sizes.queries * heads // kv_heads, sizes.sequences * kv_heads
    read = copies * (m + sizes.held) * key * itemsize
    flops = 2.0 * m * sizes.seen * copies  # for each dim
    yield Operation("attention scores", "forward", m, key, sizes.seen, copies, key * flops, read, 0.0, layers)
    in_keys = absorbed and isinstance(attn, Latent)  # a latent holds keys and values
    read, written = 0.0 if in_keys else copies * sizes.held * value * itemsize, copies * m * value * itemsize
    yield Operation("attention values", "forward", m, sizes.seen, value, copies, value * flops, read, written, layers)


def _dims(attn: Attention | Latent, absorbed: bool) -> tuple[int, int, int, int]:
    """Return (heads, key heads, dims of a key, dims of a value)."""
    if isinstance(attn, Attention):
        return attn.heads, attn.kv_heads, attn.head_dim, attn.head_dim
    if absorbed:
        return attn.heads, 1, attn.kv_rank + attn.rope_dim, attn.kv_rank
    return attn.heads, attn.heads, attn.nope_dim + attn.rope_dim, attn.v_dim


# --- the backward pass ------------------------------------------------------------------------------------------------


def _recomputed(forward: list[Operation], remat: str) -> Iterator[Operation]:
    """Yield the products that the backward pass recomputes."""
    for one in forward if remat in ("attention", "full") else ():
        if one.part != "head" and (remat == "full" or one.part != "attention"):
            yield replace(one, phase="recomputed")


def _gradients(forward: list[Operation], trained: bool) -> Iterator[Operation]:
    """Yield the two products of each product's backward pass, one per factor; weights only if `trained`."""
    for one in forward:
        if one.part == "attention":  # both factors are activations
            yield replace(one, phase="gradient of the input", times=2 * one.times)
            continue
        given = one.written * one.k / one.n  # bytes of the input
        held = one.read - given  # bytes of the weight
        turned = replace(one, phase="gradient of the input", k=one.n, n=one.k)
        yield replace(turned, read=held + one.written, written=given)
        if trained:
            of_weight = replace(one, phase="gradient of the weight", m=one.n, k=one.m, n=one.k)
            yield replace(of_weight, read=given + one.written, written=held)
