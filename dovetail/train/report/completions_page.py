"""Build the part of a report's page that browses a policy's completions by step, reward and group."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dovetail.core.page import embedded
from dovetail.train.report.completions import FILE, Kept, kept, shortened, turns, written
from dovetail.train.report.summary import RunRecord

TEMPLATE = Path(__file__).parent / "template"
STYLE = (TEMPLATE / "completions.css").read_text(encoding="utf-8")


def section(run: RunRecord) -> str:
    """Return the section; empty if there are no completions."""
    found = kept(run.completions) if run.completions else Kept()
    if not found.lines:
        return ""
    controls, script = ((TEMPLATE / f"completions.{end}").read_text(encoding="utf-8") for end in ("html", "js"))
    return (
        f'<h2>Completions</h2><section id="completions"><p class="note">{_left_out(found)}</p>{controls}</section>'
        f'<script type="application/json" id="completions-data">{embedded(_packed(found))}</script>'
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


def _packed(found: Kept) -> dict[str, Any]:
    names = list(dict.fromkeys(name for line in found.lines for name in line.get("rewards") or {}))
    prompts: dict[str, int] = {}
    rows = [_row(line, names, prompts) for line in found.lines]
    return {"steps": found.steps, "names": names, "prompts": [json.loads(prompt) for prompt in prompts], "rows": rows}


def _row(line: dict[str, Any], names: Sequence[str], prompts: dict[str, int]) -> list[Any]:
    asked, rewards = json.dumps(_text(line.get("prompt")), ensure_ascii=False), line.get("rewards") or {}
    return [
        *(line.get(name, 0) for name in ("step", "group", "member")), prompts.setdefault(asked, len(prompts)),
        _text(written(line)), _short(line.get("reward")), [_short(rewards.get(name)) for name in names],
        line.get("problems") or 0, *(line.get(name, 0) for name in ("tokens", "finish", "version")),
    ]  # fmt: skip


def _text(completion: Any) -> str | list[list[str]]:
    if isinstance(completion, list):
        return [[role, shortened(text)] for role, text in turns(completion)]
    return shortened(str(completion or ""))


def _short(reward: float | None) -> float | None:
    return None if reward is None or reward != reward else float(f"{reward:.6g}")
