"""Check the accuracy of the devices: approximate top-k, argmax in bf16, products, repeatability, and a burn-in."""

from __future__ import annotations

import importlib
import importlib.util
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dovetail.doctor import Finding

VOCABULARY, ROWS, TOP = 32_768, 64, 20
SIDES = (64, 256, 1024)
RUNS = 20
# Upper bounds of the root mean square error that rounding explains. In f32 the error of sums grows with their length.
TF32, BF16 = 2.0**-10, 2.0**-7


def f32(side: int) -> float:
    """Return the bound of a product in f32."""
    return 2.0**-23 * side**0.5


def numerics(sides: tuple[int, ...] = SIDES, runs: int = RUNS) -> list[Finding]:
    """Check how exactly the devices compute."""
    return [*top_k(), *greatest(), *products(sides), *repeatable(runs)]


# --- top-k and argmax -------------------------------------------------------------------------------------------------


def _logits(seed: int = 0) -> np.ndarray:
    """Return logits like those of a language model: a few far above the rest, many nearly equal."""
    rng = np.random.default_rng(seed)
    return (rng.standard_normal((ROWS, VOCABULARY)) * 2 + 6 * rng.random((ROWS, VOCABULARY)) ** 40).astype(np.float32)


def top_k() -> Iterator[Finding]:
    """Measure the recall of jax.lax.approx_max_k, which is fast and inexact on a TPU, and exact elsewhere."""
    logits = jnp.asarray(_logits())
    exact = np.asarray(jax.lax.top_k(logits, TOP)[1])
    near = np.asarray(jax.lax.approx_max_k(logits, TOP)[1])
    kept = np.mean([len(set(a) & set(b)) / TOP for a, b in zip(exact, near, strict=True)])
    first = np.mean(exact[:, 0] == near[:, 0])
    text = f"approx_max_k finds {kept:.1%} of the top {TOP}, and the maximum in {first:.1%} of {ROWS} rows"
    values = {"recall": float(kept), "first": float(first)}
    if first == 1.0 and kept == 1.0:
        yield Finding("good", "top-k", text, values=values)
    else:
        advice = "Dovetail's sampler uses the exact top-k; keep it if answers must be reproducible"
        yield Finding("note", "top-k", text, advice, values)


def greatest() -> Iterator[Finding]:
    """Compare argmax after a product in bf16 with float64, with and without xla_allow_excess_precision."""
    rng = np.random.default_rng(1)
    hidden = rng.standard_normal((256, 512)).astype(np.float32)
    table = rng.standard_normal((512, 4096)).astype(np.float32) / 512**0.5
    exact = np.argmax(hidden.astype(np.float64) @ table.astype(np.float64), axis=1)
    for free in (True, False):
        chosen = _argmax_bf16(hidden, table, free)
        differs = float(np.mean(chosen != exact))
        about = f"argmax in bf16, xla_allow_excess_precision={str(free).lower()}"
        text = f"differs from float64 in {differs:.1%} of {len(exact)} rows"
        yield Finding("note", about, text, values={"differs": differs})


def _argmax_bf16(hidden: np.ndarray, table: np.ndarray, free: bool) -> np.ndarray:
    """Round hidden states to bf16, and logits too unless XLA may skip that (`free`)."""

    def choose(x: jax.Array, w: jax.Array) -> jax.Array:
        logits = x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16)
        return jnp.argmax(logits.astype(jnp.float32), axis=1)

    lowered = jax.jit(choose).lower(hidden, table)
    return np.asarray(lowered.compile({"xla_allow_excess_precision": free})(hidden, table))


# --- products ---------------------------------------------------------------------------------------------------------


def products(sides: tuple[int, ...]) -> Iterator[Finding]:
    """Measure the relative error of products against float64, with PyTorch's for comparison."""
    for name, dtype, precision in (
        ("f32", jnp.float32, "highest"),
        ("f32 by default", jnp.float32, "default"),
        ("bf16", jnp.bfloat16, "default"),
    ):
        errors = {side: _error(side, dtype, precision) for side in sides}
        text = "error " + ", ".join(f"{error:.1e} at {side}" for side, error in errors.items())
        if importlib.util.find_spec("torch"):
            text += "; PyTorch on the CPU " + ", ".join(f"{_error_of_torch(side, dtype):.1e}" for side in sides)
        yield judged(name, text, errors)


def judged(name: str, text: str, errors: dict[int, float]) -> Finding:
    """Judge the errors of a product; the default precision of f32 may be TF32 on a GPU or bf16 on a TPU."""
    about, values, worst = f"product in {name}", {str(side): e for side, e in errors.items()}, max(errors.values())
    if all(error <= (BF16 if name == "bf16" else f32(side)) for side, error in errors.items()):
        return Finding("good", about, text, values=values)
    if name == "f32 by default" and worst <= BF16:
        kind = "TF32" if worst <= TF32 else "bf16"
        return Finding("note", about, f"{text}: it is {kind} here", "precision.compute=f32 selects exact f32", values)
    return Finding("fault", about, text, "the chip or its compiler computes wrong results: try --burn 60", values)


def _operands(side: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(side)
    return rng.standard_normal((side, side)).astype(np.float32), rng.standard_normal((side, side)).astype(np.float32)


def _error(side: int, dtype: Any, precision: str) -> float:
    """Return the relative root mean square error, with operands that the dtype represents exactly."""
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


# --- repeatability ----------------------------------------------------------------------------------------------------


def repeatable(runs: int) -> Iterator[Finding]:
    """Run a small training step several times with the same inputs, and compare the results bit by bit."""
    rng = np.random.default_rng(2)
    weights = jnp.asarray(rng.standard_normal((256, 256)).astype(np.float32) / 16)
    rows = jnp.asarray(rng.standard_normal((128, 256)).astype(np.float32))

    @jax.jit
    def step(w: jax.Array, x: jax.Array) -> jax.Array:
        return jax.grad(lambda v: jnp.mean(jnp.tanh(jnp.tanh(x @ v) @ v) ** 2))(w)

    first = np.asarray(step(weights, rows)).tobytes()
    other = sum(np.asarray(step(weights, rows)).tobytes() != first for _ in range(runs - 1))
    text = f"{runs} runs of a training step" + (f": {other} differ from the first" if other else " give the same bits")
    if not other:
        yield Finding("good", "repeatability", text)
    elif jax.default_backend() == "gpu":
        yield Finding("warning", "repeatability", text, "XLA_FLAGS=--xla_gpu_deterministic_ops=true makes them equal")
    else:
        yield Finding("fault", "repeatability", text, "do not use this chip: try --burn 60")


# --- burn-in ----------------------------------------------------------------------------------------------------------


def chain(side: int, depth: int = 8) -> Callable[[jax.Array], jax.Array]:
    """Return a function of products and elementwise operations in f32 and bf16, with values near 1."""

    def run(x: jax.Array) -> jax.Array:
        for _ in range(depth):
            x = jnp.tanh((x.astype(jnp.bfloat16) @ x.T.astype(jnp.bfloat16)).astype(jnp.float32) / side**0.5) + 0.1 * x
        return x

    return jax.jit(run)


def burn(seconds: float, side: int = 0, run: Any = None, devices: Sequence[Any] | None = None) -> list[Finding]:
    """Run the same computation on every chip, and report chips whose results differ in any bit.

    Results are compared between rounds and between chips, so a chip with silent data corruption is named.

    Args:
        seconds: How long to run, at least two rounds.
        side: The side of the square operands; by the platform if not given.
        run: The computation of each device; `chain` if not given.
        devices: The local devices if not given.
    """
    devices = list(devices or jax.local_devices())
    side = side or (128 if devices[0].platform == "cpu" else 4096)
    run = run or chain(side)
    start = np.random.default_rng(0).standard_normal((side, side)).astype(np.float32)
    inputs = [jax.device_put(start, device) for device in devices]
    digests: list[Counter[bytes]] = [Counter() for _ in devices]
    poisoned: Counter[int] = Counter()
    rounds, end = 0, time.monotonic() + seconds
    while rounds < 2 or time.monotonic() < end:
        results = [run(x) for x in inputs]  # all chips at once, as in a training
        for i, result in enumerate(results):
            host = np.asarray(result)
            digests[i][host.tobytes()] += 1
            poisoned[i] += not np.isfinite(host).all()
        rounds += 1
    return _verdicts(devices, digests, poisoned, rounds)


def _verdicts(devices: list[Any], digests: list[Counter[bytes]], poisoned: Counter[int], rounds: int) -> list[Finding]:
    right = sum(digests, Counter()).most_common(1)[0][0]
    found = []
    for i, device in enumerate(devices):
        wrong = rounds - digests[i][right]
        if wrong or poisoned[i]:
            nan = f", {poisoned[i]} with NaN or infinity" if poisoned[i] else ""
            found.append(Finding(
                "fault", f"burn-in of device {device.id}", f"{wrong} of {rounds} rounds gave different bits{nan}",
                f"take this chip out of use ({device}, process {device.process_index})",
            ))  # fmt: skip
    good = f"{rounds} rounds on {len(devices)} device{'s' * (len(devices) > 1)}, all bits equal"
    return found or [Finding("good", "burn-in", good)]
