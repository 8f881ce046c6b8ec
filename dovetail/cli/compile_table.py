"""What a compiled program is, as `dovetail compile` shows it: a table for people, JSON for programs."""

from dataclasses import dataclass, field
from typing import Any

from dovetail.core.errors import UserError


@dataclass
class Report:
    """`estimated` has the names of memory's kinds, "memory in all" and "FLOPs"; `notes` are more rows."""

    title: str
    counted: Any  # plan.counted.Counted
    predicted: Any  # plan.roofline.Prediction, or None where the chip is not in the table
    estimated: dict[str, float]
    limit: int | None  # bytes of a device's memory
    seconds: float  # that it took to lower and compile
    notes: dict[str, str] = field(default_factory=dict)


def compiled(make) -> tuple[Any, int | None, float]:
    """(what `make` compiles with the options it is given, the bytes of its buffers, the seconds it took); that it does
    not fit is told in one sentence."""
    import tempfile
    import time

    from jax.errors import JaxRuntimeError

    from dovetail.io.compiled import compiled_anew
    from dovetail.plan.assignment import assigned, written_to

    start = time.perf_counter()
    try:
        with tempfile.TemporaryDirectory() as folder, compiled_anew():
            return make(written_to(folder)), assigned(folder), time.perf_counter() - start
    except JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        reason = " ".join(str(error).partition("RESOURCE_EXHAUSTED:")[2].split())[:300].rstrip(".")
        raise UserError(
            f"it was planned to fit and the compiler says it does not: {reason}. What would do: more devices; of a "
            "recipe per_device=1 or remat=full, of an engine a lower memory_fraction"
        ) from error


def show(head: dict[str, Any], reports: list[Report], as_json: bool) -> None:
    """`head`: what all of them have in common, for JSON."""
    import json

    from rich.console import Console

    if as_json:
        print(json.dumps({**head, "programs": [plain(report) for report in reports]}, indent=2))
        return
    console = Console(highlight=False)
    for report in reports:
        console.print(table(report))


def plain(report: Report) -> dict[str, Any]:
    from dataclasses import asdict

    predicted = report.predicted and {
        **asdict(report.predicted), "least": report.predicted.least, "most": report.predicted.most,
        "bound_by": report.predicted.bound_by,
    }  # fmt: skip
    return {
        "title": report.title, "compiled": report.counted.plain(), "estimated": report.estimated, "limit": report.limit,
        "predicted_seconds": predicted, "compile_seconds": report.seconds, **report.notes,
    }  # fmt: skip


def table(report: Report):
    """What the compiler counted beside what was estimated, of one device."""
    from rich import box
    from rich.table import Table

    out = Table(title=report.title, title_justify="left", title_style="bold", box=box.ROUNDED)
    out.add_column("of one device", style="cyan")
    out.add_column("compiled", justify="right")
    out.add_column("estimated", justify="right")
    for row in [*_memory(report), *_work(report), *_sent(report), *_time(report)]:
        out.add_row(*row)
    for name, value in report.notes.items():
        out.add_row(name, value, "")
    out.add_row("time to lower and compile", f"{report.seconds:.1f} s", "")
    return out


def _memory(report: Report) -> list[tuple[str, str, str]]:
    estimated = {name: gib(size) for name, size in report.estimated.items() if name != "FLOPs"}
    counted, total = report.counted.memory, report.counted.total
    rows = [(name, gib(size), estimated.pop(name, "")) for name, size in counted.items()]
    share = f" ({total / report.limit:.0%} of {gib(report.limit)})" if report.limit and counted else ""
    whole = ("memory in all", gib(total) + share if counted else "not said", estimated.pop("memory in all", ""))
    return [*((name, "", size) for name, size in estimated.items()), *rows, whole]


def _work(report: Report) -> list[tuple[str, str, str]]:
    """As XLA counts them: a loop (microsteps, equal layers) once, and nothing inside of a Pallas kernel."""
    each = _count(report.estimated.get("FLOPs"))
    rows = [("FLOPs, a loop once", _count(report.counted.flops), each)]
    rows += [("bytes accessed, a loop once", _count(report.counted.bytes), "")]
    return rows + [(f"kernel {name}", f"{calls} x", "") for name, calls in report.counted.kernels.items()]


def _sent(report: Report) -> list[tuple[str, str, str]]:
    rows = []
    for one in report.counted.traffic:
        where = f"{one.kind} over {', '.join(one.axes)}" + (", between slices" if one.crosses else "")
        rows.append((where, f"{one.count} x, sends {gib(one.bytes)}", ""))
    return rows or [("collectives", "none", "")]


def _time(report: Report) -> list[tuple[str, str, str]]:
    found = report.predicted
    if found is None:
        return []
    low = f"{_seconds(found.least)} ({found.bound_by})"
    return [("step at peak rates, at least", "", low), ("  nothing overlapping", "", _seconds(found.most))]


def _count(value: float | None) -> str:
    return "not said" if value is None else f"{value:.3g}"


def _seconds(value: float) -> str:
    return f"{value:.2f} s" if value >= 1 else f"{value * 1e3:.2f} ms" if value >= 1e-4 else f"{value * 1e6:.1f} µs"


def gib(size: float) -> str:
    return f"{size / 2**30:.2f} GiB" if size >= 2**28 else f"{size / 2**20:.1f} MiB"
