"""Rotary position embeddings and the ways to extend them to longer contexts."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np


@dataclass(frozen=True)
class Rope:
    """Describe one rotary table: the first `dim` dims of a head are rotated; `kind` is how the frequencies are scaled.

    LongRoPE divides them by one of two lists of factors, the same for all positions of a sequence: transformers uses
    the short list for a sequence of at most `original_len` tokens and the long one for a longer one. Keys in a cache
    cannot change when a sequence grows, so here the list follows from the maximum length of sequences (`within`), as in
    vLLM.
    """

    theta: float
    dim: int
    kind: str = "default"  # default, linear, llama3, yarn, proportional, longrope
    factor: float = 1.0
    original_len: int = 0  # llama3, yarn, longrope: the context the model was first trained on
    low_freq: float = 1.0  # llama3
    high_freq: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    truncate: bool = True  # yarn: round the ramp's ends to whole dims
    magnitude: float = 1.0  # yarn, longrope: factor on cos and sin
    share: float = 1.0  # proportional: the share of the dims that turn
    interleaved: bool = False  # pairs are (0, 1), (2, 3)... rather than (0, dim/2), (1, dim/2 + 1)...
    short_factors: tuple[float, ...] = ()  # longrope
    long_factors: tuple[float, ...] = ()  # longrope
    axes: tuple[int, ...] = ()  # multimodal: what each frequency turns by, 0 time, 1 height or 2 width
    is_long: bool = False  # longrope: the long factors, for sequences that may outgrow original_len

    def within(self, length: int) -> Rope:
        """Return the rope for sequences of at most `length` tokens."""
        return replace(self, is_long=length > self.original_len) if self.kind == "longrope" else self

    def inv_freq(self) -> np.ndarray:
        """Return [dim / 2] f32 radians per position."""
        exponent = np.arange(0, self.dim, 2, dtype=np.float32) / np.float32(self.dim)
        if self.kind == "longrope":
            factors = np.asarray(self.long_factors if self.is_long else self.short_factors, np.float32)
            return (1.0 / (factors * np.float32(self.theta) ** exponent)).astype(np.float32)
        inv = (1.0 / np.float32(self.theta) ** exponent).astype(np.float32)
        if self.kind in ("linear", "proportional"):
            turning = int(self.share * self.dim // 2)
            return np.where(np.arange(inv.size) < turning, inv / self.factor, 0).astype(np.float32)
        if self.kind == "llama3":
            return self._llama3(inv)
        return self._yarn(inv) if self.kind == "yarn" else inv

    def _llama3(self, inv: np.ndarray) -> np.ndarray:
        """Slow long waves by `factor`, keep short ones, and interpolate between (Llama 3.1)."""
        wavelen = 2 * math.pi / inv
        smooth = (self.original_len / wavelen - self.low_freq) / (self.high_freq - self.low_freq)
        smooth = np.clip(smooth, 0, 1)
        return ((1 - smooth) * inv / self.factor + smooth * inv).astype(np.float32)

    def _yarn(self, inv: np.ndarray) -> np.ndarray:
        """Interpolate over dims from kept (many turns in the original context) to slowed (arXiv 2309.00071)."""

        def dim_with(turns: float) -> float:
            return self.dim * math.log(self.original_len / (turns * 2 * math.pi)) / (2 * math.log(self.theta))

        low, high = dim_with(self.beta_fast), dim_with(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, self.dim - 1)
        ramp = np.clip((np.arange(self.dim // 2) - low) / max(high - low, 0.001), 0, 1)
        return (inv / self.factor * ramp + inv * (1 - ramp)).astype(np.float32)

    def tables(self, positions: jax.Array, spatial: bool = False) -> tuple[jax.Array, jax.Array]:
        """Return cos and sin, [..., dim / 2] f32, for positions [...], or [..., 3] if `spatial`."""
        turned_by = positions[..., np.asarray(self.axes)] if spatial else positions[..., None]
        angles = turned_by.astype(jnp.float32) * self.inv_freq()
        cos, sin = jnp.cos(angles) * self.magnitude, jnp.sin(angles) * self.magnitude
        return jax.lax.platform_dependent(cos, sin, cpu=_computed_once, default=lambda *tables: tables)


def _computed_once(*tables: jax.Array) -> tuple[jax.Array, ...]:
    """Return the tables in a form that XLA's CPU backend computes once.

    It would compute a cosine again wherever it is read, for each head of each layer (5% of a step that decodes 64
    sequences), and ignores barriers; it keeps the output of a product.
    """
    return tuple(table @ jnp.eye(table.shape[-1], dtype=table.dtype) for table in tables)


def interleaved_axes(sections: Sequence[int], count: int) -> tuple[int, ...]:
    """Return `Rope.axes` of `count` frequencies that take turns, as long as an axis has some left (Qwen3-VL)."""
    return tuple(i % 3 if i < 3 * sections[i % 3] else 0 for i in range(count))


def blocked_axes(sections: Sequence[int]) -> tuple[int, ...]:
    """Return `Rope.axes` of so many frequencies for each axis, one axis after another (Qwen2.5-VL)."""
    return tuple(axis for axis, count in enumerate(sections) for _ in range(count))


def spatial_positions(length: int, images: Iterable[tuple[int, int, int]]) -> np.ndarray:
    """Return positions [T, 3] in time, height and width of a prompt's tokens.

    The tokens of an image have the time of its start, and count rows and columns from there; what follows goes on after
    the larger of the two numbers.

    Args:
        length: T.
        images: (first token, rows, columns) of each image, in order.
    """
    positions, at, now = np.zeros((length, 3), np.int32), 0, 0
    for start, rows, columns in (*images, (length, 0, 0)):
        positions[at:start] = (now + np.arange(start - at))[:, None]
        now, at = now + start - at, start + rows * columns
        row, column = np.divmod(np.arange(rows * columns), max(1, columns))
        positions[start:at] = now + np.stack([np.zeros_like(row), row, column], axis=1)
        now += max(rows, columns)
    return positions


def yarn_magnitude(factor: float, mscale: float = 1.0) -> float:
    """Return the factor of attention logits when the context is extended by `factor`."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def longrope_magnitude(factor: float, original_len: int) -> float:
    """Return the same factor for LongRoPE (arXiv 2402.13753)."""
    return math.sqrt(1 + math.log(factor) / math.log(original_len)) if factor > 1 else 1.0


def rotate(x: jax.Array, rope: Rope, tables: tuple) -> jax.Array:
    """Rotate x [..., heads, head dim]; dims past `rope.dim` are unchanged.

    Interleaved input comes out as halves: a dot product of two such vectors is the same.
    """
    cos, sin = (t[..., None, :] for t in tables)
    turning, passing = x[..., : rope.dim].astype(jnp.float32), x[..., rope.dim :]
    a, b = (turning[..., 0::2], turning[..., 1::2]) if rope.interleaved else jnp.split(turning, 2, axis=-1)
    turned = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)
    return jnp.concatenate([turned, passing], axis=-1) if passing.shape[-1] else turned
