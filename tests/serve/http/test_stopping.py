"""How a server stops: it drains, reports it, and ends the remaining streams with an error."""

from __future__ import annotations

import json
import logging
import signal
import threading
import time

import httpx
import pytest
from serve.servers import Script, running

from dovetail.serve.config import ServerLimits

pytestmark = pytest.mark.slow

BODY = {"prompt": "Hi", "stream": True, "max_tokens": 500}


@pytest.fixture
def server(tokenizer):
    """Answers do not end by themselves until `server.engine.delay` is 0."""

    async def engine():
        found = Script(tokenizer, delay=0.05)
        found.texts = ["word " * 450] * 9
        return found

    with running(engine, tokenizer, limits=ServerLimits(drain_timeout=60.0)) as found:
        yield found


class Stream(threading.Thread):
    """A client that reads its stream to the end."""

    def __init__(self, server):
        super().__init__(daemon=True)
        self._url, self.events, self.begun = f"{server.url}/v1/completions", [], threading.Event()
        self.start()
        assert self.begun.wait(30)

    def run(self) -> None:
        with httpx.stream("POST", self._url, json=BODY, timeout=60) as answer:
            for line in answer.iter_lines():
                self.begun.set()
                if line.startswith("data: {"):
                    self.events.append(json.loads(line[6:]))


def until(condition, seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.01)


def test_while_it_drains_ready_is_503_and_streams_go_on(server, caplog):
    stream = Stream(server)
    with httpx.Client(base_url=server.url) as balancer, caplog.at_level(logging.INFO, "dovetail"):
        assert balancer.get("/ready").status_code == 200
        server.server.handle_exit(signal.SIGTERM, None)
        until(lambda: server.app.state.service.inflight.draining)
        for path, ask in ("/ready", httpx.get), ("/v1/completions", lambda url: httpx.post(url, json=BODY)):
            answer = ask(server.url + path)  # by a connection of its own: the server still listens
            assert answer.status_code == 503 and answer.json()["error"]["code"] == "stopping"
            assert answer.headers["connection"] == "close" and answer.headers["retry-after"]
        assert balancer.get("/health").status_code == 200, "the engine lives"
        before = len(stream.events)
        until(lambda: len(stream.events) > before)
        server.engine.delay = 0.0
        stream.join(30)
        assert stream.events[-1]["choices"][0]["finish_reason"] in ("stop", "length"), "it was not cut off"
        until(lambda: "stopped after" in caplog.text)
    assert "stopping: 1 running requests have 60 s;" in caplog.text
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{server.url}/ready")


def test_a_second_signal_ends_streams_with_an_error_event(server, caplog):
    stream = Stream(server)
    with caplog.at_level(logging.INFO, "dovetail"):
        for _ in range(2):
            server.server.handle_exit(signal.SIGINT, None)
            until(lambda: server.app.state.service.inflight.draining)
        stream.join(30)
        until(lambda: "stopped after" in caplog.text)
    assert stream.events[-1]["error"]["code"] == "stopping" and len(stream.events) > 1
    assert "1 requests ended with an error" in caplog.text
    assert not [record for record in caplog.records if record.exc_info], "a traceback was logged"
