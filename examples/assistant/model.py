"""The connection to a model behind any server of OpenAI's API: `dovetail serve`, or another."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

TIMEOUT = httpx.Timeout(300.0, connect=5.0)
MAX_TOKENS = 512  # of one answer


class ModelError(Exception):
    """Say, in a sentence for the user, why a model did not answer."""


@dataclass(frozen=True)
class ModelChoice:
    """Describe a model of the page's switch.

    Attributes:
        label: Its name in the switch, such as small.
        url: The server's base URL, such as http://127.0.0.1:8000.
        name: The model's name in requests; empty: the first that the server lists.
        key: The server's API key.
        images: Whether it reads images; None: what the server's list says.
        tool_choice: What the first request of a turn asks for: auto, or required for a model that rarely calls tools
            by itself.
    """

    label: str
    url: str
    name: str = ""
    key: str = field(default="", repr=False)
    images: bool | None = None
    tool_choice: str = "auto"


@dataclass
class Answer:
    """Collect the pieces of a streamed message."""

    text: str = ""
    finish_reason: str = ""
    calls: dict[int, dict[str, str]] = field(default_factory=dict)

    def add(self, chunk: dict[str, Any]) -> str:
        """Add a chunk and return its text."""
        text = ""
        for choice in chunk.get("choices") or ():
            delta = choice.get("delta") or {}
            text += delta.get("content") or ""
            for piece in delta.get("tool_calls") or ():
                self._add_call(piece)
            self.finish_reason = choice.get("finish_reason") or self.finish_reason
        self.text += text
        return text

    def _add_call(self, piece: dict[str, Any]) -> None:
        call = self.calls.setdefault(piece.get("index") or 0, {"id": "", "name": "", "arguments": ""})
        function = piece.get("function") or {}
        call["id"] = piece.get("id") or call["id"]
        call["name"] = function.get("name") or call["name"]
        call["arguments"] += function.get("arguments") or ""


class Model:
    """Ask one model."""

    def __init__(self, choice: ModelChoice, client: httpx.AsyncClient) -> None:
        self.choice, self._client = choice, client
        self._url = choice.url.rstrip("/").removesuffix("/v1") + "/v1"
        self._headers = {"authorization": f"Bearer {choice.key}"} if choice.key else {}

    async def describe(self) -> dict[str, Any]:
        """Return what the page shows of the model: its name, and why it cannot answer or read images."""
        found: dict[str, Any] = {"label": self.choice.label, "name": self.choice.name, "error": "", "no_images": ""}
        try:
            entry = await self._entry()
        except ModelError as error:
            return found | {"error": str(error), "no_images": str(error)}
        name = str(entry.get("id", ""))
        return found | {"name": name, "no_images": "" if self._reads_images(entry) else f"{name} does not read images."}

    async def stream(
        self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]], tool_choice: str, answer: Answer
    ) -> AsyncIterator[str]:
        """Yield the text of the next message as it comes, and collect the whole message in `answer`."""
        body = {
            "model": str((await self._entry()).get("id", "")), "messages": list(messages), "tools": list(tools),
            "tool_choice": tool_choice, "stream": True, "max_tokens": MAX_TOKENS,
        }  # fmt: skip
        try:
            async with self._client.stream(
                "POST", f"{self._url}/chat/completions", json=body, headers=self._headers, timeout=TIMEOUT
            ) as reply:
                if reply.status_code != 200:
                    raise ModelError(self._refusal(reply.status_code, await reply.aread()))
                async for chunk in _chunks(reply):
                    if "error" in chunk:
                        raise ModelError(f"The {self.choice.label} model failed: {_message(chunk)}")
                    if text := answer.add(chunk):
                        yield text
        except httpx.HTTPError as error:
            raise self._unreachable(error) from None
        if not answer.finish_reason:
            raise ModelError(f"The {self.choice.label} model's answer broke off.")

    async def _entry(self) -> dict[str, Any]:
        """Return the model's entry of the server's list."""
        try:
            reply = await self._client.get(f"{self._url}/models", headers=self._headers, timeout=5.0)
        except httpx.HTTPError as error:
            raise self._unreachable(error) from None
        try:
            listed = [entry for entry in reply.json()["data"] if self.choice.name in ("", entry["id"])]
        except (ValueError, KeyError, TypeError):
            raise ModelError(self._refusal(reply.status_code, reply.content)) from None
        if not listed:
            raise ModelError(f"The server at {self.choice.url} has no model {self.choice.name}.")
        return listed[0]

    def _reads_images(self, entry: dict[str, Any]) -> bool:
        if self.choice.images is not None:
            return self.choice.images
        listed = entry.get("input_modalities") or (entry.get("architecture") or {}).get("input_modalities")
        return "image" in (listed or ())

    def _unreachable(self, error: httpx.HTTPError) -> ModelError:
        if isinstance(error, httpx.TimeoutException):
            return ModelError(f"The {self.choice.label} model does not answer in time.")
        return ModelError(
            f"The {self.choice.label} model's server at {self.choice.url} does not answer. Is it running?"
        )

    def _refusal(self, status: int, body: bytes) -> str:
        try:
            said = _message(json.loads(body))
        except ValueError:
            said = body[:200].decode(errors="replace")
        return f"The {self.choice.label} model's server refused the request ({status}): {said}"


async def _chunks(reply: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    """Yield the JSON objects of a stream of server-sent events."""
    async for line in reply.aiter_lines():
        if not line.startswith("data:") or line[5:].strip() == "[DONE]":
            continue
        try:
            yield json.loads(line[5:])
        except ValueError:
            raise ModelError("The model's server sent an event that is not JSON.") from None


def _message(body: Any) -> str:
    error = body.get("error") if isinstance(body, dict) else None
    return str(error.get("message", error) if isinstance(error, dict) else error or body)[:500]
