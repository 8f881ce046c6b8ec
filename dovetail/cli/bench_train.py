"""`dovetail bench train`: tokens per second of the training step and its MFU."""

import time


def run(
    model: str,
    batch: int,
    length: int,
    steps: int,
    documents: int,
    overrides: list[str],
    trace: str,
) -> None:
    """Compile the training step, time it and print a table."""
    import jax
    from rich.console import Console

    from dovetail.core.chips import chip_of, usable_bytes
    from dovetail.plan.flops import train_flops_per_token
    from dovetail.train.prepare import prepare

    settings, objective = _training(model, batch, length, overrides)
    device, count = jax.devices()[0], jax.device_count()
    devices = f"{count} device{'s' if count > 1 else ''}"
    ready = prepare(settings, objective)
    console = Console(highlight=False)
    console.print("\n".join(ready.derived.explain()))
    start = time.perf_counter()
    step = ready.compile(ready.bucket(documents))
    compiled = time.perf_counter() - start
    state = ready.init()
    data = [ready.put(_batch(settings, ready.cfg.vocab, documents, seed)) for seed in range(2)]
    losses, metrics = [], {}
    for i in range(2):  # warm-up: the allocator grows in the first runs
        state, metrics = step(state, data[i % 2])
        losses.append(float(metrics["loss"]))
    if trace:
        jax.profiler.start_trace(trace)
    start = time.perf_counter()
    for i in range(steps):
        state, metrics = step(state, data[i % 2])
    losses.append(float(metrics["loss"]))
    seconds = (time.perf_counter() - start) / steps
    if trace:
        jax.profiler.stop_trace()
    chip, memory = chip_of(device), device.memory_stats() or {}
    rate = settings.tokens_per_step / seconds
    peak = chip.device_bf16 * count if chip and chip.device_bf16 else None
    rows = {
        "tokens per second": f"{rate:,.0f}",
        "step": f"{seconds * 1e3:,.1f} ms",
        "compile": f"{compiled:.1f} s",
        "loss": ", ".join(f"{loss:.3f}" for loss in losses),
    }
    for name, causal in (("causal", True), ("full", False)):
        frozen = settings.step_models.adapter is not None
        flops = train_flops_per_token(ready.cfg, settings.length, causal, frozen)
        share = f", {rate * flops / peak:.1%} of {chip.name}'s peak" if peak and chip else ""
        rows[f"FLOP/s, {'4N, ' if frozen else ''}{name} attention"] = f"{rate * flops / 1e12:,.1f} TFLOP/s{share}"
    if "peak_bytes_in_use" in memory:
        limit = usable_bytes(device) or 0
        taken, planned = memory["peak_bytes_in_use"], ready.memory(documents).total
        rows["memory"] = f"{taken / 2**30:.1f} GiB of {limit / 2**30:.1f}; {planned / 2**30:.1f} planned"
    name = model.rstrip("/").rpartition("/")[2]
    console.print(_table(f"{name}, {batch} x {length}, documents per row: {documents}, {devices}", rows))


def _training(model: str, batch: int, length: int, overrides: list[str]):
    """Return (settings, objective) of pretraining, or of LoRA if one of its keys is given."""
    from dovetail.core.overrides import place, split
    from dovetail.core.recipe import read
    from dovetail.train.next_token import next_token
    from dovetail.train.settings import Pretrain

    base = {"model": model, "batch": batch, "length": length, "steps": 1000}
    given = [split(text) for text in overrides]
    if any(path[0] == "lora" for path, _ in given):
        return _adapters(place(base, given))
    settings = read(Pretrain, place(base | {"data": {"sources": [{"path": "random"}]}}, given))
    return settings, next_token(settings)


def _adapters(given: dict):
    """On random weights: a shape is measured, and no checkpoint is needed."""
    from dataclasses import replace

    import jax

    from dovetail.core.compute import compute_of
    from dovetail.core.recipe import read
    from dovetail.core.spec import init, tree_map
    from dovetail.models.frozen import frozen_spec
    from dovetail.ops.quant.weight import rounded
    from dovetail.tune.settings import Sft
    from dovetail.tune.sft import sft_objective

    settings = read(Sft, given)
    objective = sft_objective(settings)
    dtype = compute_of(settings.precision.compute).dtype

    def load(cfg, placement):
        def one(leaf):
            weight = init(leaf, jax.random.key(0), dtype, 0.02, placement.sharding(leaf.axes, leaf.shape))
            return rounded(leaf, weight, placement)

        return tree_map(one, frozen_spec(cfg, settings.held))

    assert objective.frozen is not None
    return settings, replace(objective, frozen=replace(objective.frozen, load=load))


def _batch(settings, vocab: int, documents: int, seed: int):
    """Return random tokens in rows of `documents` documents of random lengths."""
    import jax.numpy as jnp
    import numpy as np

    from dovetail.core.types import Batch

    rng = np.random.default_rng(seed)
    B, T = settings.batch, settings.length
    tokens = rng.integers(0, vocab, (B, T + 1), np.int32)
    cuts = np.sort(np.stack([rng.choice(np.arange(1, T), documents - 1, replace=False) for _ in range(B)]), axis=1)
    place = np.arange(T)
    segment = (place[None, :, None] >= cuts[:, None, :]).sum(axis=2).astype(np.int32)
    starts = np.concatenate([np.zeros((B, 1), np.int64), cuts], axis=1)
    positions = place - np.take_along_axis(starts, segment, axis=1)
    same = np.concatenate([segment[:, 1:] == segment[:, :-1], np.ones((B, 1), bool)], axis=1)
    return Batch(
        jnp.asarray(tokens[:, :-1]),
        jnp.asarray(tokens[:, 1:]),
        jnp.asarray(positions, jnp.int32),
        jnp.asarray(segment + 1),
        jnp.asarray(same, jnp.float32),
    )


def _table(title: str, rows: dict[str, str]):
    from rich.table import Table

    table = Table(title=title, show_header=False)
    for name, value in rows.items():
        table.add_row(name, value)
    return table
