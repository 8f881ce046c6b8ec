"""Dropless mixture of experts: every token reaches each expert it was routed to.

`experts_reference` runs every expert on every token and keeps what was routed: exact and readable. `experts` sorts the
(token, expert) pairs by expert and multiplies each group by its own weights; few tokens on Hopper have a kernel of
their own. With experts split over a mesh axis each device runs its own experts on the tokens of its row of devices, and
the partial sums are added.

T tokens, D model dim, E experts, F their width, k experts per token, M = T k.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from dovetail.core.mesh import Placement
from dovetail.ops.dispatch_products import (
    deal_kernel,
    experts_kernel,
    router_kernel,
    sort_kernel,
)
from dovetail.ops.glu import Glu
from dovetail.ops.linear import grouped_each, matmul, per_head
from dovetail.ops.quant.weight import is_quantized
from dovetail.ops.router import scores_at, top_k

ExpertWeights = dict  # gate, up [E, F, D], down [E, D, F], optional biases gate_bias, up_bias [E, F], down_bias [E, D]


@dataclass(frozen=True)
class Router:
    """Describe how scores become choices.

    `score` is softmax or sigmoid over all experts, or softmax over the chosen ones alone ('chosen', GPT-OSS).
    Group-limited routing first keeps `top_groups` of `groups`, each judged by its best expert ('max', DeepSeek-V2) or
    its best two ('top2', V3).
    """

    experts: int
    top_k: int
    score: str = "softmax"
    normalize: bool = False
    scale: float = 1.0
    groups: int = 1
    top_groups: int = 1
    group_score: str = "max"


def route(router: Router, logits: jax.Array, bias: jax.Array | None = None) -> tuple[jax.Array, jax.Array]:
    """Map logits [..., E] f32 to weights [..., k] f32 and experts [..., k].

    `bias` [E] affects the choice, not the weight.
    """
    alone = bias is None and router.groups == 1
    if router.score == "chosen" or (router.score == "softmax" and router.normalize and alone):
        choice = scores = logits  # whose order is the same; a softmax over the chosen ones is normalised
    else:
        scores = jax.nn.softmax(logits) if router.score == "softmax" else jax.nn.sigmoid(logits)
        choice = scores if alone else lax.stop_gradient(scores)
    if bias is not None:
        choice = choice + bias.astype(jnp.float32)
    if router.groups > 1:
        choice = jnp.where(_in_best_groups(router, choice), choice, -jnp.inf)
    weights, chosen = top_k(choice, router.top_k)
    if not alone:
        weights = scores_at(scores, chosen)
    if scores is logits:
        weights = jax.nn.softmax(weights, axis=-1)
    elif router.normalize:
        weights = weights / (weights.sum(axis=-1, keepdims=True) + 1e-20)
    return weights * router.scale, chosen


def route_step(
    router: Router,
    logits: jax.Array,
    bias: jax.Array | None = None,
    placement: Placement | None = None,
    platform: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Return what `route` does in a step of the engine, which needs no gradient: by a kernel where there is one."""
    kernel = router_kernel(router, logits, bias, platform, placement)
    return kernel(router, logits) if kernel else route(router, logits, bias)


def _in_best_groups(router: Router, choice: jax.Array) -> jax.Array:
    grouped = choice.reshape(-1, router.groups, router.experts // router.groups)
    best, _ = top_k(grouped, 2 if router.group_score == "top2" else 1)
    _, chosen = top_k(best.sum(axis=-1), router.top_groups)
    allowed = jnp.zeros(grouped.shape[:2], bool).at[jnp.arange(len(chosen))[:, None], chosen].set(True)
    return jnp.repeat(allowed, grouped.shape[-1], axis=-1).reshape(choice.shape)


class RouterStats(NamedTuple):
    """Count how the tokens of each row were distributed.

    Counts are per row, so that a batch in parts, or on several devices, has the same balance.
    """

    load: jax.Array  # [B, E] f32: (token, expert) pairs that went to each expert
    prob: jax.Array  # [B, E] f32: each expert's share of the scores, summed over tokens
    tokens: jax.Array  # [B] f32: tokens that are not padding

    def imbalance(self) -> jax.Array:
        """Return the imbalance summed over tokens.

        1 for each if all experts are used equally, E / k if k of them get all.

        A row's is E sum_e f_e P_e, with f the share of its pairs and P of its scores (Switch Transformer, eq. 4; per
        row as in DeepSeek-V3). The scores carry the gradient.
        """
        pairs = jnp.maximum(self.load.sum(axis=-1, keepdims=True), 1)
        share = self.prob / jnp.maximum(self.tokens, 1)[:, None]
        of_row = self.load.shape[-1] * jnp.sum(lax.stop_gradient(self.load / pairs) * share, axis=-1)
        return jnp.sum(of_row * self.tokens)


def router_stats(router: Router, logits: jax.Array, chosen: jax.Array, real: jax.Array) -> RouterStats:
    """Return the statistics of logits [B, T, E] and chosen [B, T, k] (or flat [B T, ..]) over `real` tokens [B, T]."""
    weight = real.astype(jnp.float32)[..., None]
    scores = jax.nn.sigmoid(logits) if router.score == "sigmoid" else jax.nn.softmax(logits)
    share = (scores / scores.sum(axis=-1, keepdims=True)).reshape(*real.shape, -1)
    pairs = jax.nn.one_hot(chosen, router.experts, dtype=jnp.float32).sum(axis=-2).reshape(*real.shape, -1)
    return RouterStats((pairs * weight).sum(axis=1), (share * weight).sum(axis=1), weight.sum(axis=(1, 2)))


def experts_reference(x: jax.Array, weights: jax.Array, chosen: jax.Array, params: ExpertWeights, glu: Glu):
    """Map x [T, D] to [T, D]."""
    gate, up = (matmul(x, params[name], params.get(f"{name}_bias")) for name in ("gate", "up"))
    out = per_head(glu(gate, up), params["down"]) + params.get("down_bias", 0)
    share = jnp.zeros(out.shape[:2], jnp.float32).at[jnp.arange(len(x))[:, None], chosen].add(weights)
    return jnp.einsum("ted,te->td", out, share.astype(out.dtype))


def experts(
    x: jax.Array,
    weights: jax.Array,
    chosen: jax.Array,
    params: ExpertWeights,
    glu: Glu,
    placement: Placement | None = None,
    platform: str | None = None,
) -> jax.Array:
    """Map x [T, D] or [B, T, D], with weights and chosen [T, k] or [B T, k], to the shape of x.

    On a mesh each device takes its own part of the rows and of their length.

    Args:
        x: Activations.
        weights: The weights of the chosen experts.
        chosen: The chosen experts.
        params: The experts' weights.
        glu: The activation.
        placement: The mesh and its rules.
        platform: It chooses the grouped matmul; None for jax's default.
    """
    chosen, weights = (a.reshape(*x.shape[:-1], -1) for a in (chosen, weights))
    kernel = experts_kernel(x, params, glu, platform, placement)
    if kernel:
        return kernel(x, weights, chosen, params, glu)
    if placement is None or placement.mesh.size == 1:
        out = _flat(x, weights, chosen, params, glu, platform)
    else:
        out = _sharded(x, weights, chosen, params, glu, platform, placement)
    return checkpoint_name(out, "product")


def _flat(x, weights, chosen, params: ExpertWeights, glu: Glu, platform: str | None, **options) -> jax.Array:
    rows, weights, chosen = (a.reshape(-1, a.shape[-1]) for a in (x, weights, chosen))
    return _grouped(rows, weights, chosen, params, glu, platform, **options).reshape(x.shape)


def _grouped(
    x, weights, chosen, params: ExpertWeights, glu: Glu, platform: str | None, first_expert=None, bias_share=1.0
) -> jax.Array:
    """Run the sorted path over the experts in `params`: all, or those from `first_expert` on."""
    k, num_experts = chosen.shape[1], params["gate"].shape[0]
    group = chosen.reshape(-1)
    if first_expert is not None:  # pairs of other devices' experts sort last, into no group
        local = group - first_expert
        group = jnp.where((local >= 0) & (local < num_experts), local, num_experts)
    sort = sort_kernel(group, num_experts, platform) if first_expert is None else None
    back, order, sizes = (sort or sort_by_group)(group, num_experts)
    sorted_group = jnp.minimum(group[order], num_experts - 1)
    share: Any = _deal(weights.reshape(-1, 1), order, back, 1, platform)  # f32

    def apply(inputs: jax.Array, names: tuple[str, ...], share: float | jax.Array = 1.0) -> list[jax.Array]:
        products = grouped_each(inputs, tuple(params[name] for name in names), sizes, platform)
        return [finish(y, params.get(f"{name}_bias"), share) for y, name in zip(products, names, strict=True)]

    def finish(y: jax.Array, bias: jax.Array | None, share: float | jax.Array) -> jax.Array:
        return y if bias is None else y + (bias[sorted_group] * share).astype(y.dtype)

    rows: Any = _deal(x, order, back, k, platform)
    # the products to keep under remat=dots; of those of `down` a gradient needs the sums at most: `experts` names them
    hidden = glu(*(checkpoint_name(y, "product") for y in apply(rows, ("gate", "up"))))
    # weighted here, where rows are narrow, so that what remains to be done with the wide ones is their sum
    hidden = (hidden.astype(jnp.float32) * share).astype(hidden.dtype)
    [out] = apply(hidden, ("down",), bias_share * share)
    if first_expert is not None:  # rows in no group are undefined by ragged_dot: they are dropped, not multiplied by 0
        out = jnp.where((group[order] < num_experts)[:, None], out, 0)
    return _collect(out, order, back, k, platform)


def sort_by_group(group: jax.Array, num_groups: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the place of each element, if sorted by group, the element at each place, and the sizes of the groups."""
    # as arrays: XLA would compute a position for each element of the rows that are gathered by it
    back, sizes = lax.optimization_barrier(_positions(group, num_groups))
    return back, jnp.zeros_like(back).at[back].set(jnp.arange(len(back)), unique_indices=True), sizes


def _positions(group: jax.Array, num_groups: int) -> tuple[jax.Array, jax.Array]:
    """Return the place of each element if they are sorted by group, stably, and the sizes of the groups.

    Elements of `num_groups` come last, in no group. They are counted, by blocks, instead of sorted.
    """
    block = min(256, len(group))
    blocks = jnp.pad(group, (0, -len(group) % block), constant_values=num_groups).reshape(-1, block)
    alike = (blocks[:, :, None] == blocks[:, None, :]) & jnp.tri(block, k=-1, dtype=bool)
    rank = alike.sum(axis=-1, dtype=jnp.int32)  # of an element among those of its group in its block
    counts = (blocks[..., None] == jnp.arange(num_groups + 1)).sum(axis=1, dtype=jnp.int32)  # [blocks, groups]
    sizes = counts.sum(axis=0)
    firsts = jnp.cumsum(sizes) - sizes + _before(counts)
    place = rank + jnp.take_along_axis(firsts, blocks, axis=1)
    return place.reshape(-1)[: len(group)], sizes[:num_groups]


def _before(counts: jax.Array) -> jax.Array:
    """Return the sums of the earlier rows of counts, which are at most 256: exact in bf16, and summed in f32."""
    if len(counts) == 1:
        return jnp.zeros_like(counts)
    earlier = jnp.tri(len(counts), k=-1, dtype=jnp.bfloat16)
    sums = jnp.einsum("ij,je->ie", earlier, counts.astype(jnp.bfloat16), preferred_element_type=jnp.float32)
    return sums.astype(jnp.int32)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _deal(x: jax.Array, order: jax.Array, back: jax.Array, k: int, platform: str | None) -> jax.Array:
    """Return each row of x k times, in `order`, of which `back` is the inverse.

    The backward pass gathers too, by `back`, and sums in f32: the one that jax derives is a scatter that adds row by
    row and rounds each time.
    """
    kernel = deal_kernel(x, k, platform)
    return kernel(x, back, k) if kernel else x[order // k]


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _collect(x: jax.Array, order: jax.Array, back: jax.Array, k: int, platform: str | None) -> jax.Array:
    """Return the sums of the k rows that `_deal` made of each row."""
    return x[back].reshape(-1, k, x.shape[-1]).sum(axis=1)


def _deal_forward(x, order, back, k, platform):
    return _deal(x, order, back, k, platform), (order, back)


def _deal_backward(k, platform, saved, g):
    # a gradient of the router's weights is a sum over columns: a kernel of its own, not a loop inside of the gather's
    g = lax.optimization_barrier(g) if g.shape[-1] == 1 else g
    return _collect(g, *saved, k, platform), None, None


def _collect_forward(x, order, back, k, platform):
    return _collect(x, order, back, k, platform), (order, back)


def _collect_backward(k, platform, saved, g):
    return _deal(g, *saved, k, platform), None, None


_deal.defvjp(_deal_forward, _deal_backward)
_collect.defvjp(_collect_forward, _collect_backward)


def _splits_width(down: Any, placement: Placement) -> bool:
    """Return whether the width can be split: of a quantised weight only between its groups or blocks."""
    unit = down.format.unit if is_quantized(down) else 1
    return down.shape[-1] // unit % placement.size("mlp") == 0


def _without_width(axes: tuple[str | None, ...]) -> tuple[str | None, ...]:
    return tuple(None if axis == "mlp" else axis for axis in axes)


def _partition(placement: Placement, axes: tuple[str | None, ...], w: Any) -> Any:
    """Return the partition of a weight; of a quantised one, that of each of its arrays."""
    if not is_quantized(w):
        return placement.partition(axes, w.shape)
    return jax.tree.map(lambda x: placement.partition(axes, x.shape), w)


def _sharded(
    x, weights, chosen, params: ExpertWeights, glu: Glu, platform: str | None, placement: Placement
) -> jax.Array:
    """Run with tokens split over the batch and context axes, experts over expert, their width over tensor."""
    mesh = placement.mesh
    tokens = placement.partition((*("batch", "length")[: x.ndim - 1], None), x.shape)
    split_tokens = tokens[0] is not None and "expert" in tokens[0]
    axes = {"gate": ("experts", "mlp", None), "up": ("experts", "mlp", None), "down": ("experts", None, "mlp")}
    axes |= {"gate_bias": ("experts", "mlp"), "up_bias": ("experts", "mlp"), "down_bias": ("experts", None)}
    axes = axes if _splits_width(params["down"], placement) else {n: _without_width(a) for n, a in axes.items()}
    specs = {name: _partition(placement, axes[name], w) for name, w in params.items()}
    gate = placement.partition(axes["gate"], params["gate"].shape)
    is_split = gate[0] is not None

    def local(x, weights, chosen, params):
        if split_tokens and is_split:  # this device's experts serve the tokens of its whole row of the expert axis
            x, weights, chosen = (lax.all_gather(a, "expert", tiled=True) for a in (x, weights, chosen))
        first = lax.axis_index("expert") * params["gate"].shape[0] if is_split else None
        width_parts = mesh.shape["tensor"] if gate[1] is not None else 1
        # the down projection's bias would be added once per part of the width
        shares = dict(first_expert=first, bias_share=1.0 / width_parts)
        out = _flat(x, weights, chosen, params, glu, platform, **shares)
        if width_parts > 1:
            out = lax.psum(out, "tensor")
        if is_split:
            out = lax.psum_scatter(out, "expert", tiled=True) if split_tokens else lax.psum(out, "expert")
        return out

    run = functools.partial(jax.shard_map, mesh=mesh, check_vma=False)
    in_specs = (tokens, tokens, tokens, specs)
    return run(local, in_specs=in_specs, out_specs=PartitionSpec(*tokens))(x, weights, chosen, params)
