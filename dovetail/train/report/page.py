"""Build the report page of a run: one HTML file without external resources."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from html import escape
from pathlib import Path
from statistics import median
from typing import Any

from dovetail.core.errors import MissingFileError
from dovetail.core.files import write_atomic
from dovetail.core.page import embedded, html, table
from dovetail.core.units import format_clock, format_count, format_decimal_bytes
from dovetail.train.report import curves, reinforcement
from dovetail.train.report.completions import FILE, Kept, kept, shortened, turns, written
from dovetail.train.report.curves import Mark, Series, chart, name_of, smooth
from dovetail.train.report.goodput import KINDS, OTHER
from dovetail.train.report.summary import RunRecord, read, step_times, summary, when

PAGE = "report.html"
TEMPLATE = Path(__file__).parent / "template"
# Fields of a health event that have their own columns, or are too long to show.
TITLE = ("time", "step", "what", "kind", "reason", "process", "values")
LOG_FROM = 20  # the gradient norm's axis is logarithmic from this ratio of maximum to median on
LOG_LOSS = (
    2.5  # the loss's axis is logarithmic from this ratio of maximum to minimum on, so that later steps are visible
)
MOST_ROWS = 50
# Metrics of every training: drawn as curves of their own, or not a metric of the model.
COMMON = (
    "loss", "grad_norm", "lr", "targets", "seconds", "tokens", "examples", "pairs", "tokens_per_second", "mfu_causal",
    "mfu_full", "memory", "goodput", "time", "z",
)  # fmt: skip

_STYLE = """
.card{padding:12px 12px 8px;margin-bottom:12px}
.two{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(420px,100%),1fr));gap:12px}.two .card{margin:0}
@media(max-width:640px){.wide{overflow-x:auto}.wide svg.chart{width:820px}}
.bar{display:flex;height:26px;border-radius:6px;overflow:hidden;margin-bottom:12px}
"""


def write(folder: str | Path, out: str | Path | None = None) -> Path:
    """Write the page of a run's folder and return its path."""
    path = Path(out) if out else Path(folder) / PAGE
    if not path.parent.is_dir():
        raise MissingFileError(f"cannot write {path}: there is no folder {path.parent}")
    write_atomic(path, page(read(folder)))
    return path


def page(run: RunRecord) -> str:
    """Return the page of a run."""
    parts = (_figures, _curves, _completions, _samples, _goodput, _health, _saved, _environment, _recipe)
    sections = [section for part in parts if (section := part(run))]
    head = f'<h1>{escape(run.name)}</h1><p class="about">{escape(_about(run))}</p>'
    style = _STYLE + curves.STYLE + (TEMPLATE / "completions.css").read_text(encoding="utf-8")
    return html(f"{run.name}: training report", "\n".join([head, *sections]), style=style, script=curves.SCRIPT)


def _about(run: RunRecord) -> str:
    devices = run.environment.get("devices", "")
    ended = when(run.steps[-1]["time"]) if run.steps and "time" in run.steps[-1] else ""
    parts = [devices and f"on {devices}", ended and f"last step {ended}"]
    return "Training report" + "".join(f" · {part}" for part in parts if part)


def _figures(run: RunRecord) -> str:
    """Return one figure per row of the summary, with the text in brackets or after a comma in small print."""
    cards = []
    for name, value in summary(run):
        if name == "lost to":
            continue  # the bar shows it
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
    """Return the charts that every training has."""
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
            form=format_count, zero=True,
        ),
        _named(
            "mfu",
            [Series(name, smooth(run.curve(f"mfu_{name}")), "line", i) for i, name in enumerate(("causal", "full"))],
            form=lambda v: f"{v:.1%}", zero=True,
        ),
    ]  # fmt: skip


def _step_time(run: RunRecord) -> str:
    """Draw the time of each step over the predicted band."""
    took = step_times(run)
    found, last = run.prediction, took[-1:] and (took[0], took[-1])
    lines = [Series("each step", took, "raw"), Series("measured", smooth(took))]
    if found and last:
        high, low = ([(step, seconds) for step, _ in last] for seconds in (found.worst, found.best))
        lines.insert(0, Series("predicted", high, "area", 1, low))
    return _named("seconds", lines, form=lambda v: f"{v:.3g}", zero=True)


def _own(run: RunRecord) -> list[str]:
    """Return the names of the objective's own metrics."""
    last = run.steps[-1] if run.steps else {}
    names = [name for name, value in last.items() if isinstance(value, float) and name not in COMMON]
    return [name for name in names if not name.startswith("predicted")]  # constants that earlier versions wrote


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
        what = KINDS.get(kind, "an unfinished step, and times that an older version did not name")
        colour = f"background:var({colours[kind]})"
        bar.append(f'<div style="flex:{share:.5f};{colour}" title="{escape(what)}: {share:.1%}"></div>')
        name = f'<span class="swatch" style="{colour}"></span>{escape(kind)}'
        rows.append([name, escape(what), format_clock(seconds), f"{share:.1%}"])
    spent = table(["", "", "time", "share"], rows, numbers=(2, 3))
    about = f'<p class="note">{escape(name_of("goodput").about)}</p>'
    return f'<h2>Goodput {run.ledger.share:.1%}</h2>{about}<div class="bar">{"".join(bar)}</div>{spent}'


def _samples(run: RunRecord) -> str:
    """Return the table of samples: the answers to each prompt together, the latest first."""
    latest = sorted(run.samples, key=lambda one: (str(one.get("prompt")), -int(one.get("step") or 0)))
    judged = any(one.get("reward") is not None for one in latest)
    rows = [
        [
            f"{one.get('step', 0):,}", *([_value(one.get("reward"))] if judged else []),
            _turns_html(one.get("prompt")),
            _turns_html(written({"prompt": one.get("prompt"), "completion": one.get("answer")})),
        ]
        for one in latest
    ]  # fmt: skip
    head = ["step", *(["reward"] if judged else []), "prompt", "answer"]
    return "<h2>Samples</h2>" + table(head, rows[:MOST_ROWS], numbers=(0, 1) if judged else (0,)) if rows else ""


def _turns_html(text: Any) -> str:
    """Return a text, or the turns of a conversation, as HTML."""
    if not isinstance(text, list):
        return escape(str(text or ""))
    return "<br>".join(f"<b>{escape(role)}</b> {escape(content)}" for role, content in turns(text))


# --- completions ------------------------------------------------------------------------------------------------------


def _completions(run: RunRecord) -> str:
    """Return the browser of completions by step, reward and group; empty if there are no completions."""
    found = kept(run.completions) if run.completions else Kept()
    if not found.lines:
        return ""
    controls, script = ((TEMPLATE / f"completions.{end}").read_text(encoding="utf-8") for end in ("html", "js"))
    return (
        f'<h2>Completions</h2><section id="completions"><p class="note">{_left_out(found)}</p>{controls}</section>'
        f'<script type="application/json" id="completions-data">{embedded(_completion_data(found))}</script>'
        f"<script>{script}</script>"
    )


def _left_out(found: Kept) -> str:
    """Return which completions the page leaves out."""
    if len(found.lines) == found.all_lines:
        return f"All {found.all_lines:,} completions of {found.all_steps:,} steps."
    some = ""
    if len(found.steps) < found.all_steps:
        some = f" of {len(found.steps):,} steps among {found.all_steps:,} (the first, the last, and evenly between)"
    return (
        f"{len(found.lines):,} of {found.all_lines:,} completions{some}, so that this page stays small: all of them "
        f"are in {FILE}."
    )


def _completion_data(found: Kept) -> dict[str, Any]:
    names = list(dict.fromkeys(name for line in found.lines for name in line.get("rewards") or {}))
    prompts: dict[str, int] = {}
    rows = [_completion_row(line, names, prompts) for line in found.lines]
    return {"steps": found.steps, "names": names, "prompts": [json.loads(prompt) for prompt in prompts], "rows": rows}


def _completion_row(line: dict[str, Any], names: Sequence[str], prompts: dict[str, int]) -> list[Any]:
    asked, rewards = json.dumps(_shortened_text(line.get("prompt")), ensure_ascii=False), line.get("rewards") or {}
    return [
        *(line.get(name, 0) for name in ("step", "group", "member")), prompts.setdefault(asked, len(prompts)),
        _shortened_text(written(line)), _rounded(line.get("reward")), [_rounded(rewards.get(name)) for name in names],
        line.get("problems") or 0, *(line.get(name, 0) for name in ("tokens", "finish", "version")),
    ]  # fmt: skip


def _shortened_text(completion: Any) -> str | list[list[str]]:
    if isinstance(completion, list):
        return [[role, shortened(text)] for role, text in turns(completion)]
    return shortened(str(completion or ""))


def _rounded(reward: float | None) -> float | None:
    return None if reward is None or reward != reward else float(f"{reward:.6g}")


# --- tables -----------------------------------------------------------------------------------------------------------


def _health(run: RunRecord) -> str:
    if not run.health:
        return ""
    rows = []
    for event in run.health[-MOST_ROWS:]:
        rest = ", ".join(f"{name.replace('_', ' ')} {_value(event[name])}" for name in event if name not in TITLE)
        text = ". ".join(part for part in (str(event.get("reason", "")), rest) if part)
        step = f"{event['step']:,}" if isinstance(event.get("step"), int) else ""
        rows.append([step, escape(_event_name(event)), escape(text)])
    more = f" (the last {MOST_ROWS} of {len(run.health):,})" if len(run.health) > MOST_ROWS else ""
    return f"<h2>Health events{more}</h2>" + table(["step", "event", ""], rows, numbers=(0,))


def _event_name(event: dict[str, Any]) -> str:
    """Return the name of a health event, such as `skip: spike`."""
    return ": ".join(str(event[name]).replace("_", " ") for name in ("what", "kind") if event.get(name)) or "event"


def _value(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}" if math.isfinite(value) else str(value)
    if isinstance(value, dict):
        return "(" + ", ".join(f"{name} {_value(each)}" for name, each in value.items()) + ")"
    return ", ".join(map(_value, value)) if isinstance(value, list) else str(value)


def _saved(run: RunRecord) -> str:
    rows = [[f"{s.step:,}", s.kind, format_decimal_bytes(s.bytes), when(s.time)] for s in run.saved[-MOST_ROWS:]]
    return "<h2>Checkpoints</h2>" + table(["step", "", "size", "saved"], rows, numbers=(0, 2)) if rows else ""


def _environment(run: RunRecord) -> str:
    rows = [[escape(name), escape(str(value))] for name, value in run.environment.items()]
    return "<h2>Environment</h2>" + table([], rows) if rows else ""


def _recipe(run: RunRecord) -> str:
    return f"<h2>Recipe</h2><pre>{escape(run.recipe)}</pre>" if run.recipe else ""
