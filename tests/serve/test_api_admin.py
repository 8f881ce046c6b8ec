"""The server's controls over HTTP, on a real engine process: it is paused, put to sleep, profiled, given new weights;
and it dies, or hangs, and stands afterwards where it stood before."""

from __future__ import annotations

import os
import shutil
import signal
import threading
import time

import httpx
import pytest
from engine.engines import OPTIONS
from reference_models import reference
from serve.servers import hanging, running

from dovetail.io.load import load, save
from dovetail.serve.client import EngineClient
from dovetail.serve.supervisor import Limits

pytestmark = pytest.mark.slow  # the engine is started several times

ASK = dict(prompt=[5, 6, 7, 8, 9, 10, 11, 12], max_tokens=8, temperature=0, ignore_eos=True, return_token_ids=True)
STEP_SECONDS = 1.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("admin")


@pytest.fixture(scope="module")
def other(folder):
    """Other weights for the same model."""
    model = load(reference("llama3.1")[1])
    save(folder / "other", model.config, {**model.params, "embed": model.params["embed"][::-1]}, None)
    return folder / "other"


@pytest.fixture(scope="module")
def server(tokenizer, folder):
    async def engine():
        limits = Limits(backoff=0.05, step_seconds=STEP_SECONDS, deaths=2)
        return await EngineClient.start(reference("llama3.1")[1], OPTIONS, limits=limits)

    options = dict(admin_key="boss", profile_dir=str(folder / "trace"))
    with hanging(folder / "hang"), running(engine, tokenizer, **options) as found:
        yield found


def post(server, path: str, body: dict | None = None, status: int = 200) -> dict:
    headers = {"authorization": "Bearer boss"}
    answer = httpx.post(server.url + path, json={} if body is None else body, headers=headers, timeout=60)
    assert answer.status_code == status, answer.text
    return answer.json()


def tokens(server, **more) -> list[int]:
    return post(server, "/v1/completions", ASK | more)["choices"][0]["token_ids"]


def cached(server) -> int:
    return post(server, "/v1/completions", ASK)["usage"]["prompt_tokens_details"]["cached_tokens"]


def health(server) -> httpx.Response:
    return httpx.get(f"{server.url}/health", timeout=10)


def until(condition, seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.02)


class Asked(threading.Thread):
    """A request under way."""

    def __init__(self, server):
        super().__init__(daemon=True)
        self.server, self.found = server, None
        self.start()

    def run(self):
        self.found = tokens(self.server)

    def answer(self) -> list[int] | None:
        self.join(60)
        return self.found


@pytest.fixture(scope="module")
def first(server):
    return tokens(server)


def test_a_paused_engine_takes_requests_and_answers_later(server, first):
    assert post(server, "/pause") == {"status": "paused"}
    waiting = Asked(server)
    time.sleep(0.3)
    assert waiting.found is None and health(server).status_code == 200
    assert post(server, "/resume") == {"status": "running"}
    assert waiting.answer() == first


@pytest.mark.parametrize("level", [1, 2])
def test_a_sleeping_engine_wakes_with_its_weights_or_new_ones(server, first, level):
    assert post(server, "/sleep", {"level": level}) == {"status": "asleep"}
    assert health(server).json()["sleeping"] == level
    waiting = Asked(server)
    time.sleep(0.2)
    assert waiting.found is None
    assert post(server, "/wake_up") == {"status": "awake"}
    if level == 2:  # it has none: they were dropped
        time.sleep(0.2)
        assert waiting.found is None
        post(server, "/update_weights", {"path": str(reference("llama3.1")[1])})
    assert waiting.answer() == first


def test_the_prefix_cache_is_emptied(server, first):
    assert cached(server) > 0
    assert post(server, "/reset_prefix_cache") == {"status": "empty"}
    assert cached(server) == 0


def test_a_profile_is_written(server, folder):
    assert "start one first" in post(server, "/stop_profile", status=400)["error"]["message"]
    assert post(server, "/start_profile") == {"status": "profiling"}
    tokens(server)
    assert post(server, "/stop_profile") == {"status": "written"}
    assert list((folder / "trace").rglob("*.xplane.pb"))


def test_new_weights_outlive_the_engine(server, first, other):
    assert post(server, "/update_weights", {"path": str(other)}) == {"weights_version": 2}
    second = tokens(server)
    assert second != first and health(server).json()["weights_version"] == 2
    refused = post(server, "/update_weights", {"path": "nowhere"}, status=400)["error"]
    assert "nowhere" in refused["message"] and health(server).json()["weights_version"] == 2
    post(server, "/pause")
    os.kill(server.engine.info.pid, signal.SIGKILL)
    until(lambda: health(server).status_code == 503, 5)
    assert "started again" in health(server).json()["error"]["message"]
    until(lambda: health(server).status_code == 200)
    assert health(server).json()["weights_version"] == server.engine.info.weights_version == 2
    waiting = Asked(server)
    time.sleep(0.3)
    assert waiting.found is None, "it was paused, and is"
    post(server, "/resume")
    assert waiting.answer() == second


def test_a_step_that_hangs_is_a_death(server, folder):
    """Streams end with an error, health is red, a new engine takes over."""
    expected, restarts = tokens(server), server.engine.restarts
    body = ASK | {"stream": True, "max_tokens": 200}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as stream:
        lines = stream.iter_lines()
        next(lines)
        (folder / "hang").touch()
        start = time.monotonic()
        rest = list(lines)
    took = time.monotonic() - start
    assert "the engine has stopped" in rest[-2] and STEP_SECONDS / 2 < took < STEP_SECONDS * 5, (took, rest[-2:])
    assert health(server).status_code == 503
    (folder / "hang").unlink()
    until(lambda: health(server).status_code == 200)
    assert tokens(server) == expected and server.engine.restarts == restarts + 1


def test_a_process_that_says_nothing_hangs_too(server):
    """Not even its other threads run."""
    restarts = server.engine.restarts
    os.kill(server.engine.info.pid, signal.SIGSTOP)
    until(lambda: server.engine.trouble is not None, STEP_SECONDS * 5)
    until(lambda: health(server).status_code == 200)
    assert server.engine.restarts == restarts + 1


def test_older_weights_are_not_served_where_the_last_are_lost(server, other):
    tokens(server)
    shutil.rmtree(other)
    os.kill(server.engine.info.pid, signal.SIGKILL)
    until(lambda: server.engine.state == "failed")
    answer = health(server)
    assert answer.status_code == 503 and "cannot be loaded again" in answer.json()["error"]["message"]
    assert str(other) not in answer.text
    post(server, "/v1/completions", ASK, status=503)
