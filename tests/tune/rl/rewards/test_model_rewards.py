"""The judge reward, with a server that fails in several ways."""

import asyncio
import json
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from refusals import refuses

from dovetail.core.errors import RecipeError
from dovetail.tune.rl.rewards.completion import NoReward
from dovetail.tune.rl.rewards.model_rewards import JudgeReward
from dovetail.tune.rl.rewards.worker import time_limit

pytestmark = pytest.mark.slow


def says(text) -> tuple[int, bytes]:
    return 200, json.dumps({"choices": [{"message": {"role": "assistant", "content": text}}]}).encode()


@contextmanager
def judging(reply):
    """Serve `reply(number, body)`: a status, a body and perhaps headers; None closes the connection."""
    seen, lock, busy = [], threading.Lock(), [0, 0]

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_):
            pass

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            with lock:
                number = len(seen)
                seen.append((self.path, body, self.headers.get("authorization")))
                busy[0] += 1
                busy[1] = max(busy)
            try:
                answer = reply(number, body)
            finally:
                with lock:
                    busy[0] -= 1
            if answer is None:
                return
            status, data, *headers = answer
            try:
                self.send_response(status)
                for name, value in headers:
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(data)
            except OSError:  # it no longer waits
                pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    server.seen, server.busy = seen, busy
    server.url = f"http://127.0.0.1:{server.server_address[1]}/v1"
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def judge(url, prompts=("2+2?",), completions=("4",), columns=None, **settings):
    return asyncio.run(
        JudgeReward(url, "m", **{"wait": 0.01, **settings})(list(prompts), list(completions), **(columns or {}))
    )


def test_the_last_rating_is_scaled_to_one(monkeypatch):
    monkeypatch.setenv("MY_KEY", "k3y")
    with judging(lambda n, body: says("Score: 2? No. It is right.\n**Score: 7.5**")) as server:
        messages = [{"role": "user", "content": "2+2?"}]
        assert judge(server.url, [messages], key="MY_KEY") == [0.75]
    ((path, body, key),) = server.seen
    assert path == "/v1/chat/completions" and key == "Bearer k3y" and body["model"] == "m" and body["temperature"] == 0
    assert "user: 2+2?" in body["messages"][0]["content"] and "{" not in body["messages"][0]["content"]


def test_the_prompt_may_name_columns_and_the_scale_may_differ():
    settings = {"prompt": "{completion} like {answer}? {other} {not here}", "lowest": -1, "highest": 1}
    settings["pattern"] = r"-?\d+"
    assert JudgeReward("http://x", "m", **settings).columns == ("answer", "other")
    with judging(lambda n, body: says(body["messages"][0]["content"])) as server:
        rows = {"answer": ["1", "-1", "5"], "other": ["0", "-1", "5"]}
        found = judge(server.url, [""] * 3, ["{answer}", "b", "c"], rows, **settings)
    assert found[:2] == [0.5, 0.0] and found[2].message == "the judge gave 5, expected -1 to 1"
    assert {body["messages"][0]["content"] for _, body, _ in server.seen} == {
        "{answer} like 1? 0 {not here}", "b like -1? -1 {not here}", "c like 5? 5 {not here}",
    }  # fmt: skip


@pytest.mark.parametrize(
    "trouble",
    [
        (429, b"slow down", ("retry-after", "0.1")),
        (500, b"oops"),
        (503, b""),
        (200, b"<html>"),
        (200, b"{}"),
        (200, b'{"choices": [{"message": {"content": null}}]}'),
        None,
    ],
    ids=["429", "500", "503", "no JSON", "no choices", "no content", "cut"],
)
def test_a_passing_failure_is_retried(trouble):
    with judging(lambda n, body: trouble if n < 2 else says("Score: 10")) as server:
        assert judge(server.url) == [1.0]
    assert len(server.seen) == 3


def test_a_lasting_failure_has_no_reward_but_a_reason():
    with judging(lambda n, body: (500, b"it is \n broken")) as server:
        assert judge(server.url, retries=1) == [NoReward("judge", "the judge answered 500: 'it is broken'")]
        assert len(server.seen) == 2
    with judging(lambda n, body: (401, b"who are you?")) as server:
        assert judge(server.url) == [NoReward("judge", "the judge answered 401: 'who are you?'")]
        assert len(server.seen) == 1, "another try would not help"
    with judging(lambda n, body: says("I would rather not say")) as server:
        assert judge(server.url) == [NoReward("judge", "the judge gave no number: 'I would rather not say'")]
    (found,) = judge(server.url, retries=0)  # it is gone
    assert found.kind == "judge" and "could not be reached" in found.message


def test_rows_fail_independently_and_keep_their_order():
    def reply(n, body):
        text = body["messages"][0]["content"]
        time.sleep(0.05 if text == "0" else 0)
        return (400, b"no") if text == "3" else says(f"Score: {text}")

    with judging(reply) as server:
        found = judge(server.url, [""] * 6, map(str, range(6)), prompt="{completion}", concurrency=2)
    assert found[:3] + found[4:] == [0.0, 0.1, 0.2, 0.4, 0.5] and isinstance(found[3], NoReward)
    assert server.busy[1] <= 2


def test_a_request_that_hangs_is_given_up():
    release = threading.Event()

    def reply(n, body):
        if body["messages"][0]["content"] == "hang":
            release.wait(20)
        return says("Score: 5")

    with judging(reply) as server:
        try:
            rows = ["fine", "hang"]
            slow = judge(server.url, ["", ""], rows, prompt="{completion}", request_seconds=0.2, retries=1)
            with time_limit(1.0):
                late = judge(server.url, ["", ""], rows, prompt="{completion}", request_seconds=60)
        finally:
            release.set()
    assert slow == [0.5, NoReward("judge", "the judge did not answer within 0.2 s")]
    assert late == [0.5, NoReward("time", "the judge did not answer before the time limit of the reward")]


@pytest.mark.parametrize(
    "settings",
    [{"url": "localhost:8000"}, {"prompt": "Good?"}, {"pattern": "("}, {"highest": 0}, {"concurrency": 0}],
)
def test_a_wrong_setting_is_refused(settings):
    with refuses(*settings, RecipeError):
        JudgeReward(**{"url": "http://x", "model": "m", **settings})
