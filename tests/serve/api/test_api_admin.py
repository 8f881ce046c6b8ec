"""The server's controls over HTTP on a real engine process: pause, sleep, profiles, new weights.

After a death or a hang, the restarted engine is in the same state.
"""

from __future__ import annotations

import json
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

from dovetail.engine.options import EngineOptions
from dovetail.io.load import load, save
from dovetail.serve.remote.client import EngineClient
from dovetail.serve.remote.supervisor import RestartLimits

pytestmark = pytest.mark.slow  # the engine is started several times

ASK = dict(prompt=[5, 6, 7, 8, 9, 10, 11, 12], max_tokens=8, temperature=0, ignore_eos=True, return_token_ids=True)
LONG = 200
STEP_SECONDS = 5.0  # a normal step takes longer than 1 on a machine that gets half of its cores


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
        limits = RestartLimits(backoff=0.05, step_seconds=STEP_SECONDS, deaths=2)
        options = EngineOptions(**OPTIONS, max_decode_steps=1, seed=None)
        return await EngineClient.start(reference("llama3.1")[1], options, limits=limits)

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


def ready(server) -> httpx.Response:
    return httpx.get(f"{server.url}/ready", timeout=10)


def rests(server, why: str) -> bool:
    """Whether a request is refused at once because the engine sleeps or is paused, and /ready gives the same reason;
    the engine is alive meanwhile."""
    answer = httpx.post(f"{server.url}/v1/completions", json=ASK, timeout=10)
    readiness = ready(server)
    assert answer.status_code == readiness.status_code == 503 and health(server).status_code == 200, answer.text
    assert answer.headers["retry-after"] == readiness.headers["retry-after"] == "5"
    assert answer.json() == readiness.json()
    return why in readiness.json()["error"]["message"]


def until(condition, seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.02)


class Asked(threading.Thread):
    """A running request: its first token has arrived, and the others arrive slowly until the answer is read."""

    def __init__(self, server, folder):
        super().__init__(daemon=True)
        self.server, self.found, self.begun = server, [], threading.Event()
        self.slow = folder / "hang.slow"
        self.slow.touch()
        self.start()
        assert self.begun.wait(60)

    def run(self):
        body = ASK | {"stream": True, "max_tokens": LONG}
        with httpx.stream("POST", f"{self.server.url}/v1/completions", json=body, timeout=60) as stream:
            for line in stream.iter_lines():
                if line.startswith("data: {"):
                    self.found += json.loads(line[6:])["choices"][0]["token_ids"]
                    self.begun.set()

    def has_stopped(self) -> bool:
        """Return whether no more tokens arrive for a while although the request is unfinished."""
        before = len(self.found)
        time.sleep(0.2)
        return len(self.found) == before < LONG

    def answer(self) -> list[int]:
        self.slow.unlink()
        self.join(60)
        return self.found


@pytest.fixture(scope="module")
def first(server):
    return tokens(server)


@pytest.fixture(scope="module")
def long(server):
    return tokens(server, max_tokens=LONG)


def test_a_paused_engine_keeps_requests_and_refuses_new_ones(server, folder, long):
    under_way = Asked(server, folder)
    assert post(server, "/pause") == {"status": "paused"}
    assert rests(server, "the engine is paused until /resume") and under_way.has_stopped()
    assert post(server, "/resume") == {"status": "running"}
    assert ready(server).status_code == 200 and under_way.answer() == long


@pytest.mark.parametrize("level", [1, 2])
def test_a_sleeping_engine_wakes_with_its_weights_or_new_ones(server, folder, first, long, level):
    under_way = Asked(server, folder)
    assert post(server, f"/sleep?level={level}") == {"status": "asleep"}
    assert health(server).json()["sleeping"] == level
    assert rests(server, f"the engine sleeps (level {level}) until /wake_up") and under_way.has_stopped()
    assert post(server, "/wake_up") == {"status": "awake"}
    if level == 2:  # its weights were dropped
        assert rests(server, "/update_weights loads new ones") and under_way.has_stopped()
        post(server, "/update_weights", {"path": str(reference("llama3.1")[1])})
    assert ready(server).status_code == 200
    assert under_way.answer() == long and tokens(server) == first


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


@pytest.mark.thorough
def test_new_weights_outlive_the_engine(server, first, other):
    version = health(server).json()["weights_version"] + 1
    assert post(server, "/update_weights", {"path": str(other)}) == {"weights_version": version}
    second = tokens(server)
    assert second != first and health(server).json()["weights_version"] == version
    refused = post(server, "/update_weights", {"path": "nowhere"}, status=400)["error"]
    assert "nowhere" in refused["message"] and refused["param"] == "path"
    assert health(server).json()["weights_version"] == version
    post(server, "/pause")
    os.kill(server.engine.info.pid, signal.SIGKILL)
    until(lambda: health(server).status_code == 503, 5)
    assert "started again" in health(server).json()["error"]["message"]
    until(lambda: health(server).status_code == 200)
    assert health(server).json()["weights_version"] == server.engine.info.weights_version == version
    assert rests(server, "paused"), "it was, and is"
    post(server, "/resume")
    assert tokens(server) == second


def test_a_step_that_hangs_is_a_death(server, folder):
    """Streams end with an error, /health is 503, a new engine takes over."""
    expected, restarts = tokens(server), server.engine.restarts
    body = ASK | {"stream": True, "max_tokens": 200}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as stream:
        lines = stream.iter_lines()
        next(lines)
        (folder / "hang").touch()
        start = time.monotonic()
        rest = list(lines)
    took = time.monotonic() - start
    assert "the engine has stopped" in rest[-2] and STEP_SECONDS / 2 < took < STEP_SECONDS * 60, (took, rest[-2:])
    assert health(server).status_code == 503
    (folder / "hang").unlink()
    until(lambda: health(server).status_code == 200)
    assert tokens(server) == expected and server.engine.restarts == restarts + 1


@pytest.mark.thorough
def test_a_process_that_does_not_answer_hangs_too(server):
    """Not even its other threads run."""
    restarts = server.engine.restarts
    os.kill(server.engine.info.pid, signal.SIGSTOP)
    until(lambda: server.engine.trouble is not None, STEP_SECONDS * 60)
    until(lambda: health(server).status_code == 200)
    assert server.engine.restarts == restarts + 1


@pytest.mark.thorough
def test_an_engine_that_lost_its_weights_is_not_served(server, other):
    tokens(server)
    shutil.rmtree(other)
    os.kill(server.engine.info.pid, signal.SIGKILL)
    until(lambda: server.engine.state == "failed")
    answer = health(server)
    assert answer.status_code == 503 and "cannot be loaded again" in answer.json()["error"]["message"]
    assert str(other) not in answer.text
    post(server, "/v1/completions", ASK, status=503)
