"""The one forward pass, for training, serving and reinforcement learning.

It returns hidden states. Training computes its cross entropy from them in chunks; serving unembeds only the rows that
it samples. `forward` also returns the cache; `trunk` is for training: the same loop over the same blocks.

Packed calls have tokens [B, T], paged ones [T]; `...` stands for either. D model dim, L layers, V vocabulary.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from dovetail.core.compute import Compute
from dovetail.core.errors import UserError
from dovetail.core.mesh import Placement, constrain
from dovetail.core.types import Cache, Context, Embeds, Packed, Paged, Params
from dovetail.models.block import Residual, Table, block, by_token, norm
from dovetail.models.config import Layer, ModelConfig
from dovetail.models.repeats import fold, repeats
from dovetail.models.spec import cache_shapes
from dovetail.ops.linear import ARRAYS, lookup, matmul
from dovetail.ops.moe import RouterStats
from dovetail.ops.paged import token_rows
from dovetail.ops.rope import Rope


def forward(
    params: Params,
    cfg: ModelConfig,
    tokens: jax.Array,
    positions: jax.Array,
    ctx: Context,
    cache: Cache | None = None,
    rows: jax.Array | None = None,
    embeds: Embeds | None = None,
) -> tuple[jax.Array, Cache | None]:
    """Run the model: tokens and positions [...] -> (hidden states [..., D], the cache with the new tokens).

    Positions are [..., 3] for prompts with images of a model with `Vision.mrope` (ops.rope.spatial_positions).

    With `rows` [S] only the states of those tokens are returned, [S, D]: past its attention the last layer computes no
    others. `embeds` replaces the embeddings of image tokens.
    """
    hidden, cache, _ = tapped(params, cfg, tokens, positions, ctx, cache, rows, embeds=embeds)
    return hidden, cache


def tapped(
    params: Params,
    cfg: ModelConfig,
    tokens: jax.Array,
    positions: jax.Array,
    ctx: Context,
    cache: Cache | None = None,
    rows: jax.Array | None = None,
    taps: tuple[int, ...] = (),
    embeds: Embeds | None = None,
) -> tuple[jax.Array, Cache | None, jax.Array | None]:
    """Run the model as `forward` does, and return the outputs of some layers too, for a draft model.

    Entries of the cache past the layers' are returned as they are. With `rows`, the last layer cannot be tapped.

    Returns:
        The hidden states, the cache, and the outputs of the layers `taps` side by side, [..., len(taps) * D]; the tap
        len(cfg.layers) is the hidden states themselves.
    """
    outputs: dict[int, Any] = dict.fromkeys(taps)
    hidden, entries, _ = _run(params, cfg, tokens, positions, ctx, cache, rows, outputs=outputs, embeds=embeds)
    if len(cfg.layers) in outputs:
        outputs[len(cfg.layers)] = hidden
    seen = jnp.concatenate([outputs[i] for i in taps], axis=-1) if taps else None
    if cache is None:
        return hidden, None, seen
    return hidden, tuple(None if old is None else entries[i] for i, old in enumerate(cache)), seen


def trunk(
    params: Params,
    cfg: ModelConfig,
    tokens: jax.Array,
    positions: jax.Array,
    ctx: Packed,
    *,
    remat: str = "none",
    scan: bool = False,
    embeds: Embeds | None = None,
) -> tuple[jax.Array, dict[int, RouterStats]]:
    """Run the model for training.

    Tokens and positions [B, T] -> (hidden states [B, T, D], statistics of each router by layer).

    Args:
        params: The weights.
        cfg: The model.
        tokens: [B, T] int32.
        positions: [B, T] int32.
        ctx: The attention context.
        remat: What the backward pass keeps (see `remember`).
        scan: Stack runs of equal layers, or of equal groups, and compile them once. The weights stay a tuple in the
            state; they are stacked where they are cast to the compute dtype, which copies them anyway.
        embeds: What replaces the embeddings of image tokens.
    """
    hidden, _, stats = _run(params, cfg, tokens, positions, ctx, remat=remat, scan=scan, embeds=embeds)
    return hidden, stats


def _run(
    params: Params,
    cfg: ModelConfig,
    tokens: jax.Array,
    positions: jax.Array,
    ctx: Context,
    cache: Cache | None = None,
    rows: jax.Array | None = None,
    remat: str = "none",
    scan: bool = False,
    outputs: dict[int, Any] | None = None,
    embeds: Embeds | None = None,
) -> tuple[jax.Array, dict[int, Any], dict[int, RouterStats]]:
    """Return the hidden states, every layer's entry of the cache, and the routers' statistics.

    The outputs of the layers that are keys of `outputs` are put there.
    """
    x, further = embed(params, cfg, tokens, ctx.placement), {}
    if embeds is not None:
        further = _further_features(cfg, x, embeds)
        x, tokens = _with_features(x, tokens, embeds)
    x = by_token(ctx, x)
    extra = _per_layer_inputs(params, cfg, tokens, x) if "per_layer" in params else None
    ropes = {layer.attn.rope for layer in cfg.layers}
    spatial = positions.ndim > tokens.ndim
    tables: dict[Rope | None, Table] = {rope: rope.tables(positions, spatial) if rope else () for rope in ropes}
    entries: dict[int, Any] = dict(enumerate(cache or ()))

    def one(run: Callable, p: Params, stream: Residual, i: int) -> tuple[Residual, RouterStats | None]:
        layer = cfg.layers[i]
        entry = entries.get(i if layer.attn.kv_from is None else layer.attn.kv_from)
        own = extra[..., i, :] if extra is not None else None
        last = rows if i == len(cfg.layers) - 1 else None
        stream, entries[i], dealt = run(p, stream, tables[layer.attn.rope], ctx, entry, own, last, cfg=cfg, layer=layer)
        if i in further:
            stream = replace(stream, x=stream.x + (further[i] if last is None else further[i][last]))
        if outputs and i in outputs:
            outputs[i] = stream.x if stream.pending is None else stream.x + stream.pending
        return stream, dealt

    stream, stats = Residual(x), {}
    for repeat in repeats(cfg, scan and not further):  # layers that get further features are not interchangeable
        run = remember(block, remat, in_loop=repeat.times > 1 and repeat.period == 1)
        stream, dealt = fold(functools.partial(one, run), params["layers"], stream, repeat)
        stats |= dealt
    return stream.add_and_norm(None, params["norm"], cfg, ctx)[1], entries, stats


def embed(params: Params, cfg: ModelConfig, tokens: jax.Array, placement: Placement | None = None) -> jax.Array:
    """Return the embeddings [..., D] of tokens [...]."""
    # rows whole: of a table cut along D, XLA looks up parts of all tokens' rows and sends those across the whole mesh
    table = params["embed"]
    table = constrain(jnp.asarray(table), placement, "vocab", None) if isinstance(table, ARRAYS) else table
    return lookup(table, tokens) * jnp.asarray(cfg.embed_scale, table.dtype)


def _with_features(x: jax.Array, tokens: jax.Array, embeds: Embeds) -> tuple[jax.Array, jax.Array]:
    """Return the embeddings with those of image tokens replaced, and the tokens with padding (0) in their place."""
    is_image = embeds.index >= 0
    features = embeds.features[jnp.maximum(embeds.index, 0), : x.shape[-1]].astype(x.dtype)
    return jnp.where(is_image[..., None], features, x), jnp.where(is_image, 0, tokens)


def _further_features(cfg: ModelConfig, x: jax.Array, embeds: Embeds) -> dict[int, jax.Array]:
    """Return what is added to the outputs of layers, by layer: further features of image tokens, 0 elsewhere."""
    D, layers = x.shape[-1], cfg.vision.deepstack if cfg.vision else ()
    rows = embeds.features[jnp.maximum(embeds.index, 0)].astype(x.dtype) if layers else x
    is_image = (embeds.index >= 0)[..., None]
    return {layer: jnp.where(is_image, rows[..., (i + 1) * D : (i + 2) * D], 0) for i, layer in enumerate(layers)}


def unembed(params: Params, cfg: ModelConfig, hidden: jax.Array) -> jax.Array:
    """Return the logits [..., V] in f32."""
    if cfg.scored:
        raise UserError("the model gives texts a score and has no head for words: ask it for scores (LLM.score)")
    logits = matmul(hidden, params["embed"] if cfg.tied else params["head"], out_dtype=jnp.float32)
    logits = logits * cfg.logit_scale if cfg.logit_scale != 1.0 else logits
    return jnp.tanh(logits / cfg.logit_softcap) * cfg.logit_softcap if cfg.logit_softcap else logits


def score(params: Params, hidden: jax.Array) -> jax.Array:
    """Return the scores [...] in f32 of hidden states [..., D]; a text's score is that of its last token."""
    return matmul(hidden, params["score"], out_dtype=jnp.float32)[..., 0]


def _per_layer_inputs(params: Params, cfg: ModelConfig, tokens: jax.Array, x: jax.Array) -> jax.Array:
    """Return [..., L, width]: each layer's own embedding of the token, mixed with a projection of the common one."""
    p, width = params["per_layer"], cfg.layers[0].per_layer_dim
    own = p["embed"][tokens] * jnp.asarray(width**0.5, x.dtype)
    common = matmul(x, p["proj"]) * jnp.asarray(cfg.dim**-0.5, x.dtype)
    return (norm(p["norm"], cfg, common) + own) * jnp.asarray(2**-0.5, x.dtype)


def init_cache(
    cfg: ModelConfig,
    num_pages: int,
    page_size: int,
    dtype: Any,
    placement: Placement | None = None,
    platform: str | None = None,
    kv: str = "auto",
) -> Cache:
    """Return an empty cache; `placement` and `platform` are those of the Paged contexts that it will be used with."""
    abstract = abstract_cache(cfg.layers, num_pages, page_size, dtype, placement, platform, kv)
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype, device=x.sharding), abstract)


def abstract_cache(
    layers: tuple[Layer, ...],
    num_pages: int,
    page_size: int,
    dtype: Any,
    placement: Placement | None = None,
    platform: str | None = None,
    kv: str = "auto",
) -> tuple[jax.ShapeDtypeStruct | None, ...]:
    """Return the shapes and shardings of the pages of these layers; `kv`: see Attention.page_dtype."""
    shapes = cache_shapes(layers, num_pages, page_size, dtype, placement, platform, kv)

    def pages(layer: Layer, shape: tuple[int, ...]) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, layer.attn.page_dtype(dtype, kv), sharding=_pages_sharding(layer, placement))

    return tuple(None if shape is None else pages(layer, shape) for layer, shape in zip(layers, shapes, strict=True))


def _pages_sharding(layer: Layer, placement: Placement | None) -> NamedSharding | None:
    return NamedSharding(placement.mesh, layer.attn.pages_partition(placement)) if placement else None


# cuDNN's forward kernel (the start of its primitive's name) gives the sums of its softmax besides the output that we
# name: without them the backward pass would run it again.
ATTENTION_KERNEL = "dot_product_attention_fwd"


def remember(run: Callable, remat: str, in_loop: bool = False) -> Callable:
    """Wrap `run` so that its backward pass keeps only some values and computes the rest again.

    XLA must not share recomputed values with the forward pass, or recompute them for all layers of a group at once
    (Gemma 3's six: 11 GiB of products), except in the body of a loop, where that cannot happen.

    Args:
        run: The function; its static arguments are passed by keyword.
        remat: "none" keeps everything; "dots" the outputs of weights' products and attention, as the rest is cheap;
            "attention" the outputs of attention and each layer's input; "full" each layer's input alone.
        in_loop: `run` is the whole body of a loop.
    """
    if remat == "none":
        return run
    keep = jax.checkpoint_policies
    attention = keep.save_from_both_policies(_is_attention, keep.save_only_these_names("attention"))
    products = keep.save_from_both_policies(
        keep.dots_with_no_batch_dims_saveable,
        keep.save_only_these_names("product"),  # experts' have kernels of their own
    )
    policy = {
        "dots": keep.save_from_both_policies(products, attention),
        "attention": attention,
        "full": keep.nothing_saveable,
    }[remat]

    def again(*args: Any, **static: Any) -> Any:
        return jax.checkpoint(functools.partial(run, **static), policy=policy, prevent_cse=not in_loop)(*args)

    return again


def _is_attention(primitive: Any, *_: Any, **__: Any) -> bool:
    return primitive.name.startswith(ATTENTION_KERNEL)


# --- greedy decoding: the simplest use of `forward` with pages --------------------------------------------------------

PAGE = 16
CHUNK = 64  # prompts go in by chunks of one size, so that there are two compiled shapes: a chunk and one token


@functools.partial(jax.jit, static_argnames=("cfg", "compute"), donate_argnames="cache")
def greedy_step(
    params: Params,
    cfg: ModelConfig,
    tokens: jax.Array,
    length: jax.Array,
    count: jax.Array,
    cache: Cache,
    compute: Compute,
):
    """Feed `count` of tokens [T] after `length` earlier ones; return the most probable next token and the cache."""
    pages = jnp.arange(cache_pages(cache), dtype=jnp.int32)[None]
    ctx = Paged(pages, (length + count)[None], jnp.stack([jnp.int32(0), count]), jnp.ones(1, jnp.int32))
    _, positions, _ = token_rows(ctx, tokens.shape[0])
    with compute.products():
        hidden, new_cache = forward(params, cfg, tokens, positions, ctx, cache)
        return jnp.argmax(unembed(params, cfg, hidden[count - 1])).astype(jnp.int32), new_cache


def cache_pages(cache: Cache) -> int:
    """Return the number of pages of a cache."""
    return next(entry.shape[0] for entry in cache if entry is not None)


def greedy(
    params: Params, cfg: ModelConfig, ids: Sequence[int], max_new_tokens: int, compute: Compute
) -> Iterator[int]:
    """Yield tokens until the model's end token (which is not yielded) or the limit."""
    if not ids:
        raise UserError("the prompt is empty: give at least one token")
    room = min(len(ids) + max_new_tokens, cfg.max_len)
    if len(ids) >= cfg.max_len:
        raise UserError(f"the prompt has {len(ids)} tokens; the model takes at most {cfg.max_len - 1}")
    cfg = cfg.within(room)
    cache = init_cache(cfg, -(-room // PAGE), PAGE, params["embed"].dtype)
    length, token = 0, jnp.int32(0)  # replaced by the prompt's last step
    while length < len(ids):
        part = list(ids[length : length + CHUNK])
        padded = jnp.asarray(part + [0] * (CHUNK - len(part)), jnp.int32)
        token, cache = greedy_step(params, cfg, padded, jnp.int32(length), jnp.int32(len(part)), cache, compute)
        length += len(part)
    while True:
        value = int(token)
        if value in cfg.eos_ids:
            return
        yield value
        length += 1
        if length >= room:
            return
        token, cache = greedy_step(params, cfg, token[None], jnp.int32(length - 1), jnp.int32(1), cache, compute)
