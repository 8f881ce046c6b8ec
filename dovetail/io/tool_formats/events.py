"""The events of a model's text, piece by piece, and the whole message that they make."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Reasoning:
    text: str


@dataclass(frozen=True)
class Content:
    text: str


@dataclass(frozen=True)
class CallStart:
    index: int
    id: str
    name: str


@dataclass(frozen=True)
class CallArguments:
    """The next piece of a call's arguments, which are JSON text."""

    index: int
    text: str


@dataclass(frozen=True)
class CallEnd:
    """`complete`: the arguments were written to their end, so they are valid JSON. Otherwise they are the beginning of
    valid JSON, and stay so."""

    index: int
    complete: bool = True


Event = Reasoning | Content | CallStart | CallArguments | CallEnd


@dataclass(frozen=True)
class ToolCall:
    id: str
    name: str
    arguments: str
    complete: bool


@dataclass(frozen=True)
class Parsed:
    reasoning: str
    content: str
    calls: tuple[ToolCall, ...]


def collect(events: Iterable[Event]) -> Parsed:
    """The message that the events describe. A call that has not ended yet counts as incomplete."""
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
    """The same events with neighbouring pieces of one text joined."""
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
