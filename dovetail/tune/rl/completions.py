"""Write completions for people: `completions.jsonl`, and from time to time the best and the worst of a step."""

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
from dovetail.tune.rl.prompts import PromptRecord
from dovetail.tune.rl.settings import Rl

MAX_ROWS, MAX_CHARACTERS = 4, 480  # completions of a table, characters of each text
# Control characters, which could move the cursor of a terminal, are shown as the Unicode pictures of them.
PICTURES = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"}
PICTURES |= {127: 0x2421} | dict.fromkeys(range(128, 160), 0xFFFD)


class Completions:
    """Append the completions of each rollout to `completions.jsonl`."""

    def __init__(self, folder: Path, settings: Rl, prompts: dict[int, PromptRecord]):
        self._path, self._settings, self._prompts = folder / FILE, settings, prompts
        self._last: int | None = None  # the step of the last completions

    def add(self, step: int, groups: Sequence[Sequence[Episode]]) -> Passage | None:
        """Write the episodes of a rollout, and return the table to show if it is due.

        Args:
            step: The step of the first update on them. Lines of this step and of later ones are replaced.
            groups: The episodes.
        """
        if self._last is None or step <= self._last:  # after a resume, or a rollback
            drop_after(self._path, step - 1)
        self._last = step
        lines = [self._line(step, number, episode) for number, group in enumerate(groups) for episode in group]
        with self._path.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
        return passage_of(step, lines) if self._is_due(step) else None

    def _is_due(self, step: int) -> bool:
        """Return whether this is the first step, or one of the rollout's updates is a multiple of show_every."""
        every, last = self._settings.show_every, step - 1
        return bool(every) and (step == 1 or (last + self._settings.updates_per_rollout) // every > last // every)

    def _line(self, step: int, group: int, episode: Episode) -> dict[str, Any]:
        return {
            "step": step, "group": group, "member": episode.id.member,
            "prompt": self._prompts[episode.prompt_index].prompt, "completion": episode.messages or episode.text,
            "reward": episode.reward, "rewards": episode.rewards, "problems": episode.problems,
            "tokens": episode.completion_length, "finish": episode.finish, "version": episode.version,
        }  # fmt: skip


def passage_of(step: int, lines: Sequence[dict[str, Any]]) -> Passage:
    """Return the best and the worst completions of a step, for the terminal and for TensorBoard."""
    return Passage("completions", table_of(step, lines), markdown_of(step, lines))


# --- for a terminal ---------------------------------------------------------------------------------------------------


def table_of(step: int, lines: Sequence[dict[str, Any]]) -> Group:
    """Return a table of the best and the worst completions of a step."""
    table = Table("", "reward", "prompt and completion", box=box.ROUNDED, border_style="dim", header_style="dim")
    table.show_lines, table.columns[1].max_width = True, 24
    for rank, line in _best_and_worst(lines):
        style = "green" if rank == "best" else "red"
        prompt = Text(_text(line["prompt"], MAX_CHARACTERS // 2), style="dim", overflow="fold")
        table.add_row(Text(rank, style=style), _rewards(line, style), Group(prompt, Text(_text(written(line)))))
    return Group(Text(f"step {step:,}: {_summary(lines)}", style="bold"), table)


def _rewards(line: dict[str, Any], style: str) -> Text:
    """Return the total, each reward by its name if there are several, and how the completion ended."""
    text = Text(f"{line['reward']:.4g}", style=f"bold {style}")
    each = [_named(name, value) for name, value in line["rewards"].items()] if len(line["rewards"]) > 1 else []
    return text.append("".join(f"\n{one}" for one in (*each, _finish(line))), style="not bold dim default")


# --- for TensorBoard --------------------------------------------------------------------------------------------------


def markdown_of(step: int, lines: Sequence[dict[str, Any]]) -> str:
    """Return the same as Markdown. Completions are indented as code, so that none of their text is markup."""
    parts = [f"**step {step:,}**: {_summary(lines)}"]
    for rank, line in _best_and_worst(lines):
        each = ", ".join(_named(name, value) for name, value in line["rewards"].items())
        named = f" ({each})" if len(line["rewards"]) > 1 else ""
        parts.append(f"**{rank}, {line['reward']:.4g}**{named}, {_finish(line)}")
        parts += [_indented(_text(line["prompt"], MAX_CHARACTERS // 2)), "wrote", _indented(_text(written(line)))]
    return "\n\n".join(parts)


def _indented(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.splitlines() or ["(nothing)"])


# --- for both ---------------------------------------------------------------------------------------------------------


def _best_and_worst(lines: Sequence[dict[str, Any]]) -> list[tuple[str, dict[str, Any]]]:
    """Return the completions with the highest and the lowest rewards, each text once."""
    rewarded = [line for line in lines if line["reward"] is not None]
    once = {(_text(line["prompt"]), _text(line["completion"])): line for line in rewarded}
    ordered = sorted(once.values(), key=lambda line: -line["reward"])
    half = min(MAX_ROWS, len(ordered) + 1) // 2
    best, rest = ordered[:half], ordered[half:]
    return [("best", line) for line in best] + [("worst", line) for line in rest[-(MAX_ROWS - half) :]]


def _summary(lines: Sequence[dict[str, Any]]) -> str:
    """Return a line such as `reward 0.41 of 64 completions, 2 without one (number: took longer than 5 s)`."""
    rewards = [line["reward"] for line in lines if line["reward"] is not None]
    problems = [f"{name}: {what}" for line in lines for name, what in line["problems"].items()]
    mean = f"reward {fmean(rewards):.4g} of {len(lines):,} completions" if rewards else f"{len(lines):,} completions"
    missing = f", {len(lines) - len(rewards):,} without one" if len(rewards) < len(lines) else ""
    return f"{mean}{missing}{f' ({problems[0]})' if problems else ''}".translate(PICTURES)


def _finish(line: dict[str, Any]) -> str:
    cut = line["finish"] == "length"
    return f"cut off at {line['tokens']:,} tokens" if cut else f"{line['tokens']:,} tokens, {line['finish']}"


def _named(name: str, value: float | None) -> str:
    return f"{name} {'none' if value is None else f'{value:.3g}'}"


def _text(content: Any, most: int = MAX_CHARACTERS) -> str:
    """Return text, or a conversation with one line per turn; the middle of long text is left out."""
    if not isinstance(content, str):
        content = "\n".join(f"{role}: {text}" for role, text in turns(content))
    content = content.translate(PICTURES).strip()
    return content if len(content) <= most else f"{content[: most // 2]} … {content[-most // 2 :]}"
