"""The history: the messages of the conversation, as a model reads them and as the page shows them."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Sequence
from typing import Any

from examples.assistant.picture import data_url

MAX_MESSAGES = 24  # that a model reads
MAX_PICTURES = 2  # the newest, of those messages
PLACEHOLDER = "(a photo that is not shown here)"

Message = dict[str, Any]


class History:
    """Keep messages in OpenAI's format, in a database. The newest conversation is the present one."""

    def __init__(self, database: sqlite3.Connection) -> None:
        self._database = database
        self._conversation = database.execute("SELECT coalesce(max(conversation), 1) FROM messages").fetchone()[0]

    def clear(self) -> None:
        """Begin a new conversation; the old one stays in the database."""
        if self._rows():
            self._conversation += 1

    def add(self, messages: Sequence[Message], jpeg: bytes | None = None) -> int | None:
        """Add messages, all or none, and the picture of the first. Return the picture's id."""
        with self._database:  # one transaction
            self._database.execute("BEGIN")
            picture = None
            if jpeg is not None:
                picture = self._database.execute("INSERT INTO pictures (jpeg) VALUES (?)", (jpeg,)).lastrowid
            for i, message in enumerate(messages):
                row = (self._conversation, json.dumps(message), None if i else picture)
                self._database.execute("INSERT INTO messages (conversation, message, picture) VALUES (?, ?, ?)", row)
        return picture

    def picture(self, id: int) -> bytes | None:
        """Return a picture as JPEG."""
        row = self._database.execute("SELECT jpeg FROM pictures WHERE id = ?", (id,)).fetchone()
        return row and row[0]

    def prompt(self, images: bool) -> list[Message]:
        """Return the last messages for a model, which reads the newest pictures if it takes images."""
        rows = self._rows()[-MAX_MESSAGES:]
        while rows and rows[0][0]["role"] != "user":  # a tool's result without its call would be refused
            rows.pop(0)
        pictures = [picture for _, picture in rows if picture is not None]
        seen = set(pictures[-MAX_PICTURES:] if images else ())
        return [self._for_model(message, picture, seen) for message, picture in rows]

    def _for_model(self, message: Message, picture: int | None, seen: set[int]) -> Message:
        message = {key: value for key, value in message.items() if key not in ("model", "stopped")}
        if picture is None:
            return message
        text = message["content"]
        if picture not in seen:
            return message | {"content": f"{PLACEHOLDER} {text}".strip()}
        url = data_url(self.picture(picture) or b"")
        parts = [{"type": "image_url", "image_url": {"url": url}}]
        return message | {"content": parts + ([{"type": "text", "text": text}] if text else [])}

    def shown(self) -> list[dict[str, Any]]:
        """Return the conversation for the page: each tool call with its result."""
        rows = self._rows()
        results = {m["tool_call_id"]: m["content"] for m, _ in rows if m["role"] == "tool"}
        return [
            {
                "role": message["role"], "text": message["content"] or "", "picture": picture,
                "model": message.get("model", ""), "stopped": message.get("stopped", False),
                "calls": [shown_call(call, results) for call in message.get("tool_calls", ())],
            }
            for message, picture in rows if message["role"] != "tool"
        ]  # fmt: skip

    def _rows(self) -> list[tuple[Message, int | None]]:
        query = "SELECT message, picture FROM messages WHERE conversation = ? ORDER BY id"
        return [(json.loads(text), picture) for text, picture in self._database.execute(query, (self._conversation,))]


def shown_call(call: dict[str, Any], results: dict[str, str]) -> dict[str, Any]:
    """Return a tool call for the page."""
    function = call["function"]
    return {
        "id": call["id"], "name": function["name"], "arguments": function["arguments"],
        "result": results.get(call["id"], ""),
    }  # fmt: skip
