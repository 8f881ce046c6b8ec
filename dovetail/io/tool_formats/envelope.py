"""Read a tool call that is one JSON object: {"name": ..., "arguments": {...}}."""

from __future__ import annotations

import json

from dovetail.io.tool_formats.notation import JSON, State, ValueReader, as_json

_ARGUMENTS = ("arguments", "parameters")
_KEYS = {"name", *_ARGUMENTS, "type", "id"}  # with any other key before the arguments, the object is not a call


class Envelope:
    """Read the object and pass on the text of its arguments.

    `name` is None until this is certainly a call: its name is known and its arguments have begun. Models also write the
    arguments as a string that holds the object, or as null. After a marker (`certain`) they may also be missing, or
    come before the name; they are then passed on when the name is known. An error after the arguments (a missing brace)
    does not break the call, which ends there.
    """

    def __init__(self, certain: bool):
        self.state, self.complete = State.OPEN, False
        self.name: str | None = None
        self._certain = certain
        self._name: str | None = None
        self._arguments: str | None = None  # written and not taken yet; None: they have not begun
        self._step = self._brace
        self._key = ""
        self._reader: ValueReader | None = None  # of the string or value that is open

    def push(self, text: str, at: int) -> int:
        """Read `text` from `at` on, and return how far it was read."""
        while self.state is State.OPEN:
            while self._reader is None and at < len(text) and text[at] in " \t\r\n":
                at += 1
            if at == len(text):
                break
            read = self._step(text, at)
            if read == at:  # undecided, or broken here
                break
            at = read
        if self._arguments is not None:
            self.name = self._name
        return at

    def take(self) -> str:
        """Return the arguments read since the last call, as JSON text."""
        assert self._arguments is not None
        written, self._arguments = self._arguments, ""
        return written

    # --- what may come next -------------------------------------------------------------------------------------------

    def _brace(self, text: str, at: int) -> int:
        self._step = self._key_or_end
        return at + 1 if text[at] == "{" else self._fail(at)

    def _key_or_end(self, text: str, at: int) -> int:
        if text[at] == "}":
            return self._close(at)
        return self._read(self._read_key, text, at) if text[at] in "\"'" else self._fail(at)

    def _colon(self, text: str, at: int) -> int:
        self._step = self._value
        return at + 1 if text[at] == ":" else self._fail(at)

    def _value(self, text: str, at: int) -> int:
        if self._key == "name" and self._name is None:
            return self._read(self._read_name, text, at) if text[at] in "\"'" else self._fail(at)
        if self._key not in _ARGUMENTS or self.complete:
            return self._read(self._read_ignored, text, at)
        if self._name is None and not self._certain:
            return self._fail(at)
        if text[at] == "{":
            self._arguments = ""
            return self._read(self._read_arguments, text, at)
        return self._read(self._read_odd_arguments, text, at) if text[at] in "\"'nN" else self._fail(at)

    def _comma_or_end(self, text: str, at: int) -> int:
        self._step = self._key_or_end
        return self._close(at) if text[at] == "}" else at + 1 if text[at] == "," else self._fail(at)

    # --- strings and values, which may come in many pieces ------------------------------------------------------------

    def _read(self, step, text: str, at: int) -> int:
        self._reader, self._step = ValueReader(JSON), step
        return step(text, at)

    def _read_key(self, text: str, at: int) -> int:
        at, key = self._whole(text, at, self._colon)
        if key is not None:
            self._key = json.loads(key)
            if self._key not in _KEYS and not self.complete:
                return self._fail(at)
        return at

    def _read_name(self, text: str, at: int) -> int:
        at, name = self._whole(text, at, self._comma_or_end)
        if name is not None:
            self._name = json.loads(name)
            return at if self._name else self._fail(at)
        return at

    def _read_ignored(self, text: str, at: int) -> int:
        return self._whole(text, at, self._comma_or_end)[0]

    def _read_arguments(self, text: str, at: int) -> int:
        at, written = self._part(text, at, self._comma_or_end)
        self._arguments = (self._arguments or "") + written
        self.complete = self._reader is None
        return at

    def _read_odd_arguments(self, text: str, at: int) -> int:
        """Read null, or a string that holds the object."""
        at, value = self._whole(text, at, self._comma_or_end)
        if value is not None:
            inner = json.loads(value)
            arguments = "{}" if inner is None else as_json(inner) if isinstance(inner, str) else None
            if arguments is None or not arguments.startswith("{"):
                return self._fail(at)
            self._arguments, self.complete = arguments, True
        return at

    def _whole(self, text: str, at: int, then) -> tuple[int, str | None]:
        """Return how far the text was read, and the JSON of the value once it is complete."""
        reader = self._reader
        assert reader is not None
        at = reader.push(text, at)
        if reader.state is State.OPEN:
            return at, None
        return self._end_value(reader, at, then), reader.take() if reader.state is State.DONE else None

    def _part(self, text: str, at: int, then) -> tuple[int, str]:
        """Return how far the text was read, and the JSON written on the way."""
        reader = self._reader
        assert reader is not None
        at = reader.push(text, at)
        return (at if reader.state is State.OPEN else self._end_value(reader, at, then)), reader.take()

    def _end_value(self, reader: ValueReader, at: int, then) -> int:
        if reader.state is State.BROKEN:
            return self._fail(at)
        self._reader, self._step = None, then
        return at

    # --- the end ------------------------------------------------------------------------------------------------------

    def _close(self, at: int) -> int:
        if self._name is None or not (self.complete or self._certain):
            return self._fail(at)
        if not self.complete:
            self._arguments, self.complete = "{}", True
        self.state = State.DONE
        return at + 1

    def _fail(self, at: int) -> int:
        self.state = State.DONE if self.complete and self._name is not None else State.BROKEN
        return at
