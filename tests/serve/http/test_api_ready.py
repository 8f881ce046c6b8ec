"""/ready says whether requests are answered; those that would wait get 503 with the reason and a Retry-After."""

from __future__ import annotations

import httpx
import pytest
from later import later
from serve.servers import MODEL, Script, openai_refuses, running

anthropic = later("anthropic")
openai = later("openai")

pytestmark = pytest.mark.slow

BOSS = {"authorization": "Bearer boss"}
ASKED = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}]},
    "/v1/completions": {"prompt": "Hi"},
    "/v1/responses": {"input": "Hi"},
    "/v1/messages": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4},
    "/v1/embeddings": {"input": "Hi"},
    "/v1/score": {"input": "Hi"},
}


@pytest.fixture(scope="module")
def server(tokenizer):
    async def engine():
        return Script(tokenizer)

    with running(engine, tokenizer, admin_key="boss", api_keys=("key",)) as found:
        yield found


@pytest.fixture(autouse=True)
def well(server):
    server.engine.called = []
    yield
    server.engine.rest = server.engine.trouble = None


def ready(server) -> httpx.Response:
    return httpx.get(f"{server.url}/ready")  # a load balancer has no key


@pytest.mark.parametrize(("path", "stream"), [*((path, False) for path in ASKED), ("/v1/chat/completions", True)])
def test_a_request_that_would_wait_gets_503_and_why(server, path, stream):
    body, headers = ASKED[path] | ({"stream": True} if stream else {}), {"authorization": "Bearer key"}
    assert ready(server).json()["status"] == "ready"
    for name, code in ("rest", "not_ready"), ("trouble", "engine_unavailable"):
        setattr(server.engine, name, f"it has {name}")
        answer = httpx.post(server.url + path, json=body, headers=headers)
        assert answer.status_code == 503 and answer.headers["retry-after"] == "5", answer.text
        assert f"it has {name}" in answer.json()["error"]["message"]
        answer = ready(server)
        assert answer.status_code == 503 and answer.headers["retry-after"] == "5"
        assert answer.json()["error"] | {"type": 0} == {
            "message": f"it has {name}", "type": 0, "param": None, "code": code,
        }  # fmt: skip
        lives = httpx.get(f"{server.url}/health").status_code
        assert lives == (200 if name == "rest" else 503), "an engine that sleeps or is paused is alive"
    server.engine.rest = server.engine.trouble = None
    assert httpx.post(server.url + path, json=body, headers=headers).status_code == 200
    assert ready(server).status_code == 200


def test_official_clients_raise_on_503(server):
    """The clients retry by themselves after the time in Retry-After."""
    server.engine.rest = "the engine is paused until /resume"
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="key", max_retries=0) as client:
        with openai_refuses(openai.InternalServerError, code="not_ready") as error:
            client.completions.create(model=MODEL, prompt="Hi")
        assert error.value.status_code == 503 and error.value.response.headers["retry-after"] == "5"
    with (
        anthropic.Anthropic(base_url=server.url, api_key="key", max_retries=0) as client,
        pytest.raises(anthropic.InternalServerError),
    ):
        client.messages.create(model=MODEL, max_tokens=4, messages=[{"role": "user", "content": "Hi"}])


# --- the controls' arguments ------------------------------------------------------------------------------------------


def control(server, path: str, status: int = 200, **more):
    answer = httpx.post(server.url + path, **{"headers": BOSS} | more)
    assert answer.status_code == status, answer.text
    return answer.json()


def test_arguments_come_in_the_query_or_in_the_body(server):
    control(server, "/sleep?level=2")
    control(server, "/sleep", json={"level": 2})
    control(server, "/sleep")
    control(server, "/update_weights?path=12")
    control(server, "/pause?mode=keep&clear_cache=false")
    control(server, "/resume")
    assert server.engine.called == [
        ("sleep", {"level": 2}), ("sleep", {"level": 2}), ("sleep", {"level": 1}), ("update_weights", {"path": "12"}),
        ("pause",), ("resume",),
    ]  # fmt: skip


def test_the_order_of_arguments_does_not_matter(server):
    control(server, "/update_weights?reset_prefix_cache=true&path=/new")
    control(server, "/update_weights?path=/new&reset_prefix_cache=true")
    control(server, "/update_weights", json={"reset_prefix_cache": True, "path": "/new"})
    control(server, "/update_weights?reset_prefix_cache=true", json={"path": "/new"})
    assert server.engine.called == [("update_weights", {"path": "/new"})] * 4
    server.engine.called = []
    control(server, "/v1/load_lora_adapter", json={"wait": False, "lora_path": "/a", "lora_name": "a"})
    control(server, "/v1/load_lora_adapter", json={"lora_name": "a", "lora_path": "/a", "wait": False})
    assert server.engine.called == [("load_adapter", {"name": "a", "path": "/a", "wait": False})] * 2


WRONG = {
    "/sleep?level=3": ("level", "less than or equal to 2; got 3"),
    "/sleep?level=deep": ("level", 'valid integer; got "deep"'),
    "/sleep?lvl=2": ("lvl", "did you mean level?"),
    "/sleep?level=1&level=2": ("level", "given twice"),
    "/sleep?mode=abort": ("mode", "mode is not supported"),
    "/wake_up?tags=weights": ("tags", "tags is not supported"),
    "/wake_up?level=1": ("level", "unknown field level"),
    "/pause?clear_cache=true": ("clear_cache", "/reset_prefix_cache"),
    "/resume?now=1": ("now", "unknown field now"),
    "/reset_prefix_cache?reset_external=true": ("reset_external", "not supported"),
    "/update_weights": ("path", "path is missing"),
}


@pytest.mark.parametrize("path", WRONG)
def test_an_argument_that_is_not_known_is_refused(server, path):
    param, message = WRONG[path]
    error = control(server, path, 400)["error"]
    assert error["param"] == param and message in error["message"] and not server.engine.called, error


def test_an_argument_goes_in_one_place(server):
    assert "given twice" in control(server, "/sleep?level=2", 400, json={"level": 1})["error"]["message"]
    assert "must be a JSON object" in control(server, "/sleep", 400, json=[2])["error"]["message"]
    bad = control(server, "/sleep", 400, content=b"{", headers=BOSS | {"content-type": "application/json"})
    assert bad["error"]["code"] == "json_invalid" and not server.engine.called
