"""Refusals over HTTP: status, param, code and message, in OpenAI's format."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from dataclasses import replace

import httpx
import pytest
from later import later
from serve.servers import MODEL, Script, openai_refuses, running

from dovetail.serve.config import ServerConfig, ServerLimits
from dovetail.serve.errors import ApiError
from dovetail.serve.http.long_bodies import AT_ONCE, LONG
from dovetail.serve.talk.service import Inflight

openai = later("openai")

pytestmark = pytest.mark.slow

HELLO = dict(model=MODEL, messages=[{"role": "user", "content": "Hello"}])
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def post(server, path, body, **options):
    return httpx.post(server.url + path, json=body, **options)


@pytest.fixture(scope="module")
def server(tokenizer):
    async def engine():
        return Script(tokenizer)

    with running(
        engine, tokenizer, limits=ServerLimits(max_body_mb=20_000 / 2**20, max_n=4, max_prompt_tokens=100)
    ) as found:
        yield found


@pytest.fixture
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as found:
        yield found


def refused(server, path, body, param=None, status=400):
    answer = post(server, path, body)
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    if param is not None:
        assert error["param"] == param, error
    return error["message"]


# --- unknown and unsupported fields --------------------------------------------------------------------------------


def test_an_unknown_field_is_refused_with_a_suggestion(server, client):
    assert "did you mean temperature?" in refused(server, CHAT, HELLO | {"temprature": 1}, "temprature")
    message = {"role": "user", "content": "Hi", "nane": "x"}
    assert "did you mean name?" in refused(server, CHAT, HELLO | {"messages": [message]}, "messages.0.nane")
    with openai_refuses(openai.BadRequestError, "foo", "unknown_field"):
        client.chat.completions.create(**HELLO, extra_body={"foo": 1})


def test_neutral_values_of_unsupported_fields_are_accepted(server):
    neutral = {"store": False, "service_tier": "auto", "modalities": ["text"], "best_of": 1, "metadata": {}}
    assert post(server, CHAT, HELLO | neutral).status_code == 200


def test_a_requests_own_template_needs_a_server_that_allows_it(server):
    body = HELLO | {"chat_template": "{{ messages }}"}
    assert "--trust-request-chat-template" in refused(server, CHAT, body, "chat_template")


def test_images_and_other_parts_are_refused(server):
    part = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    messages = [{"role": "user", "content": [{"type": "text", "text": "What is it?"}, part]}]
    assert "image_url" in refused(server, CHAT, HELLO | {"messages": messages})


BROKEN = {"name": "f", "arguments": "{a"}
BAD = {
    "no messages": ({"model": MODEL}, "messages"),
    "empty messages": ({"messages": []}, "messages"),
    "a role": ({"messages": [{"role": "king", "content": "x"}]}, "messages.0.role"),
    "no content": ({"messages": [{"role": "user"}]}, "messages.0.content"),
    "a number as text": (HELLO | {"max_tokens": "5"}, "max_tokens"),
    "a flag as number": (HELLO | {"stream": 1}, "stream"),
    "temperature": (HELLO | {"temperature": -1}, "temperature"),
    "top_p": (HELLO | {"top_p": 2}, "top_p"),
    "max_tokens": (HELLO | {"max_tokens": 0}, "max_tokens"),
    "n": (HELLO | {"n": 5}, "n"),
    "an empty stop": (HELLO | {"stop": ""}, "stop"),
    "too many stops": (HELLO | {"stop": ["a"] * 17}, "stop"),
    "a long stop": (HELLO | {"stop": ["a", "b" * 257]}, "stop"),
    "too many bad words": (HELLO | {"bad_words": ["a"] * 65}, "bad_words"),
    "a long bad word": (HELLO | {"bad_words": "b" * 257}, "bad_words"),
    "logit_bias": (HELLO | {"logit_bias": {"abc": 1}}, "logit_bias"),
    "top_logprobs alone": (HELLO | {"top_logprobs": 2}, "top_logprobs"),
    "stream_options alone": (HELLO | {"stream_options": {"include_usage": True}}, "stream_options"),
    "two structures": (HELLO | {"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
    "a template's kwarg": (HELLO | {"chat_template_kwargs": {"enable_thinking": False}}, "chat_template_kwargs"),
    "effort": (HELLO | {"reasoning_effort": "high"}, "reasoning_effort"),
    "tool_choice alone": (HELLO | {"tool_choice": "required"}, "tool_choice"),
    "a broken call": (
        {"messages": [{"role": "assistant", "tool_calls": [{"id": "a", "function": BROKEN}]}]},
        "messages.0.tool_calls.0.function.arguments",
    ),
    "top_logprobs": (HELLO | {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    "best_of": (HELLO | {"n": 2, "best_of": 1}, "best_of"),
    "more than the context": (HELLO | {"max_tokens": 512}, "max_tokens"),
    "more than the context, by its new name": (HELLO | {"max_completion_tokens": 512}, "max_completion_tokens"),
    "what the engine refuses": (HELLO | {"max_tokens": 13}, "max_tokens"),
    "what the engine refuses in a stream": (HELLO | {"max_tokens": 13, "stream": True}, "max_tokens"),
    "a long prompt": ({"messages": [{"role": "user", "content": "word " * 200}]}, None),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_requests_are_400_and_name_the_parameter(server, case):
    body, param = BAD[case]
    refused(server, CHAT, body, param)


def test_bodies_that_are_not_json_or_too_large(server):
    answer = httpx.post(server.url + CHAT, content=b"{", headers={"content-type": "application/json"})
    assert answer.status_code == 400 and answer.json()["error"]["code"] == "json_invalid"
    half = b'{"messages": [{"role": "user", "content": "\\ud83d"}]}'
    answer = httpx.post(server.url + CHAT, content=half, headers={"content-type": "application/json"})
    assert answer.status_code == 400 and "surrogate" in answer.text
    whole = b'{"messages": [{"role": "user", "content": "\\ud83d\\ude00"}]}'
    assert httpx.post(server.url + CHAT, content=whole, headers={"content-type": "application/json"}).status_code == 200
    big = HELLO | {"user": "x" * 30_000}
    assert refused(server, CHAT, big, status=413)
    chunked = (b"x" * 5000 for _ in range(10))
    assert httpx.post(server.url + CHAT, content=chunked).status_code == 413
    assert httpx.post(server.url + CHAT, json=[1, 2]).status_code == 400
    deep = b'{"messages": ' + b"[" * 9000 + b"]" * 9000 + b"}"
    assert httpx.post(server.url + CHAT, content=deep, headers={"content-type": "application/json"}).status_code == 400


def test_a_body_without_its_type_is_refused(server):
    body = json.dumps(HELLO).encode()
    for type, got in (None, "none"), ("text/plain", "'text/plain'"):
        answer = httpx.post(server.url + CHAT, content=body, headers={"content-type": type} if type else {})
        error = answer.json()["error"]
        assert answer.status_code == 415 and error["param"] == "Content-Type", error
        assert error["message"] == f"`Content-Type` must be application/json, got {got}"
    for type in ("application/json; charset=utf-8", "Application/problem+json"):
        assert httpx.post(server.url + CHAT, content=body, headers={"content-type": type}).status_code == 200


IDS = {
    "prompt.0": ([-1], "greater than or equal to 0; got -1"),
    "prompt.1": ([5, "a"], 'valid integer; got "a"'),
    "prompt.2": (["a", "b", 1], "valid string; got 1"),
    "prompt.0.1": ([[5, -1]], "greater than or equal to 0; got -1"),
}


@pytest.mark.parametrize("param", IDS)
def test_a_prompt_with_an_unknown_token_id_is_refused(server, param):
    prompt, message = IDS[param]
    assert message in refused(server, COMPLETIONS, {"prompt": prompt}, param)


LIMITED = {
    CHAT: (HELLO, "max_tokens"),
    COMPLETIONS: ({"prompt": "Hello"}, "max_tokens"),
    "/v1/responses": ({"input": "Hello"}, "max_output_tokens"),
    "/v1/messages": ({"messages": HELLO["messages"]}, "max_tokens"),
}


@pytest.mark.parametrize("path", LIMITED)
def test_a_limit_beyond_the_context_is_refused_with_the_numbers(server, path):
    """The largest limit that fits is accepted; a default limit ends at the context."""
    body, name = LIMITED[path]
    size = len(server.engine.tokenizer.encode_chat(HELLO["messages"])) if path != COMPLETIONS else 1
    answer = post(server, path, body | {name: 513 - size})
    assert answer.status_code == 400
    limit = f"`{name}` must be at most {512 - size} after a prompt of {size} tokens with a context of 512"
    assert answer.json()["error"]["message"] == f"{limit}, got {513 - size}"
    assert post(server, path, body | {name: 512 - size}).status_code == 200
    if path != "/v1/messages":  # where it must be given
        assert post(server, path, body).status_code == 200


def test_token_ids_that_the_tokenizer_does_not_know(server):
    refused(server, COMPLETIONS, {"prompt": [431888]})
    refused(server, COMPLETIONS, {"prompt": [431888], "echo": True}, "prompt")
    for empty in ("", [], [[]], [""]):
        refused(server, COMPLETIONS, {"prompt": empty}, "prompt")


def test_a_wrong_model_or_route_is_404(client, server):
    with pytest.raises(openai.NotFoundError) as error:
        client.chat.completions.create(**HELLO | {"model": "gpt-5"})
    assert error.value.code == "model_not_found" and error.value.param == "model"
    assert "no route" in refused(server, "/v1/nothing", {}, status=404)
    answer = httpx.get(server.url + CHAT)
    assert answer.status_code == 405 and answer.headers["allow"] == "POST" and "error" in answer.json()


# --- keys, hosts, origins ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def guarded(tokenizer):
    async def engine():
        return Script(tokenizer)

    options = dict(api_keys=("right", "other"), admin_key="boss", allowed_origins=("https://a.example",))
    with running(engine, tokenizer, profile_dir="traces", **options) as found:
        yield found


def test_a_key_is_needed(guarded):
    for key in ("wrong", "", "righ", "boss"):
        with pytest.raises(openai.AuthenticationError):
            openai.OpenAI(base_url=f"{guarded.url}/v1", api_key=key or "x").chat.completions.create(**HELLO)
    for key in ("right", "other"):
        openai.OpenAI(base_url=f"{guarded.url}/v1", api_key=key).chat.completions.create(**HELLO)
    assert httpx.get(f"{guarded.url}/health").status_code == 200
    for path in ("/v1/models", "/openapi.json", "/nothing"):
        assert httpx.get(guarded.url + path).status_code == 401


def test_metrics_are_open_unless_protected(guarded, tokenizer):
    assert "vllm:num_requests_running" in httpx.get(f"{guarded.url}/metrics").text

    async def engine():
        return Script(tokenizer)

    with running(engine, tokenizer, api_keys=("right",), protect_metrics=True) as protected:
        assert httpx.get(f"{protected.url}/metrics").status_code == 401
        assert httpx.get(f"{protected.url}/metrics", headers={"authorization": "Bearer right"}).status_code == 200


def test_admin_routes_need_their_own_key(guarded, server):
    right, boss = ({"authorization": f"Bearer {key}"} for key in ("right", "boss"))
    assert post(guarded, "/sleep", {}, headers=right).status_code == 401
    assert post(guarded, "/sleep", {"level": 2}, headers=boss).status_code == 200
    assert httpx.post(f"{guarded.url}/wake_up", headers=boss).status_code == 200
    assert httpx.post(f"{guarded.url}/reset_prefix_cache", headers=boss).status_code == 200
    assert post(guarded, "/update_weights", {"path": "x"}, headers=boss).json() == {"weights_version": 7}
    assert post(guarded, "/sleep", {"level": 3}, headers=boss).status_code == 400
    called = [("sleep", {"level": 2}), ("wake_up",), ("reset_prefix_cache",), ("update_weights", {"path": "x"})]
    assert [call for call in guarded.engine.called if call[0] != "start_profile"] == called
    assert post(server, "/sleep", {}).status_code == 404  # without --admin there is no such route


def test_profiles_where_a_folder_was_given(guarded, server):
    right, boss = ({"authorization": f"Bearer {key}"} for key in ("right", "boss"))
    for path in ("/start_profile", "/stop_profile"):
        assert httpx.post(guarded.url + path, headers=right).status_code == 401, "it takes the admin key"
    assert httpx.post(f"{guarded.url}/start_profile", headers=boss).status_code == 200
    assert ("start_profile", "traces") in guarded.engine.called
    assert httpx.post(f"{server.url}/start_profile").status_code == 404


def test_each_of_several_keys_has_prefixes_of_its_own(guarded, server):
    """cached_tokens and the time to the first token would tell one caller what another has asked."""

    def salt(found, key, path=CHAT, body=HELLO, **more):
        headers = {"authorization": f"Bearer {key}"}
        assert post(found, path, body | more, headers=headers).status_code == 200
        return found.engine.asked[-1][3]

    mine, again, others = salt(guarded, "right"), salt(guarded, "right"), salt(guarded, "other")
    assert mine == again and mine != others and None not in (mine, others)
    assert "right" not in mine and "other" not in others
    assert salt(guarded, "other", cache_salt="x") not in (mine, others, salt(guarded, "right", cache_salt="x"))
    assert salt(guarded, "other", COMPLETIONS, {"prompt": "Hi"}) == others
    assert salt(guarded, "right", "/v1/responses", {"input": "Hi"}) == mine
    assert salt(server, "none") is None and salt(server, "none", cache_salt="x") == "x"


def test_one_key_or_an_option_shares_prefixes():
    many = ServerConfig(names=("a",), api_keys=("one", "two"))
    assert many.separates_callers and not replace(many, share_prefix_cache=True).separates_callers
    assert not replace(many, api_keys=("one", "one")).separates_callers


def test_bodies_are_not_read_where_no_key_is_asked_for(guarded):
    """They would use up the few readers of long bodies."""
    long, places = b" " * (LONG + 1), guarded.app.user_middleware[-1].kwargs["long"]._places
    for method, path in (("GET", "/health"), ("POST", "/ready"), ("GET", "/metrics"), ("OPTIONS", CHAT)):
        for content in (long, iter([long[:5000], long])):
            answer = httpx.request(method, guarded.url + path, content=content)
            assert answer.status_code == 413, (method, path, answer.text)
    assert places._value == AT_ONCE
    assert httpx.request("GET", f"{guarded.url}/health", content=b"").status_code == 200


def test_other_origins_and_hosts(guarded, server):
    preflight = {"origin": "https://a.example", "access-control-request-method": "POST"}
    allowed = httpx.options(guarded.url + CHAT, headers=preflight)
    assert allowed.headers["access-control-allow-origin"] == "https://a.example"
    denied = httpx.options(guarded.url + CHAT, headers=preflight | {"origin": "https://b.example"})
    assert "access-control-allow-origin" not in denied.headers
    assert "access-control-allow-origin" not in httpx.get(f"{server.url}/health", headers=preflight).headers
    assert httpx.get(f"{server.url}/health", headers={"host": "evil.example:80"}).status_code == 403
    assert httpx.get(f"{server.url}/health", headers={"host": "localhost:1"}).status_code == 200


# --- when things go wrong inside --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [RuntimeError, ValueError])
def test_an_exception_in_a_route_is_a_500_with_the_request_id_and_a_traceback_in_the_log(scripted, caplog, kind):
    prompts = scripted.app.state.service.prompts
    request = prompts.request

    def fail(*_, **__):
        raise kind("secret path /home/me")

    prompts.request = fail
    answer = post(scripted, CHAT, HELLO)
    error = answer.json()["error"]
    assert answer.status_code == 500 and "secret" not in answer.text and "Traceback" not in answer.text
    assert (error["code"], error["param"]) == ("internal_error", None) and error["request_id"] in error["message"]
    (logged,) = [record.getMessage() for record in caplog.records if error["request_id"] in record.getMessage()]
    assert "Traceback" in logged and f"{kind.__name__}: secret path" in logged
    anthropic = post(scripted, "/v1/messages", HELLO | {"max_tokens": 4}).json()
    assert anthropic["error"]["type"] == "api_error" and anthropic["request_id"] != error["request_id"]
    prompts.request = request
    assert post(scripted, CHAT, HELLO).status_code == 200


def test_an_engine_that_dies_ends_a_stream_with_an_error(scripted):
    scripted.engine.dies = True
    scripted.engine.texts = ["one two three four five"] * 2
    client = openai.OpenAI(base_url=f"{scripted.url}/v1", api_key="none", max_retries=0)
    with pytest.raises(openai.InternalServerError) as error:
        client.chat.completions.create(**HELLO)
    assert error.value.status_code == 503 and "secret" not in str(error.value)
    text = ""
    with openai_refuses(openai.APIError, code="engine_died"):
        for chunk in client.chat.completions.create(**HELLO, stream=True):
            text += chunk.choices[0].delta.content or ""
    assert text == "one two"
    scripted.engine.trouble = "the engine died"
    assert httpx.get(f"{scripted.url}/health").status_code == 503
    assert "vllm:prompt_tokens_total" in httpx.get(f"{scripted.url}/metrics").text


# --- limits, leaving, stopping ----------------------------------------------------------------------------------------


@pytest.fixture
def slow(tokenizer):
    """Answers that never end by themselves."""

    async def engine():
        found = Script(tokenizer, delay=0.05, max_num_seqs=1)
        found.texts = ["word " * 300] * 9
        return found

    with running(engine, tokenizer, limits=ServerLimits(max_queue=2, request_timeout=1.0, drain_timeout=0.3)) as found:
        yield found


def wait_for(condition, seconds=5.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.01)


def test_a_full_queue_is_429_with_retry_after(tokenizer):
    """One has a place in the batch, two may wait. They end when the engine's delay is 0."""

    async def engine():
        found = Script(tokenizer, delay=1.0, max_num_seqs=1)
        found.texts = ["word " * 300] * 9
        return found

    with running(engine, tokenizer, limits=ServerLimits(max_queue=2)) as server, httpx.Client() as client:
        long, patient = HELLO | {"max_tokens": 300}, {"timeout": 60}
        threads = [threading.Thread(target=post, args=(server, CHAT, long), kwargs=patient) for _ in range(3)]
        for thread in threads:
            thread.start()
        wait_for(lambda: len(server.engine.asked) == 3, 20.0)
        answer = client.post(server.url + CHAT, json=HELLO)
        assert answer.status_code == 429 and answer.headers["retry-after"] == "1"
        with pytest.raises(openai.RateLimitError):
            openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0).chat.completions.create(**HELLO)
        server.engine.delay = 0.0
        for thread in threads:
            thread.join()
        assert client.post(server.url + CHAT, json=HELLO | {"max_tokens": 1}).status_code == 200
        assert "got 4" in refused(server, COMPLETIONS, {"prompt": ["a"] * 4}, "prompt")
        assert post(server, COMPLETIONS, {"prompt": ["a"] * 3, "max_tokens": 1}).status_code == 200


def test_only_requests_without_a_place_in_the_batch_wait():
    async def count() -> None:
        inflight = Inflight(ServerLimits(max_queue=1), batch=4)
        with inflight.ticket(lambda: None, [2]) as first, inflight.ticket(lambda: None, [2]) as second:
            inflight.check([1])
            with pytest.raises(ApiError, match="0 requests wait, and at most 1 may") as several:
                inflight.check([1, 1])
            with inflight.ticket(lambda: None, [3]), pytest.raises(ApiError) as one:
                inflight.check([1])
            assert [(each.value.status, each.value.code) for each in (several, one)] == [(429, "queue_full")] * 2
            first.begun = second.begun = True
            second.sequences = 1  # the other has ended
            inflight.check([1, 1])

    asyncio.run(count())


def test_a_request_that_takes_too_long_is_ended(slow):
    assert post(slow, CHAT, HELLO, timeout=10).status_code == 504
    client = openai.OpenAI(base_url=f"{slow.url}/v1", api_key="none", max_retries=0)
    with openai_refuses(openai.APIError, code="timeout"):
        list(client.chat.completions.create(**HELLO, stream=True))


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_aborts_its_request(slow, stream):
    def leave():
        if not stream:
            with pytest.raises(httpx.ReadTimeout):
                post(slow, CHAT, HELLO, timeout=0.3)
            return
        with httpx.stream("POST", slow.url + CHAT, json=HELLO | {"stream": True}) as answer:
            next(answer.iter_lines())

    leave()
    wait_for(lambda: slow.engine.ended == ["left"], 0.6)  # before its time is over
    assert len(slow.app.state.service.inflight) == 0
    assert 'finished_reason="abort"} 1' in httpx.get(f"{slow.url}/metrics").text


FORWARDS = {"/v1/embeddings": {"input": ["a", "b"]}, "/v1/score": {"input": "a"}}


@pytest.mark.parametrize("path", FORWARDS)
def test_embeddings_and_scores_obey_queue_and_time_limits(slow, path):
    inflight = slow.app.state.service.inflight
    with pytest.raises(httpx.ReadTimeout):
        post(slow, path, FORWARDS[path], timeout=0.3)
    wait_for(lambda: slow.engine.ended == ["left"] and len(inflight) == 0, 30.0)
    answers = []
    threads = [threading.Thread(target=lambda: answers.append(post(slow, path, FORWARDS[path], timeout=30)))]
    threads[0].start()
    wait_for(lambda: len(inflight) == 1 or answers, 30.0)
    threads[0].join()
    assert [answer.status_code for answer in answers] == [504] and answers[0].json()["error"]["code"] == "timeout"


def test_every_prompt_of_an_embedding_waits():
    async def count() -> None:
        inflight = Inflight(ServerLimits(max_queue=3), batch=1)
        with inflight.ticket(lambda: None, [1] * 3):
            inflight.check([1])
            with pytest.raises(ApiError) as error:
                inflight.check([1, 1])
            assert (error.value.status, error.value.code) == (429, "queue_full")

    asyncio.run(count())


def test_a_stop_ends_requests_under_way_after_the_limit(slow):
    lines = []

    def read():
        with httpx.stream("POST", slow.url + CHAT, json=HELLO | {"stream": True}) as answer:
            lines.extend(answer.iter_lines())

    thread = threading.Thread(target=read)
    thread.start()
    wait_for(lambda: slow.engine.asked)
    began = time.monotonic()
    slow.stop()
    thread.join(30)
    assert not thread.is_alive() and time.monotonic() - began > 0.2
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: ")]
    assert events[-1]["error"]["code"] == "stopping"
    with pytest.raises(httpx.TransportError):
        wait_for(lambda: not post(slow, CHAT, HELLO), 3)
