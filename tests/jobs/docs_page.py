"""Extract the blocks of docs/jobs.md, so that tests run what the page shows."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "jobs.md"


def block(section: str, language: str) -> str:
    """Return the first block of a language below a heading that begins so; "" is the top of the page."""
    text = PAGE.read_text()
    start = text.index(f"\n## {section}") if section else 0
    found = re.compile(rf"^```{language}\n(.*?)^```", re.M | re.S).search(text, start)
    assert found, f"docs/jobs.md has no {language} block below {section!r}"
    return found[1]


def console(section: str) -> tuple[list[str], list[str]]:
    """Return (commands, lines that they are shown to print) of a section's console."""
    lines = block(section, "console").splitlines()
    return [line[2:] for line in lines if line.startswith("$ ")], [line for line in lines if not line.startswith("$ ")]
