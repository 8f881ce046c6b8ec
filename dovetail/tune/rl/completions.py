"""What the policy wrote, for people: `completions.jsonl`, and now and then the best and the worst of a step."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from dovetail.train.report.completions import FILE, turns, written
from dovetail.train.report.metrics import Passage, drop_after
from dovetail.tune.rl.episode import Episode
from dovetail.tune.rl.settings import Rl
from dovetail.tune.rl.task import Task

SHOWN, WIDE = 4, 480  # completions of a table, characters of each text
# What moves a terminal's cursor, or worse, is shown as a picture of itself.
PICTURES = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"}
PICTURES |= {127: 0x2421} | dict.fromkeys(range(128, 160), 0xFFFD)


class Completions:
    def __init__(self, folder: Path, settings: Rl, tasks: dict[int, Task]):
        self._path, self._settings, self._tasks = folder / FILE, settings, tasks
        self._last: int | None = None  # the step of what was added last

    def add(self, step: int, groups: Sequence[Sequence[Episode]]) -> Passage | None:
        """Of the step that they are trained in first; what was said of this step and later ones before goes. What to
        show of them, if it is time.
        """
        if self._last is None or step <= self._last:  # after a resume, or a rollback
            drop_after(self._path, step - 1)
        self._last = step
        lines = [self._line(step, number, episode) for number, group in enumerate(groups) for episode in group]
        with self._path.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
        return passage_of(step, lines) if self._is_due(step) else None

    def _is_due(self, step: int) -> bool:
        """At the first step, and where one of a rollout's updates is a multiple of show_every."""
        every, last = self._settings.show_every, step - 1
        return bool(every) and (step == 1 or (last + self._settings.updates_per_rollout) // every > last // every)

    def _line(self, step: int, group: int, episode: Episode) -> dict[str, Any]:
        return {
            "step": step, "group": group, "member": episode.place.member, "prompt": self._tasks[episode.task].prompt,
            "completion": episode.messages or episode.text, "reward": episode.reward, "rewards": episode.rewards,
            "problems": episode.problems, "tokens": episode.written, "finish": episode.finish,
            "version": episode.version,
        }  # fmt: skip


def passage_of(step: int, lines: Sequence[dict[str, Any]]) -> Passage:
    return Passage("completions", table_of(step, lines), markdown_of(step, lines))


# --- for a terminal ---------------------------------------------------------------------------------------------------


def table_of(step: int, lines: Sequence[dict[str, Any]]) -> Group:
    """The best and the worst of a step."""
    table = Table("", "reward", "prompt and completion", box=box.ROUNDED, border_style="dim", header_style="dim")
    table.show_lines, table.columns[1].max_width = True, 24
    for rank, line in _chosen(lines):
        style = "green" if rank == "best" else "red"
        asked = Text(_text(line["prompt"], WIDE // 2), style="dim", overflow="fold")
        table.add_row(Text(rank, style=style), _rewards(line, style), Group(asked, Text(_text(written(line)))))
    return Group(Text(f"step {step:,}: {_told(lines)}", style="bold"), table)


def _rewards(line: dict[str, Any], style: str) -> Text:
    """The total, each by its name where there are several, and how the completion ended."""
    text = Text(f"{line['reward']:.4g}", style=f"bold {style}")
    told = [_named(name, value) for name, value in line["rewards"].items()] if len(line["rewards"]) > 1 else []
    return text.append("".join(f"\n{each}" for each in (*told, _ended(line))), style="not bold dim default")


# --- for TensorBoard --------------------------------------------------------------------------------------------------


def markdown_of(step: int, lines: Sequence[dict[str, Any]]) -> str:
    """What was written is indented, which makes it code: none of it is markup."""
    parts = [f"**step {step:,}**: {_told(lines)}"]
    for rank, line in _chosen(lines):
        each = ", ".join(_named(name, value) for name, value in line["rewards"].items())
        named = f" ({each})" if len(line["rewards"]) > 1 else ""
        parts.append(f"**{rank}, {line['reward']:.4g}**{named}, {_ended(line)}")
        parts += [_indented(_text(line["prompt"], WIDE // 2)), "wrote", _indented(_text(written(line)))]
    return "\n\n".join(parts)


def _indented(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.splitlines() or ["(nothing)"])


# --- of both ----------------------------------------------------------------------------------------------------------


def _chosen(lines: Sequence[dict[str, Any]]) -> list[tuple[str, dict[str, Any]]]:
    """The best and the worst, each text once."""
    judged = [line for line in lines if line["reward"] is not None]
    once = {(_text(line["prompt"]), _text(line["completion"])): line for line in judged}
    apart = sorted(once.values(), key=lambda line: -line["reward"])
    half = min(SHOWN, len(apart) + 1) // 2
    best, rest = apart[:half], apart[half:]
    return [("best", line) for line in best] + [("worst", line) for line in rest[-(SHOWN - half) :]]


def _told(lines: Sequence[dict[str, Any]]) -> str:
    """Such as `reward 0.41 of 64 completions, 2 without one (number: took longer than 5 s)`."""
    rewards = [line["reward"] for line in lines if line["reward"] is not None]
    problems = [f"{name}: {what}" for line in lines for name, what in line["problems"].items()]
    mean = f"reward {fmean(rewards):.4g} of {len(lines):,} completions" if rewards else f"{len(lines):,} completions"
    missing = f", {len(lines) - len(rewards):,} without one" if len(rewards) < len(lines) else ""
    return f"{mean}{missing}{f' ({problems[0]})' if problems else ''}".translate(PICTURES)


def _ended(line: dict[str, Any]) -> str:
    cut = line["finish"] == "length"
    return f"cut off at {line['tokens']:,} tokens" if cut else f"{line['tokens']:,} tokens, {line['finish']}"


def _named(name: str, value: float | None) -> str:
    return f"{name} {'none' if value is None else f'{value:.3g}'}"


def _text(said: Any, most: int = WIDE) -> str:
    """A conversation's turns have a line each; the middle of what is long is left out."""
    if not isinstance(said, str):
        said = "\n".join(f"{role}: {text}" for role, text in turns(said))
    said = said.translate(PICTURES).strip()
    return said if len(said) <= most else f"{said[: most // 2]} … {said[-most // 2 :]}"
