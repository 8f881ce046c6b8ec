"""How exactly the devices here compute: what an approximate top-k loses, where bf16 changes the greatest of all, how
far products are from float64 as they grow, and whether the same step gives the same bits."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dovetail.doctor.finding import Finding

VOCABULARY, ROWS, TOP = 32_768, 64, 20
SIDES = (64, 256, 1024)
RUNS = 20
# The root mean square error that rounding explains, with room: of the operands or the result, and in f32 of the sums,
# which grows with their length.
TF32, BF16 = 2.0**-10, 2.0**-7


def f32(side: int) -> float:
    return 2.0**-23 * side**0.5


def numerics(sides: tuple[int, ...] = SIDES, runs: int = RUNS) -> list[Finding]:
    return [*top_k(), *greatest(), *products(sides), *repeatable(runs)]


# --- choosing ---------------------------------------------------------------------------------------------------------


def _logits(seed: int = 0) -> np.ndarray:
    """As a language model's: a few words far above the rest, many nearly equal."""
    rng = np.random.default_rng(seed)
    return (rng.standard_normal((ROWS, VOCABULARY)) * 2 + 6 * rng.random((ROWS, VOCABULARY)) ** 40).astype(np.float32)


def top_k() -> Iterator[Finding]:
    """jax.lax.approx_max_k is several times as fast on a TPU and leaves some out; elsewhere it is exact."""
    logits = jnp.asarray(_logits())
    exact = np.asarray(jax.lax.top_k(logits, TOP)[1])
    near = np.asarray(jax.lax.approx_max_k(logits, TOP)[1])
    kept = np.mean([len(set(a) & set(b)) / TOP for a, b in zip(exact, near, strict=True)])
    first = np.mean(exact[:, 0] == near[:, 0])
    told = f"approx_max_k finds {kept:.1%} of the {TOP} greatest, and the greatest in {first:.1%} of {ROWS} rows"
    values = {"recall": float(kept), "first": float(first)}
    if first == 1.0 and kept == 1.0:
        yield Finding("good", "top-k", told, values=values)
    else:
        advice = "Dovetail's sampler uses the exact one; do not swap it for speed where answers must repeat"
        yield Finding("note", "top-k", told, advice, values)


def greatest() -> Iterator[Finding]:
    """The greedy word after a product in bf16 against f32, with XLA free to keep more digits than asked, and not."""
    rng = np.random.default_rng(1)
    hidden = rng.standard_normal((256, 512)).astype(np.float32)
    table = rng.standard_normal((512, 4096)).astype(np.float32) / 512**0.5
    exact = np.argmax(hidden.astype(np.float64) @ table.astype(np.float64), axis=1)
    for free in (True, False):
        chosen = _argmax_bf16(hidden, table, free)
        differs = float(np.mean(chosen != exact))
        about = f"argmax in bf16, xla_allow_excess_precision={str(free).lower()}"
        told = f"another word than float64 in {differs:.1%} of {len(exact)} rows"
        yield Finding("note", about, told, values={"differs": differs})


def _argmax_bf16(hidden: np.ndarray, table: np.ndarray, free: bool) -> np.ndarray:
    """Hidden states rounded to bf16, logits rounded too unless XLA may leave that out."""

    def choose(x: jax.Array, w: jax.Array) -> jax.Array:
        logits = x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16)
        return jnp.argmax(logits.astype(jnp.float32), axis=1)

    lowered = jax.jit(choose).lower(hidden, table)
    return np.asarray(lowered.compile({"xla_allow_excess_precision": free})(hidden, table))


# --- products ---------------------------------------------------------------------------------------------------------


def products(sides: tuple[int, ...]) -> Iterator[Finding]:
    """The error of a product against float64, root mean square of error over result, beside PyTorch's."""
    for name, dtype, precision in (
        ("f32", jnp.float32, "highest"),
        ("f32 by default", jnp.float32, "default"),
        ("bf16", jnp.bfloat16, "default"),
    ):
        errors = {side: _error(side, dtype, precision) for side in sides}
        told = "error " + ", ".join(f"{error:.1e} at {side}" for side, error in errors.items())
        if importlib.util.find_spec("torch"):
            told += "; PyTorch on the CPU " + ", ".join(f"{_error_of_torch(side, dtype):.1e}" for side in sides)
        yield judged(name, told, errors)


def judged(name: str, told: str, errors: dict[int, float]) -> Finding:
    """By default f32 may be TF32 on a GPU, or bf16 on a TPU: that is told, and no fault."""
    about, values, worst = f"product in {name}", {str(side): e for side, e in errors.items()}, max(errors.values())
    if all(error <= (BF16 if name == "bf16" else f32(side)) for side, error in errors.items()):
        return Finding("good", about, told, values=values)
    if name == "f32 by default" and worst <= BF16:
        kind = "TF32" if worst <= TF32 else "bf16"
        return Finding(
            "note", about, f"{told}: it is {kind} here", "precision.compute=f32 asks for the exact one", values
        )
    return Finding("fault", about, told, "the chip or its compiler computes wrongly: try --burn 60", values)


def _operands(side: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(side)
    return rng.standard_normal((side, side)).astype(np.float32), rng.standard_normal((side, side)).astype(np.float32)


def _error(side: int, dtype: Any, precision: str) -> float:
    """Root mean square of the error over that of the result, with operands that the dtype holds exactly."""
    a, b = (np.asarray(jnp.asarray(x, dtype)) for x in _operands(side))
    got = jnp.matmul(jnp.asarray(a), jnp.asarray(b), precision=precision)
    return _relative(np.asarray(got.astype(jnp.float32)), a, b)


def _error_of_torch(side: int, dtype: Any) -> float:
    torch = importlib.import_module("torch")
    kind = torch.bfloat16 if dtype == jnp.bfloat16 else torch.float32
    a, b = (torch.from_numpy(x).to(kind) for x in _operands(side))
    return _relative((a @ b).float().numpy(), a.float().numpy(), b.float().numpy())


def _relative(got: np.ndarray, a: np.ndarray, b: np.ndarray) -> float:
    exact = a.astype(np.float64) @ b.astype(np.float64)
    return float(np.sqrt(np.mean((got - exact) ** 2) / np.mean(exact**2)))


# --- repeating --------------------------------------------------------------------------------------------------------


def repeatable(runs: int) -> Iterator[Finding]:
    """A small training step, the same inputs again and again: bits must not change."""
    rng = np.random.default_rng(2)
    weights = jnp.asarray(rng.standard_normal((256, 256)).astype(np.float32) / 16)
    rows = jnp.asarray(rng.standard_normal((128, 256)).astype(np.float32))

    @jax.jit
    def step(w: jax.Array, x: jax.Array) -> jax.Array:
        return jax.grad(lambda v: jnp.mean(jnp.tanh(jnp.tanh(x @ v) @ v) ** 2))(w)

    first = np.asarray(step(weights, rows)).tobytes()
    other = sum(np.asarray(step(weights, rows)).tobytes() != first for _ in range(runs - 1))
    told = f"{runs} runs of a training step" + (f": {other} differ from the first" if other else " give the same bits")
    if not other:
        yield Finding("good", "repeatability", told)
    elif jax.default_backend() == "gpu":
        yield Finding("warning", "repeatability", told, "XLA_FLAGS=--xla_gpu_deterministic_ops=true makes them equal")
    else:
        yield Finding("fault", "repeatability", told, "this chip must not be trusted: try --burn 60")
