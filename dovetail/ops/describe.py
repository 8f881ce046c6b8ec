"""List which implementation runs each operation, as `dovetail info` shows it: ops.dispatch chooses."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractDevice, AbstractMesh

from dovetail.core.chips import CHIPS
from dovetail.core.formats import Format
from dovetail.ops import dispatch, dispatch_products
from dovetail.ops.capabilities import NVIDIA
from dovetail.ops.kernels.gpu.needs import why_not_row
from dovetail.ops.kernels.tpu.needs import room_of, why_not_flat, why_not_ragged, why_not_splash


def describe() -> list[tuple[str, str, str]]:
    """Return (operation, platform, implementation) for a usual shape and one device."""
    q = jax.ShapeDtypeStruct((1, 1024, 32, 128), jnp.bfloat16)
    whole = jax.ShapeDtypeStruct(q.shape, jnp.float32)  # what a CPU computes in
    few, many = (jax.ShapeDtypeStruct((rows, 128), jnp.float32) for rows in (1, 1024))
    rows = []
    for platform in ("cpu", "cuda", "tpu"):
        heads = whole if platform == "cpu" else q
        rows += [
            ("packed attention", platform, dispatch.choose_packed(platform, heads, heads)),
            ("paged attention", platform, _paged(platform, heads)),
            ("attention with a block mask", platform, _block_mask(platform, heads)),
            ("bidirectional attention", platform, _bidirectional(platform, heads)),
            ("latent attention, paged", platform, "flat" if platform == "tpu" else "reference"),
            ("products", platform, _products(few, many) if platform == "cpu" else "xla"),
            ("quantised products", platform, _quantized_products(platform, few)),
            ("experts", platform, _experts(platform)),
            *((operation, platform, name) for operation, name in _small_kernels(platform).items()),
        ]
    return sorted(rows, key=lambda row: row[0])


def _experts(platform: str) -> str:
    """Return the grouped product of experts with usual dims."""
    rows, w = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((1024, 2048), (64, 1024, 2048)))
    name = dispatch_products.choose_grouped(platform, rows, w)
    return {"xla": "ragged_dot", "mosaic": "mosaic; triton for f32 and dims that are not multiples of 64"}.get(
        name, name
    )


def _paged(platform: str, q: Any) -> str:
    """Return the paged attention of decode steps, and that of prompts where it is another one."""
    found = [dispatch.choose_paged(platform, q, 8)]
    if platform in NVIDIA and dispatch.is_hopper():
        found += ["mosaic for prompts of heads of 64 and 128 dims"]
    return "; ".join(found)


def _small_kernels(platform: str) -> dict[str, str]:
    """Return the implementations of norms, rotation and store, loss and sampling, and why they are not in Mosaic."""
    names, rest = ("norm", "rotation and store", "loss", "layer norm", "sampling"), "reference"
    if not dispatch.is_one_gpu(platform, None):
        return dict.fromkeys(names, rest)
    rest = "triton" if dispatch.has_triton() else rest
    if why := _why_not_hopper():
        return dict.fromkeys(names, f"{rest} ({why})")
    logits = jax.ShapeDtypeStruct((1, 50_257), jnp.bfloat16)
    return dict.fromkeys(names, "mosaic") | {"loss": f"mosaic; {rest} for {why_not_row(logits)}"}


def _why_not_hopper() -> str | None:
    """Return why kernels for Hopper cannot run here, or None."""
    found = {getattr(device, "compute_capability", None) for device in jax.devices()}
    if dispatch.is_hopper():
        return None
    return "no NVIDIA GPU here" if found == {None} else f"compute capability {', '.join(sorted(map(str, found)))}"


def _bidirectional(platform: str, q: Any) -> str:
    """Return the attention of towers, and that of heads of 72 dims where it is another one."""
    usual = dispatch.choose_bidirectional(platform, q)
    return f"{usual}; mosaic for heads of 65 to 80 dims" if platform in NVIDIA and dispatch.is_hopper() else usual


def _block_mask(platform: str, q: Any) -> str:
    """Return the packed and the paged attention of image tokens that see each other."""
    packed = dispatch.choose_packed(platform, q, q, block_mask=True)
    paged = dispatch.choose_paged(platform, q, 8, block_mask=True)
    return f"{packed} (packed), {paged} (paged)"


def _products(few: Any, many: Any) -> str:
    """Return the products of few rows and many rows on this CPU, and why not our kernels."""
    if why := dispatch_products.why_not_ours(few, few):
        return f"xla ({why})"
    return f"numba; xla for {why}" if (why := dispatch_products.why_not_ours(many, few)) else "numba"


def _quantized_products(platform: str, x: Any) -> str:
    """Return the products of this platform with quantised weights."""
    if dispatch_products.why_not_packed(Format("q4_1"), x, platform, None) is None:
        return "numba for int8, int4 and GGUF blocks; xla for w8a8"
    fp8 = dispatch_products.quantized_kernel(Format("fp8"), x, platform, None) is not None
    half = jax.ShapeDtypeStruct(x.shape, jnp.bfloat16)
    if dispatch_products.why_not_packed_gpu(Format("int8"), half, platform, None, half.shape[-1]) is None:
        return "mosaic for few tokens; xla for w8a8, and for fp8 from 9 tokens on; reference for others"
    if dispatch_products.why_not_packed_tpu(Format("int4", 128), half, platform, None) is None:
        return "pallas for formats in groups of 32 to 128; xla for others"
    return f"xla for {'w8a8 and fp8' if fp8 else 'w8a8'}; reference for others"


# what: (query heads, key heads of a device, head dim, its option)
TPU_CASES: dict[str, tuple[int, int, int, str]] = {
    "heads of 64 (Llama 3.2 1B)": (32, 8, 64, ""),
    "heads of 64, 3 key heads (SmolLM2)": (9, 3, 64, ""),
    "heads of 80": (32, 32, 80, ""),
    "heads of 96 (Phi-3)": (32, 32, 96, ""),
    "heads of 128 (Llama, Qwen, Mistral)": (32, 8, 128, ""),
    "heads of 128, 1 key head": (4, 1, 128, ""),
    "heads of 128, 10 key heads (Phi-4)": (40, 10, 128, ""),
    "heads of 256 (Gemma)": (16, 8, 256, ""),
    "sinks (GPT-OSS)": (64, 8, 64, "sinks"),
    "images whose tokens see each other (Gemma 3 27B)": (32, 16, 128, "images"),
    "latents (DeepSeek)": (16, 1, 576, "latent"),
    "f16": (32, 8, 128, "f16"),
}


def describe_tpu() -> list[tuple[str, str, str, str, str]]:
    """Return (what, generation, packed kernel, paged kernel, why no better one), for steps of 256 sequences."""
    rows = []
    for name, chip in CHIPS.items():
        if room_of(chip.kinds[0]) is None:  # a GPU, or a TPU of which too little is known
            continue
        device = AbstractDevice(chip.kinds[0], num_cores=1, platform="tpu")
        with jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
            rows += [(what, name, *_on_tpu(*case)) for what, case in TPU_CASES.items()]
    return sorted(rows, key=lambda row: row[0])


def _on_tpu(N: int, K: int, H: int, option: str) -> tuple[str, str, str]:
    """Return (packed, paged, why) on the TPU of the context."""
    dtype, rank = jnp.dtype("float16" if option == "f16" else "bfloat16"), 512 if option == "latent" else None
    sinks = jax.ShapeDtypeStruct((N,), dtype) if option == "sinks" else None
    q, long, tables = (jax.ShapeDtypeStruct(shape, dtype) for shape in ((256, N, H), (1, 1024, N, H), (256, 512)))
    masked = option == "images"
    row = (
        dispatch.latent_row("tpu", H)
        if rank
        else dispatch.page_row("tpu", K, H, dtype, sinks is not None, block_mask=masked)
    )
    flat = why_not_flat(q, K, None, tables, jax.ShapeDtypeStruct((1, 128, *row), dtype), rank)
    ragged = "it does not support latents" if rank else why_not_ragged(q, K, sinks, None, tables, masked)
    packed = dispatch.choose_packed("tpu", long, long, None, sinks, masked)
    paged = "ragged" if ragged is None else "flat" if flat is None else "reference"
    whys = {"packed": why_not_splash(long, sinks), "paged": flat if paged == "reference" else ragged}
    return packed, paged, "; ".join(f"{context}: {why}" for context, why in whys.items() if why)
