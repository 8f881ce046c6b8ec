"""Events of a parsed output, and the message that they add up to."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Reasoning:
    """Carry a piece of reasoning."""

    text: str


@dataclass(frozen=True)
class Content:
    """Carry a piece of content."""

    text: str


@dataclass(frozen=True)
class CallStart:
    """Start a tool call."""

    index: int
    id: str
    name: str


@dataclass(frozen=True)
class CallArguments:
    """Carry the next piece of a call's arguments, which are JSON text."""

    index: int
    text: str


@dataclass(frozen=True)
class CallEnd:
    """End a tool call.

    `complete` means that the arguments are valid JSON. Otherwise they are a prefix of valid JSON and stay so.
    """

    index: int
    complete: bool = True


Event = Reasoning | Content | CallStart | CallArguments | CallEnd


@dataclass(frozen=True)
class ToolCall:
    """Hold a whole tool call; `arguments` is JSON text."""

    id: str
    name: str
    arguments: str
    complete: bool


@dataclass(frozen=True)
class Parsed:
    """Hold a whole message."""

    reasoning: str
    content: str
    calls: tuple[ToolCall, ...]


def collect(events: Iterable[Event]) -> Parsed:
    """Return the message that the events describe; a call without its end counts as incomplete."""
    reasoning, content, calls = "", "", []
    for event in events:
        match event:
            case Reasoning(text):
                reasoning += text
            case Content(text):
                content += text
            case CallStart(_, id, name):
                calls.append(ToolCall(id, name, "", False))
            case CallArguments(index, text):
                call = calls[index]
                calls[index] = ToolCall(call.id, call.name, call.arguments + text, False)
            case CallEnd(index, complete):
                call = calls[index]
                calls[index] = ToolCall(call.id, call.name, call.arguments, complete)
    return Parsed(reasoning, content, tuple(calls))


def merge(events: Iterable[Event]) -> list[Event]:
    """Return the events with adjacent pieces of one text joined."""
    merged: list[Event] = []
    for event in events:
        match merged[-1] if merged else None, event:
            case (Reasoning(before), Reasoning(text)):
                merged[-1] = Reasoning(before + text)
            case (Content(before), Content(text)):
                merged[-1] = Content(before + text)
            case (CallArguments(_, before), CallArguments(index, text)):
                merged[-1] = CallArguments(index, before + text)
            case _:
                merged.append(event)
    return merged
