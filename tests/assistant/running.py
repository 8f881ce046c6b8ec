"""The assistant in this process on a free port, in front of a model whose answers a test writes."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from fake_openai import FakeOpenAI, Reply, serving

from examples.assistant.app import create_app
from examples.assistant.foods import BUNDLED
from examples.assistant.model import ModelChoice
from examples.assistant.server import AssistantServer

SEES = [{"id": "sees", "input_modalities": ["text", "image"]}]
BLIND = [{"id": "blind"}]


def calls(*made: tuple[str, Any]) -> Reply:
    """Return an answer of tool calls, each streamed in two pieces; arguments that are text are sent as they are."""
    pieces = []
    for i, (name, arguments) in enumerate(made):
        text = arguments if isinstance(arguments, str) else json.dumps(arguments)
        half = len(text) // 2
        first = {"index": i, "id": f"call_{i}_{name}", "type": "function", "function": {"name": name, "arguments": ""}}
        pieces += [first, *({"index": i, "function": {"arguments": part}} for part in (text[:half], text[half:]))]
    return Reply([(0.0, {"tool_calls": [piece]}) for piece in pieces], finish_reason="tool_calls")


@dataclass
class Running:
    """The assistant's address, its models, and a client that its own page could be."""

    url: str
    fake: FakeOpenAI
    small: FakeOpenAI
    database: Path
    client: httpx.Client

    def ask(self, text: str = "", model: str = "large", picture: str = "") -> list[dict[str, Any]]:
        """Send a message and return the events of its answer."""
        reply = self.client.post("/api/messages", json={"text": text, "model": model, "picture": picture})
        assert reply.status_code == 200, reply.text
        return [json.loads(line[6:]) for line in reply.text.splitlines() if line.startswith("data: ")]

    def state(self) -> dict[str, Any]:
        return self.client.get("/api/state").json()


@contextmanager
def assistant(folder: Path, replies: Sequence[Reply], foods: Path = BUNDLED) -> Iterator[Running]:
    """Run the assistant; `replies` are the answers of its large model, which reads images, one per request."""
    with ExitStack() as stack:
        fake = stack.enter_context(serving(lambda number: replies[number], models=SEES))
        small = stack.enter_context(serving(lambda _: Reply([(0.0, "small")]), models=BLIND))
        models = [ModelChoice("large", fake.url), ModelChoice("small", small.url)]
        app = create_app(models, folder / "diary.db", foods)
        server = AssistantServer(app, "127.0.0.1", 0)
        socket = server.config.bind_socket()
        thread = threading.Thread(target=server.run, args=([socket],))
        thread.start()
        while not server.started and thread.is_alive():  # a connection before that is refused
            time.sleep(0.01)
        url = f"http://127.0.0.1:{socket.getsockname()[1]}"
        client = stack.enter_context(httpx.Client(base_url=url, timeout=30.0, trust_env=False))
        try:
            yield Running(url, fake, small, folder / "diary.db", client)
        finally:
            server.should_exit = True
            thread.join()
            socket.close()
