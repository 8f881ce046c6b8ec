"""Build the page of serving plans: a decode step of each, and latency against throughput over all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dovetail.core.units import format_number
from dovetail.models.config import Attention
from dovetail.plan.exchange import Exchange
from dovetail.plan.operations import serving_operations
from dovetail.plan.page import Choice, Curve, Page, Share
from dovetail.plan.serve_memory import HELD, MEMORY_UTILIZATION, SLACK, USABLE, platform_of
from dovetail.plan.serve_plan import ServePlan, frontier
from dovetail.plan.serve_time import Bounds
from dovetail.plan.train_time import StepTime

MOST = 6  # plans


def serving_page(model: str, plans: Sequence[ServePlan], start: Callable[[ServePlan], str] | None = None) -> Page:
    """Return the page of `plans`, the best first. `start`: returns how to start a plan; default: its command."""
    best = plans[0]
    work = best.workload
    about = (
        f"Plan for serving: prompts of {work.prompt:,} tokens, answers of {work.output:,}, {work.concurrency:,} "
        f"requests at a time; weights in {best.replica.dtype}, KV pages in {best.replica.kv or best.replica.dtype}"
    )
    if best.unserved:
        about += f". Not served by Dovetail: {best.unserved}; the figures are for an engine that does"
    accelerator = best.replica.accelerator
    choices = tuple(_choice(plan, start(plan) if start else plan.command(model)) for plan in plans[:MOST])
    curves, title = (_frontier(plans),), f"{model} on {accelerator.name}"
    return Page(title, about, accelerator, choices, "decode step", curves, peak=best.replica.peak)


def _choice(plan: ServePlan, start: str) -> Choice:
    replica, batch = plan.replica, plan.chosen.batch
    operations = serving_operations(
        replica.cfg, {"tensor": plan.tensor}, batch, plan.workload.prompt + plan.workload.output // 2,
        weight_bytes=HELD[replica.dtype], cache_bytes=HELD[replica.kv or replica.dtype],
    )  # fmt: skip
    usable = replica.chip.device_hbm * USABLE[platform_of(replica.chip)] * MEMORY_UTILIZATION
    return Choice(
        f"{plan.replicas} x tensor {plan.tensor}" if plan.replicas > 1 else f"tensor {plan.tensor}",
        {"data": plan.replicas, "tensor": plan.tensor}, _memory(plan), int(usable), operations, _time(plan),
        len(replica.cfg.layers), shares=_shares(plan), figures=_figures(plan), recipe=f"{start}\n",
    )  # fmt: skip


def _memory(plan: ServePlan) -> dict[str, int]:
    held = plan.held
    used = min(plan.chosen.batch * plan.workload.length * held.per_token, held.room or 0)
    return {
        "weights": held.weights, "KV pages in use": used, "KV pages free": (held.room or 0) - used,
        "largest step": held.step, "lost between pieces": SLACK,
    }  # fmt: skip


def _time(plan: ServePlan) -> StepTime:
    """Return the time of a decode step. All that is not sent counts as memory time, because most of it is."""
    replica, batch = plan.replica, plan.chosen.batch
    context = plan.workload.prompt + plan.workload.output / 2
    products, read = batch * replica.decode_flops / replica.peak, replica.weight_bytes(batch) / replica.bandwidth
    attended = batch * replica.attention_flops(context) / replica.peak
    busy = max(products, read) + max(attended, batch * replica.kv_bytes(context) / replica.bandwidth)
    return StepTime(products + attended, busy, _sent(plan), plan.chosen.decode.best, plan.chosen.decode.worst)


def _sent(plan: ServePlan) -> tuple[Exchange, ...]:
    span, batch = plan.replica.span, plan.chosen.batch
    if span is None:
        return ()
    seconds = plan.replica.sent(batch, batch)
    return (
        Exchange(
            "sum activations", "all-reduce", "tensor", span.over, seconds * span.bandwidth, seconds, overlaps=False
        ),
    )


def _shares(plan: ServePlan) -> tuple[Share, ...]:
    cfg, attn = plan.replica.cfg, plan.replica.cfg.layers[0].attn
    heads = (Share("key heads", attn.kv_heads, ("tensor",)),) if isinstance(attn, Attention) else ()
    return (
        Share("sequences at a time", plan.chosen.batch * plan.replicas, ("data",)),
        Share("attention heads", attn.heads, ("tensor",)), *heads, Share("vocabulary", cfg.vocab, ("tensor",)),
    )  # fmt: skip


def _figures(plan: ServePlan) -> tuple[tuple[str, str, str], ...]:
    kind = "bounds"
    found = [
        ("first token", _span(plan.first_token, 1e3, "ms"), f"{kind}, a prompt alone"),
        ("between tokens", _span(plan.chosen.per_token, 1e3, "ms"), f"{kind}, {plan.chosen.batch:,} per replica"),
        ("output", _span(plan.chosen.rate, 1, "tok/s"), f"{kind}, all replicas"),
        ("critical batch", f"{plan.replica.critical_batch:,.0f} sequences", "products take as long as weights"),
    ]
    if plan.held.tokens is not None:
        found.append(("KV pages", f"{plan.held.tokens:,} tokens", "per replica, estimated"))
    if plan.per_million_output is not None:
        found.append(("cost", f"${_span(plan.per_million_output, 1, '')}", f"{kind}, per million output tokens"))
    return tuple(found)


def _span(bounds: Bounds, factor: float, unit: str) -> str:
    low, high = sorted((bounds.best * factor, bounds.worst * factor))
    return f"{format_number(low)} to {format_number(high)} {unit}".strip()


def _frontier(plans: Sequence[ServePlan]) -> Curve:
    points = tuple(
        (point.per_token.best * 1e3, point.rate.best, f"{plan.name} devices, {point.batch * plan.replicas:,} at a time")
        for plan, point in frontier(plans)
    )
    return Curve(
        "Latency against throughput", "ms between tokens, at best", "output tokens per second, at best", points,
        "Each point is a number of concurrent requests on one of the plans that no other point beats in both: points "
        "further left answer sooner, points further up answer more. Bounds at the chip's peak rates.",
    )  # fmt: skip
