"""The arithmetic of a training plan, with its numbers filled in: `dovetail plan train --explain`."""

from typing import Any


def arithmetic(one: Any) -> list[str]:
    return [*_products(one), *_memory(one), *_links(one), *_bounds(one), *_run(one)]


def _products(one: Any) -> list[str]:
    from dovetail.plan.plans import forward_flops, recomputed
    from dovetail.plan.steptime import peak, product_flops

    cfg, settings, plan = one.cfg, one.settings, one.plan
    weights, length = forward_flops(cfg), settings.length
    attention = forward_flops(cfg, length // 2) - weights
    again, whole = recomputed(cfg, length, plan.remat), product_flops(cfg, settings, plan)
    tokens = plan.rows * length // plan.mesh.context
    last = ""
    if plan.mesh.context > 1:
        n = plan.mesh.context
        last = f"; the last of {n} slices of a row sees {(2 * n - 1) / n:.3g}x the mean number of keys"
    return [
        f"tokens of a device per microstep = {plan.rows} x {length:,} / context {plan.mesh.context} = {tokens:,}",
        f"FLOPs of a token = 3 x (2 x {weights / 2e9:.4g}B active weights + {attention / 1e9:.3g}B in attention over "
        f"{length // 2:,} keys on average) + {again / 1e9:.3g}B again (remat {plan.remat}) = "
        f"{(3 * (weights + attention) + again) / 1e9:.4g}B{last}",
        f"products = {tokens:,} tokens x {plan.microsteps} microsteps x FLOPs / tensor {plan.mesh.tensor} = "
        f"{whole:.3g} FLOPs / {peak(one.chip, settings) / 1e12:.4g} TFLOP/s = {_s(_at_peak(one, 'products'))}",
    ]


def _memory(one: Any) -> list[str]:
    from dovetail.plan.steptime import moved_bytes

    moved = moved_bytes(one.cfg, one.settings, one.plan, one.chip)
    rate = one.chip.bandwidth / one.chip.devices
    return [
        f"memory = {moved / 1e9:.3g} GB (the state read and written; weights in 3 passes of each microstep; what the "
        f"backward pass needs) / {rate / 1e12:.3g} TB/s = {_s(_at_peak(one, 'memory'))}"
    ]


def _links(one: Any) -> list[str]:
    lines = [_span(one, span) for span in one.spans]
    for each in one.time.exchanges:
        lines.append(
            f"{each.what} = {each.count:,} x {each.kind} over {each.axis}: {each.bytes / 1e9:.3g} GB sent in "
            f"{_s(each.seconds)}, {each.bytes / each.seconds / 1e9:.3g} GB/s with hops"
        )
    return lines


def _span(one: Any, span: Any) -> str:
    taken = " x ".join(f"{count} along side {side} of {one.accelerator.topology}" for side, count in span.sides)
    far = f", {span.far} groups joined at {span.far_bandwidth / 1e9:.3g} GB/s" if span.far > 1 else ""
    near = f" ({taken})" if taken else ""
    return f"{span.axis} {span.size}{near}: {span.bandwidth / 1e9:.4g} GB/s of a device over its links{far}"


def _bounds(one: Any) -> list[str]:
    from dovetail.plan.exchange import by_axis
    from dovetail.plan.steptime import USUAL_LINKS, USUAL_MEMORY, usual_products

    time, known = one.time, one.known
    hidden, waits = by_axis(time.exchanges, True), sum(by_axis(time.exchanges, False).values())
    parts = {"products": time.products, "memory": time.memory, **hidden}
    named = ", ".join(f"{name} {_s(seconds)}" for name, seconds in parts.items())
    on_top = f" + {_s(waits)} that must be waited for" if waits else ""
    slower = {"products": usual_products(one.chip), "memory": USUAL_MEMORY, "links": USUAL_LINKS}
    slower = {name: getattr(known, name, None) or share for name, share in slower.items()}
    shares = ", ".join(f"{name} at {share:.0%}" for name, share in slower.items())
    return [
        f"lower bound = max({named}){on_top} = {_s(time.lower)}",
        f"upper bound = products + memory + links, one after another ({shares}) = {_s(time.upper)}",
        f"ranked by (lower + 2 x upper) / 3 = {_s(time.likely)}",
    ]


def _run(one: Any) -> list[str]:
    from dovetail.plan.cost import unit_of
    from dovetail.plan.flops import train_flops_per_token

    settings, chips = one.settings, one.accelerator.total_chips
    each = train_flops_per_token(one.cfg, settings.length, True, settings.adapter is not None)
    low, high = one.mfu
    full = one.mfu_of(causal=False)
    lines = [
        f"MFU = {each / 1e9:.4g}B FLOPs x {settings.tokens_per_step:,} tokens / step / ({chips:,} chips x "
        f"{one.chip.bf16 / 1e12:.4g} TFLOP/s) = {low:.1%} - {high:.1%} (causal attention), "
        f"{full[0]:.1%} - {full[1]:.1%} (full)",
    ]
    if settings.total_steps:
        unit, seconds = unit_of(one.seconds[1])
        time = " - ".join(f"{each / seconds:.3g}" for each in one.seconds)
        lines.append(f"run = {settings.total_steps:,} steps x the step = {time} {unit} of {chips:,} chips")
    lines.append(f"peak, memory and links of {one.chip.name}: {one.chip.source}")
    return lines


def _at_peak(one: Any, name: str) -> float:
    """Before a calibration's share."""
    return getattr(one.time, name) * (getattr(one.known, name, None) or 1.0)


def _s(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"
