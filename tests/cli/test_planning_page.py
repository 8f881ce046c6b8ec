"""docs/planning.md: every `dovetail plan` command of the page prints what the page shows, on a screen of 120 columns.

A line `...` on the page stands for any number of lines. What depends on the machine (`--calibrate`, `--on cpu`) is not
compared.
"""

import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from dovetail.cli.plan import app

PAGE = Path(__file__).parents[2] / "docs" / "planning.md"
COLUMNS = "120"


def commands() -> dict[str, list[str]]:
    """Return each command of the page with the lines below it."""
    found: dict[str, list[str]] = {}
    for block in re.findall(r"^```\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE):
        for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            command, *lines = part.rstrip("\n").split("\n")
            if re.match(r"dovetail plan (train|serve|rl|storage) ", command):
                found[command] = lines
    return found


def printed(command: str) -> list[str]:
    done = CliRunner(env={"COLUMNS": COLUMNS, "TERM": "dumb"}).invoke(app, shlex.split(command)[2:])
    if isinstance(done.exception, ValueError):
        return [f"error: {done.exception}"]
    assert done.exit_code == 0, done.output
    return [line.rstrip() for line in done.output.rstrip("\n").split("\n")]


def as_pattern(lines: list[str]) -> str:
    """Return a pattern of the page's lines, each with its line break."""
    return "".join(r"(?:.*\n)*?" if line == "..." else re.escape(line.rstrip()) + r"\n" for line in lines)


def test_the_page_has_commands():
    assert {command.split()[2] for command in commands()} == {"train", "serve", "rl", "storage"}


@pytest.mark.parametrize("command", commands())
def test_a_command_prints_what_the_page_shows(command, tmp_path, monkeypatch):
    monkeypatch.setenv("DOVETAIL_HOME", str(tmp_path))  # no calibration of this machine's
    shown, said = commands()[command], "".join(f"{line}\n" for line in printed(command))
    assert re.fullmatch(as_pattern(shown), said), said
