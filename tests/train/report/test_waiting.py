"""Test the line that counts the seconds of a compilation."""

from __future__ import annotations

import io
import logging
import threading

from rich.console import Console

from dovetail.core.reporter import NOTE, waiting


def test_lines_with_elapsed_seconds_where_output_is_redirected():
    said, enough, since = [], threading.Event(), [0.0]

    def say(line: str) -> None:
        said.append(line)
        if len(said) == 5:
            enough.set()

    with waiting("compiling", Console(file=io.StringIO()), say, clock=lambda: since.pop() if since else 65.0):
        assert enough.wait(60)
    assert said == ["compiling: 65 s"] * 5 + ["compiling: done in 65 s"]


def test_on_a_terminal_the_line_is_updated_in_place_and_removed():
    said, shown, now = [], io.StringIO(), [0.0]
    console = Console(file=shown, force_terminal=True, width=60)
    with waiting("compiling", console, said.append, clock=lambda: now[0]):
        now[0] = 2.0
    assert "compiling: 2 s" in shown.getvalue() and said == []


def test_notes_are_logged_above_warning_level(caplog):
    logging.getLogger("dovetail.x").log(NOTE, "compiling")
    assert [(record.levelname, record.levelno > logging.WARNING) for record in caplog.records] == [("NOTE", True)]
