"""What the pages show below `$ dovetail plan ...` and `$ dovetail recipes ...` is what those commands print, where a
screen has 120 columns.

A line `...` on a page stands for any number of lines; above what `dovetail recipes` derives, the page leaves the recipe
out. What depends on the machine (`--calibrate`, `--on cpu`) is not compared.
"""

import re

import pytest
from docs.blocks import PAGES, Command, commands
from typer.testing import CliRunner

from dovetail.cli.main import app

pytestmark = pytest.mark.slow

COLUMNS = "120"
COMPARED = re.compile(r"dovetail (plan (train|serve|rl|storage) |recipes )")


def shown() -> list[Command]:
    """Return the commands whose output a page has."""
    found = [command for page in PAGES for command in commands(page) if command.output]
    return [command for command in found if COMPARED.match(" ".join(command.words))]


def printed(command: Command) -> list[str]:
    done = CliRunner(env={"COLUMNS": COLUMNS, "TERM": "dumb"}).invoke(app, list(command.words[1:]))
    if isinstance(done.exception, ValueError):
        return [f"error: {done.exception}"]
    assert done.exit_code == 0, done.output
    return [line.rstrip() for line in done.output.rstrip("\n").split("\n")]


def as_pattern(lines: list[str]) -> str:
    """Return a pattern of the page's lines, each with its line break."""
    return "".join(r"(?:.*\n)*?" if line == "..." else re.escape(line.rstrip()) + r"\n" for line in lines)


def test_the_pages_have_commands():
    assert {" ".join(command.words[1:3]) for command in shown() if command.words[1] == "plan"} == {
        "plan train", "plan serve", "plan rl", "plan storage",
    }  # fmt: skip
    assert [command.page for command in shown() if command.words[1] == "recipes"] == ["docs/tpu.md"] * 3


@pytest.mark.parametrize("command", shown(), ids=lambda command: command.text)
def test_a_command_prints_what_the_page_shows(command, tmp_path, monkeypatch):
    monkeypatch.setenv("DOVETAIL_HOME", str(tmp_path))  # no calibration of this machine's
    text = "\n".join(command.output).rstrip("\n")
    lines = [line.strip() if line.strip() == "..." else line for line in text.split("\n")]
    lines = ["...", *lines] if command.words[1] == "recipes" else lines
    said = "".join(f"{line}\n" for line in printed(command))
    assert re.fullmatch(as_pattern(lines), said), said
