"""The page of a report: one HTML file that fetches nothing, for light and dark screens."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from statistics import median
from typing import Any

from dovetail.core.errors import MissingFileError
from dovetail.core.files import write_atomic
from dovetail.train.report import completions_page as browser
from dovetail.train.report import curves, reinforcement
from dovetail.train.report.completions import turns, written
from dovetail.train.report.curves import Mark, Series, chart, name_of, smooth
from dovetail.train.report.goodput import KINDS, OTHER
from dovetail.train.report.live import clock_text, short
from dovetail.train.report.summary import RunRecord, read, step_times, summary, when

PAGE = "report.html"
# Of a health event: told in columns of their own, or too long to tell.
TITLE = ("time", "step", "what", "kind", "reason", "process", "values")
LOG_FROM = 20  # the greatest gradient norm over the median, from which its axis is logarithmic
LOG_LOSS = 2.5  # and the same for the greatest loss over the least: what comes after the first fall stays visible
MOST_ROWS = 50
# What every training says of a step: drawn with curves of their own, or no measure of the model.
COMMON = (
    "loss", "grad_norm", "lr", "targets", "seconds", "tokens", "examples", "pairs", "tokens_per_second", "mfu_causal",
    "mfu_full", "memory", "goodput", "time", "z",
)  # fmt: skip

_STYLE = """
:root{color-scheme:light dark;--paper:#fff;--card:#f6f7f9;--ink:#1c2128;--dim:#667080;--rule:#e3e6ea;--bad:#d1434b;
--c0:#2f6bd8;--c1:#dd7a26;--c2:#2f9e6b;--c3:#8a5fd0;--c4:#c2487e;--c5:#b0952b;--c6:#4aa5b5;--c7:#8d6e58;--c8:#98a2ae;--c9:#7aa83c;
--c10:#a98bb0}
@media(prefers-color-scheme:dark){:root{--paper:#12151a;--card:#1a1e25;--ink:#e4e8ee;--dim:#97a1b0;--rule:#2b313b;
--bad:#f0727a;--c0:#6ca0ff;--c1:#f2a057;--c2:#55c892;--c3:#b695f2;--c4:#ee83b1;--c5:#d9c05c;--c6:#72cbdb;--c7:#bd9c84;
--c8:#79828f;--c9:#a5cf6b;--c10:#cdb0d4}}
*{box-sizing:border-box}
body{margin:0 auto;max-width:1120px;padding:28px 24px 48px;background:var(--paper);color:var(--ink);
font:15px/1.5 system-ui,sans-serif}
h1{font-size:24px;margin:0}h2{font-size:17px;margin:34px 0 10px}
p.about{margin:2px 0 20px;color:var(--dim)}
.figures{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(170px,46%),1fr));gap:10px;margin-bottom:18px}
.figures>div{background:var(--card);border-radius:8px;padding:10px 14px}
.figures .name{color:var(--dim);font-size:12px}.figures .value{font-size:19px;font-weight:600}
.figures .more{color:var(--dim);font-size:12px}
.card{background:var(--card);border-radius:8px;padding:12px 12px 8px;margin-bottom:12px}
.two{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(420px,100%),1fr));gap:12px}.two .card{margin:0}
@media(max-width:640px){body{padding:20px 14px}.wide{overflow-x:auto}.wide svg.chart{width:820px}}
.bar{display:flex;height:26px;border-radius:6px;overflow:hidden;margin-bottom:12px}
.scroll{overflow-x:auto}
table{border-collapse:collapse;width:100%;font-size:14px}
th{text-align:left;color:var(--dim);font-weight:500}
td,th{padding:5px 14px 5px 0;border-bottom:1px solid var(--rule);vertical-align:top}
td.n,th.n{text-align:right;width:1%;white-space:nowrap;font-variant-numeric:tabular-nums}
.swatch{display:inline-block;width:11px;height:11px;border-radius:3px;margin-right:8px}
pre{background:var(--card);border-radius:8px;padding:14px;overflow-x:auto;font:13px/1.5 ui-monospace,monospace;margin:0}
"""


def write(folder: str | Path, out: str | Path | None = None) -> Path:
    """Makes the page of a run's folder; where it is."""
    path = Path(out) if out else Path(folder) / PAGE
    if not path.parent.is_dir():
        raise MissingFileError(f"cannot write {path}: there is no folder {path.parent}")
    write_atomic(path, page(read(folder)))
    return path


def page(run: RunRecord) -> str:
    parts = (_figures, _curves, browser.section, _samples, _goodput, _health, _saved, _environment, _recipe)
    sections, style = [part(run) for part in parts], _STYLE + curves.STYLE + browser.STYLE
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(run.name)}: training report</title><style>{style}</style></head><body>\n"
        f'<h1>{escape(run.name)}</h1><p class="about">{escape(_about(run))}</p>\n'
        + "\n".join(section for section in sections if section)
        + f"\n<script>{curves.SCRIPT}</script></body></html>\n"
    )


def _about(run: RunRecord) -> str:
    devices = run.environment.get("devices", "")
    ended = when(run.steps[-1]["time"]) if run.steps and "time" in run.steps[-1] else ""
    parts = [devices and f"on {devices}", ended and f"last step {ended}"]
    return "Training report" + "".join(f" · {part}" for part in parts if part)


def _figures(run: RunRecord) -> str:
    """A figure each, with what stands in brackets or after a comma in small."""
    cards = []
    for name, value in summary(run):
        if name == "lost to":
            continue  # the bar says it better
        main, more = _split(value)
        small = f'<div class="more">{escape(more)}</div>' if more else ""
        cards.append(f'<div><div class="name">{escape(name)}</div><div class="value">{escape(main)}</div>{small}</div>')
    return f'<div class="figures">{"".join(cards)}</div>'


def _split(value: str) -> tuple[str, str]:
    for separator in (" (", ", ", " of "):
        main, found, more = value.partition(separator)
        if found:
            return main, ("of " if separator == " of " else "") + more.removesuffix(")")
    return value, ""


# --- curves -----------------------------------------------------------------------------------------------------------


def _curves(run: RunRecord) -> str:
    marks = [Mark(event["step"], _event_name(event)) for event in run.health if isinstance(event.get("step"), int)]
    if run.curve("reward"):
        first, small = reinforcement.chart_of_rewards(run, marks), [*reinforcement.charts(run), _loss(run, marks)]
        drawn = reinforcement.is_drawn
    else:
        first, small, drawn = _loss(run, marks, width=1060, height=340), [], lambda name: False
    small += _common(run, marks)
    own = [name for name in _own(run) if not drawn(name)]
    small += [_named(name, _own_lines(run, name), form=lambda v: f"{v:.3g}") for name in own]
    grid = "".join(_card(each) for each in small if each)
    return (_card(first, "card wide") if first else "") + (f'<div class="two">{grid}</div>' if grid else "")


def _loss(run: RunRecord, marks: Sequence[Mark], width: int = 520, height: int = 230) -> str:
    loss = run.curve("loss")
    falls = bool(loss) and min(y for _, y in loss) > 0 and max(y for _, y in loss) > LOG_LOSS * min(y for _, y in loss)
    lines = [Series("each step", loss, "raw"), Series("training", smooth(loss, falls))]
    held_out = f"held out, {run.held_out_of}" if run.held_out_of else "held out"
    lines.append(Series(held_out, run.held_out, "dots", 1))
    return _named("loss", lines, form=lambda v: f"{v:.4g}", marks=marks, width=width, height=height, log=falls)


def _named(metric: str, lines: Sequence[Series], **how: Any) -> str:
    """Draw a metric under its title, with the sentence that explains it."""
    title, about = name_of(metric)
    return chart(title, lines, about=about, **how)


def _common(run: RunRecord, marks: Sequence[Mark]) -> list[str]:
    """What every training has."""
    norms = run.curve("grad_norm")
    spiky = bool(norms) and max(y for _, y in norms) > LOG_FROM * median(y for _, y in norms)
    rates = run.curve("tokens_per_second")
    return [
        *([] if run.curve("reward") else [_step_time(run)]),
        _named("lr", [Series("lr", run.curve("lr"))], form=lambda v: f"{v:.2g}", zero=True),
        _named(
            "grad_norm", [Series("each step", norms, "raw", 3), Series("norm", smooth(norms, spiky), "line", 3)],
            form=lambda v: f"{v:.3g}", marks=marks, log=spiky, zero=not spiky,
        ),
        _named(
            "tokens_per_second", [Series("each step", rates, "raw", 2), Series("tok/s", smooth(rates), "line", 2)],
            form=short, zero=True,
        ),
        _named(
            "mfu",
            [Series(name, smooth(run.curve(f"mfu_{name}")), "line", i) for i, name in enumerate(("causal", "full"))],
            form=lambda v: f"{v:.1%}", zero=True,
        ),
    ]  # fmt: skip


def _step_time(run: RunRecord) -> str:
    """Draw what each step took, over the band that was predicted."""
    took = step_times(run)
    found, last = run.prediction, took[-1:] and (took[0], took[-1])
    lines = [Series("each step", took, "raw"), Series("measured", smooth(took))]
    if found and last:
        high, low = ([(step, seconds) for step, _ in last] for seconds in (found.worst, found.best))
        lines.insert(0, Series("predicted", high, "area", 1, low))
    return _named("seconds", lines, form=lambda v: f"{v:.3g}", zero=True)


def _own(run: RunRecord) -> list[str]:
    """The measures that an objective has of its own: what every training has is drawn above, or is no measure."""
    last = run.steps[-1] if run.steps else {}
    names = [name for name, value in last.items() if isinstance(value, float) and name not in COMMON]
    return [name for name in names if not name.startswith("predicted")]  # of runs of earlier versions: constants


def _own_lines(run: RunRecord, name: str) -> list[Series]:
    values = run.curve(name)
    held_out = run.curve(f"held_out_{name}", run.evals)
    return [
        Series("each step", values, "raw", 4),
        Series("training", smooth(values), "line", 4),
        Series("held out", held_out, "dots", 1),
    ]


def _card(content: str, kind: str = "card") -> str:
    return f'<div class="{kind}">{content}</div>'


# --- where the time went ----------------------------------------------------------------------------------------------


def _goodput(run: RunRecord) -> str:
    if not run.ledger or not run.ledger.table():
        return ""
    colours = {kind: f"--c{i}" for i, kind in enumerate(("step", "init", "compile", "eval", "checkpoint", "data"))}
    colours |= {"restore": "--c6", "replay": "--c7", "lost": "--bad", "start": "--c8", "prepare": "--c9"}
    colours |= {"end": "--c10", OTHER: "--dim"}
    bar, rows = [], []
    for kind, seconds, share in run.ledger.table():
        what = KINDS.get(kind, "a step under way, and what an older version gave no name")
        colour = f"background:var({colours[kind]})"
        bar.append(f'<div style="flex:{share:.5f};{colour}" title="{escape(what)}: {share:.1%}"></div>')
        name = f'<span class="swatch" style="{colour}"></span>{escape(kind)}'
        rows.append([name, escape(what), clock_text(seconds), f"{share:.1%}"])
    table = _table(["", "", "time", "share"], rows, numbers=(2, 3))
    about = f'<p class="told">{escape(name_of("goodput").about)}</p>'
    return f'<h2>Goodput {run.ledger.share:.1%}</h2>{about}<div class="bar">{"".join(bar)}</div>{table}'


def _samples(run: RunRecord) -> str:
    """The latest first, each prompt's answers one below the other."""
    latest = sorted(run.samples, key=lambda one: (str(one.get("prompt")), -int(one.get("step") or 0)))
    judged = any(one.get("reward") is not None for one in latest)
    rows = [
        [
            f"{one.get('step', 0):,}", *([_value(one.get("reward"))] if judged else []),
            _said(one.get("prompt")), _said(written({"prompt": one.get("prompt"), "completion": one.get("answer")})),
        ]
        for one in latest
    ]  # fmt: skip
    head = ["step", *(["reward"] if judged else []), "prompt", "answer"]
    return "<h2>Samples</h2>" + _table(head, rows[:MOST_ROWS], numbers=(0, 1) if judged else (0,)) if rows else ""


def _said(text: Any) -> str:
    """A text, or the turns of a conversation."""
    if not isinstance(text, list):
        return escape(str(text or ""))
    return "<br>".join(f"<b>{escape(role)}</b> {escape(said)}" for role, said in turns(text))


# --- tables -----------------------------------------------------------------------------------------------------------


def _health(run: RunRecord) -> str:
    if not run.health:
        return ""
    rows = []
    for event in run.health[-MOST_ROWS:]:
        rest = ", ".join(f"{name.replace('_', ' ')} {_value(event[name])}" for name in event if name not in TITLE)
        told = ". ".join(part for part in (str(event.get("reason", "")), rest) if part)
        step = f"{event['step']:,}" if isinstance(event.get("step"), int) else ""
        rows.append([step, escape(_event_name(event)), escape(told)])
    more = f" (the last {MOST_ROWS} of {len(run.health):,})" if len(run.health) > MOST_ROWS else ""
    return f"<h2>Health events{more}</h2>" + _table(["step", "event", ""], rows, numbers=(0,))


def _event_name(event: dict[str, Any]) -> str:
    """Such as `skip: spike`."""
    return ": ".join(str(event[name]).replace("_", " ") for name in ("what", "kind") if event.get(name)) or "event"


def _value(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}" if math.isfinite(value) else str(value)
    if isinstance(value, dict):
        return "(" + ", ".join(f"{name} {_value(each)}" for name, each in value.items()) + ")"
    return ", ".join(map(_value, value)) if isinstance(value, list) else str(value)


def _saved(run: RunRecord) -> str:
    rows = [[f"{s.step:,}", s.kind, _size(s.bytes), when(s.time)] for s in run.saved[-MOST_ROWS:]]
    return "<h2>Checkpoints</h2>" + _table(["step", "", "size", "saved"], rows, numbers=(0, 2)) if rows else ""


def _size(size: float) -> str:
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:,.0f} {unit}" if unit == "bytes" else f"{size:,.1f} {unit}"
        size /= 1024
    return f"{size:,.1f} TiB"


def _environment(run: RunRecord) -> str:
    rows = [[escape(name), escape(str(value))] for name, value in run.environment.items()]
    return "<h2>Environment</h2>" + _table([], rows) if rows else ""


def _recipe(run: RunRecord) -> str:
    return f"<h2>Recipe</h2><pre>{escape(run.recipe)}</pre>" if run.recipe else ""


def _table(head: Sequence[str], rows: Iterable[Sequence[str]], numbers: Sequence[int] = ()) -> str:
    """Cells are HTML already."""

    def row(cells: Sequence[str], tag: str) -> str:
        kinds = (' class="n"' if i in numbers else "" for i in range(len(cells)))
        made = (f"<{tag}{kind}>{cell}</{tag}>" for kind, cell in zip(kinds, cells, strict=True))
        return f"<tr>{''.join(made)}</tr>"

    top = row(head, "th") if head else ""
    return f'<div class="scroll"><table>{top}{"".join(row(cells, "td") for cells in rows)}</table></div>'
