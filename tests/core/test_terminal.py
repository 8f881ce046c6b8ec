"""Removal of control characters from text that is printed to a terminal."""

import pytest

from dovetail.core.reporter import printable


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[31mred\x1b[0m and \x1b[2Jcleared", "red and cleared"),
        ("\x1b]0;a new title\x07left", "left"),
        ("\x1b]8;;http://evil.example\x1b\\link\x1b]8;;\x1b\\", "link"),
        ("\x1b]52;c;cm0gLXJm", ""),  # a clipboard write without its end
        ("\x9b31mC1\x9c", "C1"),
        ("\x1bcreset\x1b", "reset"),
        ("10%\r20%\r30%", "30%"),
        ("one\r\ntwo\tthree\x00\x08", "one\ntwo\tthree"),
        ("a\u202eb\u2066c", "abc"),
        (":x: [bold]ü 你好[/bold]", ":x: [bold]ü 你好[/bold]"),
    ],
)
def test_escape_sequences_and_control_characters_are_removed(text, shown):
    assert printable(text) == shown
