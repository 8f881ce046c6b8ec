"""StreamParser: split a model's output, as it arrives, into reasoning, content and tool calls."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from dovetail.io.tool_formats import events as made
from dovetail.io.tool_formats.envelope import Envelope
from dovetail.io.tool_formats.events import CallArguments, CallEnd, CallStart, Content, Event, Parsed, Reasoning
from dovetail.io.tool_formats.formats import ReasoningFormat, ToolFormat
from dovetail.io.tool_formats.named import Named
from dovetail.io.tool_formats.notation import State
from dovetail.io.tool_formats.tools import parameters_by_name

# What may come between a marker and the first call, and between calls: a list's brackets, separators, the end of a
# fenced block, an extra brace. Where no call follows, closing characters are dropped and the rest is content.
_BEFORE = re.compile(r"\s*(?:\[\s*)?")
_BETWEEN = re.compile(r"[\s,;\]}`]*")
_CLOSING = re.compile(r"(?:\s*[\]}`]+)*")


class StreamParser:
    """Parse text in pieces of any size: call `push` for each, then `finish`. The pieces do not change the result.

    Text: a possible prefix of a marker is buffered until it is decided; if it is none, it is content, unchanged. White
    space next to markers is dropped; content before, between and after calls is kept. Markers within arguments and
    within reasoning are plain text.

    Calls: a call starts once its name is known and its arguments have begun; from there on the arguments stream. A call
    that is malformed before that is content. Arguments that are truncated (by max_tokens) or turn out malformed stay a
    prefix of valid JSON, and the call ends with complete=False: closing them would give the client a shortened call
    that looks complete, and it might run it. OpenAI also sends them truncated, with finish_reason "length". A function
    that is not among `tools` is passed on, so that the client can report it; without a marker before it (Llama's
    formats) it is content, since only the name tells a call from an answer in JSON.

    The text must contain the special tokens among the formats' `markers`, and no end token.

    Args:
        tool_format: The format of tool calls; None for no calls.
        reasoning_format: The format of reasoning; None for no reasoning.
        tools: The tools of the request.
        in_reasoning: Whether the prompt has opened the reasoning (`ReasoningFormat.opened_by`); None: the format's
            default.
        only_calls: A grammar allows only calls (tool_choice "required"), so anything else is a part of a truncated call
            and
            never content.
        new_id: Returns the id of a new call.
    """

    def __init__(
        self,
        tool_format: ToolFormat | None = None,
        reasoning_format: ReasoningFormat | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        in_reasoning: bool | None = None,
        only_calls: bool = False,
        new_id: Callable[[], str] | None = None,
    ):
        self._format, self._reasoning = tool_format or ToolFormat("none"), reasoning_format
        self._parameters = parameters_by_name(tools)
        self._new_id, self._only_calls = new_id or self._format.new_id, only_calls
        self._markers = self._format.opens + self._format.closes + self._format.bare
        self._markers += (reasoning_format.open,) if reasoning_format else ()
        self._marker = re.compile("|".join(re.escape(m) for m in sorted(self._markers, key=len, reverse=True)))
        self._events: list[Event] = []
        self._text = ""  # not read yet
        self._space = ""  # read; dropped if a marker follows
        self._has_content = False
        self._saw_marker = False  # whether there was reasoning or a call
        self._fresh = True  # whether only space has come since the start, or since the last reasoning or call
        self._has_thought = False  # whether this block of reasoning has text
        self._forget_opening("")
        self._index = -1  # of the last call
        inside = reasoning_format.starts_inside if reasoning_format and in_reasoning is None else bool(in_reasoning)
        self._step = self._read_opening if reasoning_format and inside else self._read_content

    def push(self, text: str) -> list[Event]:
        """Parse the next piece of text and return its events."""
        self._text += text
        return self._run()

    def finish(self, truncated: bool = False) -> list[Event]:
        """Decide what is buffered, and return the last events.

        A marker and the beginning of a call after it, or of the next call in a list, are content if the model ended
        there; if the text is truncated they are dropped, and so is half a marker.

        Args:
            truncated: The text was cut off (finish_reason "length") instead of ended by the model.
        """
        events = self._run()
        while self._step in (self._read_gap, self._read_call) and not self._started:
            if self._inside and not self._text and self._call is None:
                break  # only separators have come since the last call
            if truncated and (self._goes_on() if self._inside else self._opening):
                break
            self._give_back()
            events += self._run()
        if truncated and not self._started:
            self._drop_half_marker()
        self._end()
        return made.merge(events + self._take())

    def _goes_on(self) -> bool:
        """Return whether the text after a call begins another call, or ends this one, rather than being content."""
        markers = self._format.opens + self._format.closes
        if self._text and any(marker.startswith(self._text) for marker in markers):
            return True
        return re.search("[,;{]", self._buffered + self._gap + self._text) is not None

    def _drop_half_marker(self) -> None:
        """Drop a partial marker at the end; a single character counts only where a marker must follow, after a call."""
        reasoning = self._reasoning if self._step in (self._read_opening, self._read_reasoning) else None
        markers = (reasoning.open, reasoning.close) if reasoning else self._markers
        half = _half_marker(self._text, markers)
        if half > 1 or (self._fresh and self._saw_marker):
            self._text, self._space = self._text[: len(self._text) - half], "" if half else self._space

    def _end(self) -> None:
        if self._started:
            assert self._call is not None
            self._events.append(CallEnd(self._index, self._call.complete))
        elif self._step in (self._read_opening, self._read_reasoning):
            self._add_reasoning(self._text)
        elif self._step == self._read_content:
            self._add_content(self._text)
            if not (self._fresh and self._saw_marker):
                self._emit_content(self._space)

    def _run(self) -> list[Event]:
        while self._step():
            pass
        return self._take()

    def _take(self) -> list[Event]:
        events, self._events = made.merge(self._events), []
        return events

    # --- the steps: each reads some of the text, and is False when it needs more --------------------------------------

    def _read_content(self) -> bool:
        for found in self._marker.finditer(self._text) if self._markers else ():
            if self._counts(found[0], found.start()):
                self._add_content(self._text[: found.start()])
                self._text = self._text[found.start() :]
                self._enter(found[0])
                return True
        end = len(self._text) - _half_marker(self._text, self._markers)
        self._add_content(self._text[:end])
        self._text = self._text[end:]
        return False

    def _read_opening(self) -> bool:
        """Skip the opening of reasoning; models sometimes repeat the one in the prompt."""
        assert self._reasoning is not None
        self._text = self._text.lstrip()
        if len(self._text) < len(self._reasoning.open) and self._reasoning.open.startswith(self._text):
            return False
        self._text = self._text.removeprefix(self._reasoning.open)
        self._has_thought, self._step = False, self._read_reasoning
        return True

    def _read_reasoning(self) -> bool:
        assert self._reasoning is not None
        before, close, after = self._text.partition(self._reasoning.close)
        if close:
            self._add_reasoning(before)
            self._mark()
            self._text, self._step = after, self._read_content
            return True
        end = len(self._text) - _half_marker(self._text, (self._reasoning.close,))
        self._add_reasoning(self._text[:end])
        self._text = self._text[end:]
        return False

    def _read_gap(self) -> bool:
        """Read the text between markers, where a call may begin."""
        gap = self._gap + self._text
        read = (_BETWEEN if self._inside else _BEFORE).match(gap)
        assert read is not None
        self._gap, self._text = read[0], gap[read.end() :]
        markers = self._format.opens + self._format.closes
        marker = next((marker for marker in markers if self._text.startswith(marker)), None)
        if marker is not None:
            self._read_marker(marker)
            return True
        if any(marker.startswith(self._text) for marker in markers):
            return False
        self._call = self._format.call(self._text[0], bool(self._opening), self._parameters)
        if self._call is None:
            self._give_back()
        else:
            self._buffered, self._gap, self._step = self._buffered + self._gap, "", self._read_call
        return True

    def _read_call(self) -> bool:
        call = self._call
        assert call is not None
        read = call.push(self._text, 0)
        self._buffered, self._text = self._buffered + self._text[:read], self._text[read:]
        if not self._started and not self._may_be(call):
            self._give_back()
            return True
        if call.name is not None:
            self._pass_on(call.name, call.take())
        if call.state is State.OPEN:
            return False
        self._events.append(CallEnd(self._index, call.complete))
        self._step = self._read_gap if call.state is State.DONE else self._skip
        self._call, self._started, self._inside = None, False, self._inside + 1
        return True

    def _skip(self) -> bool:
        """Drop the rest of a broken call, up to the next marker."""
        markers = [marker for marker in self._format.opens + self._format.closes if len(marker) > 1]
        found = [at for at in (self._text.find(marker) for marker in markers) if at >= 0]
        at = min(found) if found else len(self._text) - _half_marker(self._text, markers)
        self._text = self._text[at:]
        self._step = self._read_content if found else self._skip
        return bool(found)

    # --- markers ------------------------------------------------------------------------------------------------------

    def _counts(self, marker: str, at: int) -> bool:
        """Return whether a marker counts as one at this position."""
        fresh = self._fresh and not self._text[:at].strip()
        if self._reasoning and marker == self._reasoning.open:
            return fresh or self._reasoning.anywhere
        return marker not in self._format.closes or (fresh and self._saw_marker)

    def _enter(self, marker: str) -> None:
        if self._reasoning and marker == self._reasoning.open:
            self._mark()
            self._step = self._read_opening
        elif marker in self._format.closes:
            self._text = self._text[len(marker) :]
        else:
            self._forget_opening(marker if marker in self._format.opens else "")
            self._text = self._text[len(self._opening) :]
            self._step = self._read_gap

    def _read_marker(self, marker: str) -> None:
        """Read a marker where a call may begin: it opens the next call, or ends the list."""
        if not self._inside and (marker in self._format.closes or marker in self._buffered):
            self._give_back()  # it closes an empty list, or opens it twice
            return
        if marker in self._format.opens and not self._inside:
            self._buffered += self._gap + marker
            self._gap, self._opening = "", self._opening or marker
        elif marker in self._format.opens:
            self._forget_opening(marker)
        else:
            self._step = self._read_content
        self._text = self._text[len(marker) :]

    def _forget_opening(self, marker: str) -> None:
        self._opening = marker  # before the calls; "" for none
        self._inside = 0  # calls since then
        self._buffered, self._gap = marker, ""  # all that may become a call; content if it does not
        self._call: Envelope | Named | None = None
        self._started = False  # whether it is certainly a call

    def _may_be(self, call: Envelope | Named) -> bool:
        if call.name is None:
            return call.state is not State.BROKEN
        return bool(self._opening) or not self._parameters or call.name in self._parameters

    def _pass_on(self, name: str, arguments: str) -> None:
        if not self._started:
            self._started, self._index = True, self._index + 1
            self._events.append(CallStart(self._index, self._new_id(), name))
            self._mark()
        self._buffered = ""
        self._events += [CallArguments(self._index, arguments)] if arguments else []

    def _give_back(self) -> None:
        """Treat the opening as content, and read again what follows it or follows the last call: it is no call."""
        whole = self._buffered + self._gap + self._text
        closing = _CLOSING.match(whole)
        assert closing is not None
        at = closing.end() if self._inside else len(self._opening) or 1
        if not self._inside:
            self._add_content(whole[:at])
        self._forget_opening("")
        self._text, self._step = whole[at:], self._read_content

    # --- events -------------------------------------------------------------------------------------------------------

    def _mark(self) -> None:
        self._space, self._saw_marker, self._fresh = "", True, True

    def _add_content(self, text: str) -> None:
        """Add content, holding back trailing space; directly after a marker, drop leading space."""
        text = self._space + text
        body = text.rstrip()
        self._space = text[len(body) :]
        if body:
            self._fresh = False
            self._emit_content(body.lstrip() if self._saw_marker and not self._has_content else body)

    def _emit_content(self, text: str) -> None:
        text = "" if self._only_calls else text
        self._has_content |= bool(text)
        self._events += [Content(text)] if text else []

    def _add_reasoning(self, text: str) -> None:
        text = self._space + (text if self._has_thought else text.lstrip())
        body = text.rstrip()
        self._space = text[len(body) :]
        self._has_thought |= bool(body)
        self._events += [Reasoning(body)] if body else []


def parse(
    text: str,
    tool_format: ToolFormat | None = None,
    reasoning_format: ReasoningFormat | None = None,
    *,
    truncated: bool = False,
    **options: Any,
) -> Parsed:
    """Parse a whole text with a StreamParser and return its message; `options` are those of StreamParser."""
    parser = StreamParser(tool_format, reasoning_format, **options)
    return made.collect(parser.push(text) + parser.finish(truncated))


def _half_marker(text: str, markers: Iterable[str]) -> int:
    """Return how many characters at the end of the text are a prefix of a marker."""
    markers = tuple(markers)
    for size in range(min(max(map(len, markers), default=0) - 1, len(text)), 0, -1):
        if any(marker.startswith(text[-size:]) for marker in markers):
            return size
    return 0
