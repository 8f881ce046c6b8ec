"""The model that answers in `dovetail chat`: an engine in this process, or a server."""

from __future__ import annotations

import signal
import threading
from collections.abc import Generator, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from dovetail.cli.remote import DONE, ServerError, client_options, explained, read_event, read_models, refusal

Messages = list[dict[str, Any]]
Pieces = Generator[str, None, None]
ADAPTER = "adapter"  # name of the adapter whose folder was given
SILENCE = 600.0  # seconds without data; ctrl-C stops earlier


class Thought(str):
    """Mark a piece of reasoning, which is shown but is not part of the answer."""


@dataclass(frozen=True)
class ChatOptions:
    """Sampling options of the chat."""

    temperature: float
    max_tokens: int | None  # None: up to the context length


class Partner(Protocol):
    """Define the interface of a model to chat with."""

    finish_reason: str | None  # of the last answer

    def describe(self) -> str:
        """Return one line about the model."""
        ...

    def answer(self, messages: Messages, options: ChatOptions) -> Pieces:
        """Yield the next message in pieces; closing the iterator aborts it.

        Raises:
            ServerError: The server failed.
            UserError: The messages do not fit the model.
        """
        ...

    def close(self) -> None:
        """Release the connection."""
        ...


class Local:
    """Answer with an engine in this process."""

    def __init__(self, model: str, **engine: Any):
        from dovetail.core.reporter import bar
        from dovetail.engine.llm import LLM
        from dovetail.engine.options import EngineOptions
        from dovetail.io.adapter_folder import base_of

        base, self._adapter = base_of(model), None
        if base:  # an adapter's folder: load its base and the adapter
            self._adapter = ADAPTER
            engine["lora_modules"] = {**engine.get("lora_modules", {}), ADAPTER: model}
        options = EngineOptions.of({"max_num_seqs": 1, "seed": None} | engine)
        with bar() as progress:
            self._llm = LLM.from_options(base or model, options, progress=progress)
        self._model, self.finish_reason = f"{model} on {base}" if base else model, None

    def describe(self) -> str:
        """Return the model and its start time."""
        return f"{self._model}, in this process, started in {self._llm.start_seconds:.1f} s"

    def answer(self, messages: Messages, options: ChatOptions) -> Pieces:
        """Yield the text of the next message."""
        from dovetail.engine.request.params import SamplingParams, check_room

        params = SamplingParams(temperature=options.temperature, max_tokens=options.max_tokens)
        prompt = self._llm.chat_prompt(messages, self._adapter)
        count = len(prompt if isinstance(prompt, list) else prompt.tokens)
        check_room("max_tokens", options.max_tokens, count, self._llm.engine.scheduler.config.context)
        self.finish_reason = None
        with _between_steps() as interrupted, closing(self._llm.stream(prompt, params, self._adapter)) as updates:  # type: ignore[type-var]
            for update in updates:
                if update.text:
                    yield update.text
                if interrupted.is_set():
                    raise KeyboardInterrupt
                if update.finished:
                    self.finish_reason = update.finish_reason

    def close(self) -> None:
        """Do nothing: there is no connection."""


class Remote:
    """Answer with an OpenAI-compatible server."""

    def __init__(self, url: str, model: str, api_key: str):
        import httpx

        self._client = httpx.Client(**client_options(url, api_key, SILENCE))
        self._url, self._model, self.finish_reason = url, model, None

    def describe(self) -> str:
        """Return the model and the server's address."""
        return f"{self._name()} at {self._url}"

    def answer(self, messages: Messages, options: ChatOptions) -> Pieces:
        """Yield the text and reasoning of the next message."""
        body = {"model": self._name(), "messages": messages, "stream": True, "temperature": options.temperature}
        if options.max_tokens is not None:
            body["max_tokens"] = options.max_tokens
        self.finish_reason = None
        # Leaving early closes the connection, and the server stops.
        with explained(self._url), self._client.stream("POST", "/v1/chat/completions", json=body) as response:
            if response.is_error:
                response.read()
                raise refusal(response)
            for line in response.iter_lines():
                event = read_event(line)
                if event is DONE:
                    return
                yield from self._pieces(event)
        raise ServerError("cut off", "the server closed the connection before the end of the answer")

    def _pieces(self, event: Any) -> Iterator[str]:
        for choice in (event or {}).get("choices", ()):
            delta = choice.get("delta") or {}
            if thought := delta.get("reasoning_content") or delta.get("reasoning"):
                yield Thought(thought)
            if delta.get("content"):
                yield delta["content"]
            self.finish_reason = choice.get("finish_reason") or self.finish_reason

    def _name(self) -> str:
        """Return the given model or the server's first, asked for when needed: the server may start later."""
        if not self._model:
            with explained(self._url):
                self._model = read_models(self._client.get("/v1/models"))[0]["id"]
        return self._model

    def close(self) -> None:
        """Close the connection."""
        self._client.close()


@contextmanager
def _between_steps() -> Iterator[threading.Event]:
    """Let Ctrl-C set an event, because an exception inside a step would leave the engine's state half updated.

    A second Ctrl-C ends the program: the step may be compiling for long.
    """
    asked = threading.Event()

    def handler(*_: Any) -> None:
        if asked.is_set():
            raise SystemExit(130)
        asked.set()

    before = signal.signal(signal.SIGINT, handler)
    try:
        yield asked
    finally:
        signal.signal(signal.SIGINT, before)
