"""Examples that are longer than a row: they lose their oldest turns, are cut at their end, or are left out.

An exchange is a user's message and all that follows it up to the next one. The system message stays, and so does the
last exchange; both sides of a preference lose the same ones.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from dovetail.data.examples import Chat, Text
from dovetail.data.trained_tokens import ExampleEncoder, Trained

WHOLE, SHORTENED, CUT, LEFT_OUT = "whole", "shortened", "cut", "left out"
Sides = Sequence[Chat | Text]


class Fitted(NamedTuple):
    documents: list[list[Trained]]  # of each side
    outcome: str


def fit(encoder: ExampleEncoder, sides: Sides, length: int, overlong: str) -> Fitted:
    """The documents of an example in at most `length` tokens each; those of a preference together."""
    whole = [encoder.encode(side) for side in sides]
    if fits(whole, length):
        return Fitted(whole, WHOLE)
    if overlong == "skip":
        return Fitted([], LEFT_OUT)
    if overlong == "turns" and (shorter := _fewer_turns(sides)):
        encoded = {0: whole}

        def fitting(dropped: int) -> bool:
            encoded[dropped] = [encoder.encode(side) for side in shorter[dropped - 1]]
            return fits(encoded[dropped], length)

        # Fewer turns are fewer tokens, so the least number to drop is found by halving.
        dropped = bisect_left(range(1, len(shorter) + 1), True, key=fitting) + 1
        if dropped <= len(shorter):
            return Fitted(encoded[dropped], SHORTENED)
        whole = [encoder.encode(side) for side in shorter[-1]]
    return _cut(whole, length)


def fits(documents: list[list[Trained]], length: int) -> bool:
    longest = [max((len(document.tokens) for document in side), default=0) for side in documents]
    return sum(longest) <= length


def _fewer_turns(sides: Sides) -> list[Sides]:
    """The example without its first exchange, without its first two, ..; empty where there is none to lose."""
    chats = [side for side in sides if isinstance(side, Chat)]
    if len(chats) < len(sides):
        return []
    each = [_without_oldest(chat) for chat in chats]
    return [list(one) for one in zip(*each, strict=False)]


def _without_oldest(chat: Chat) -> list[Chat]:
    roles = [message["role"] for message in chat.messages]
    head = next((i for i, role in enumerate(roles) if role not in ("system", "developer")), 0)
    # What is trained must still be there, with the user's message that it answers.
    last = chat.first - 1 if chat.first else max((i for i, role in enumerate(roles) if role == "assistant"), default=0)
    starts = [i for i, role in enumerate(roles) if role == "user" and head < i <= last]
    return [
        replace(chat, messages=chat.messages[:head] + chat.messages[i:], first=max(0, chat.first - (i - head)))
        for i in starts
    ]


def _cut(documents: list[list[Trained]], length: int) -> Fitted:
    """Each at its end. Of two sides the shorter keeps half of the row or what it needs, and the longer has the rest."""
    room = [length]
    if len(documents) == 2:
        sizes = [max((len(document.tokens) for document in side), default=0) for side in documents]
        shorter = min(*sizes, length // 2)
        room = [min(size, length - shorter) for size in sizes] if min(sizes) == shorter else [length // 2] * 2
    cut = [
        [document for document in (Trained(t[:most], m[:most]) for t, m in side) if document.teaches]
        for side, most in zip(documents, room, strict=True)
    ]
    return Fitted(cut, CUT) if all(cut) else Fitted([], LEFT_OUT)
