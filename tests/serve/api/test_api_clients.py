"""/v1/responses and /v1/messages with the official clients, and the small routes."""

from __future__ import annotations

import json

import httpx
import pytest
from later import later
from serve.api.test_api_tools import CALL, WEATHER
from serve.servers import MODEL, openai_refuses

from dovetail.io.tool_formats.formats import call_id, short_id
from dovetail.serve.api.anthropic import _anthropic_id, _call_id
from dovetail.serve.remote.wire import LoadedAdapter

anthropic = later("anthropic")
openai = later("openai")

pytestmark = pytest.mark.slow

THOUGHT = "<think>\nHm.\n</think>\n\n"


@pytest.fixture
def client(scripted):
    with openai.OpenAI(base_url=f"{scripted.url}/v1", api_key="none", max_retries=0) as found:
        yield found


@pytest.fixture
def claude(scripted):
    with anthropic.Anthropic(base_url=scripted.url, api_key="none", max_retries=0) as found:
        yield found


# --- responses --------------------------------------------------------------------------------------------------------

TOOL = {"type": "function", "name": "weather", "parameters": WEATHER, "strict": False}


def test_responses_with_the_real_model(openai_client):
    asked = dict(model=MODEL, input="Why is the sky blue?", temperature=0, max_output_tokens=12)
    answer = openai_client.responses.create(**asked, instructions="Be brief.", metadata={"a": "b"})
    assert answer.status == "incomplete" and answer.incomplete_details.reason == "max_output_tokens"
    assert answer.output_text and answer.usage.output_tokens == 12 and answer.metadata == {"a": "b"}
    schema = {"type": "json_schema", "name": "x", "schema": {"type": "integer", "minimum": 1, "maximum": 9}}
    number = openai_client.responses.create(**asked, text={"format": schema})
    assert int(number.output_text) in range(1, 10) and number.status == "completed"


def test_responses_with_log_probabilities(openai_client, client):
    asked = dict(model=MODEL, input="Why is the sky blue?", temperature=0, max_output_tokens=8)
    scored = dict(include=["message.output_text.logprobs"], top_logprobs=2)
    assert openai_client.responses.create(**asked).output[0].content[0].logprobs == []
    whole = openai_client.responses.create(**asked, **scored)
    (part,) = whole.output[0].content
    assert len(part.logprobs) == 8 and "".join(entry.token for entry in part.logprobs) == part.text
    for entry in part.logprobs:
        assert entry.logprob <= 0 and len(entry.top_logprobs) == 2 and entry.top_logprobs[0].token == entry.token
    events = list(openai_client.responses.create(**asked, **scored, stream=True))
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    assert all("".join(entry.token for entry in event.logprobs) == event.delta for event in deltas)
    done = next(event for event in events if event.type == "response.output_text.done")
    assert (
        [e.token for e in done.logprobs]
        == [e.token for d in deltas for e in d.logprobs]
        == [entry.token for entry in part.logprobs]
    )
    with openai_refuses(openai.BadRequestError, "top_logprobs"):
        client.responses.create(model=MODEL, input="Hi", top_logprobs=2)
    with openai_refuses(openai.BadRequestError, "include.0", "invalid_value"):
        client.responses.create(model=MODEL, input="Hi", include=["file_search_call.results"])


def test_log_probabilities_of_thoughts_and_calls_are_left_out(scripted, client):
    scripted.engine.texts = ["Well. " + CALL]
    answer = client.responses.create(model=MODEL, input="Hi", tools=[TOOL], include=["message.output_text.logprobs"])
    message, call = answer.output
    assert "".join(entry.token for entry in message.content[0].logprobs).startswith("Well.")
    assert len(message.content[0].logprobs) < 6 and call.name == "weather"


def test_responses_stream_adds_up(scripted, client):
    scripted.engine.texts = ["Let me see. " + CALL] * 2
    whole = client.responses.create(model=MODEL, input="Weather?", tools=[TOOL])
    events = list(client.responses.create(model=MODEL, input="Weather?", tools=[TOOL], stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [events[0].type, events[1].type, events[-1].type] == [
        "response.created", "response.in_progress", "response.completed"
    ]  # fmt: skip
    final = events[-1].response
    assert [item.type for item in final.output] == [item.type for item in whole.output] == ["message", "function_call"]
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == whole.output_text == final.output_text == "Let me see."
    arguments = "".join(event.delta for event in events if event.type == "response.function_call_arguments.delta")
    assert arguments == final.output[1].arguments == whole.output[1].arguments
    added = [event.item.type for event in events if event.type == "response.output_item.added"]
    done = [event.item.type for event in events if event.type == "response.output_item.done"]
    assert added == done == ["message", "function_call"]


def test_a_tool_loop_over_responses(scripted, client):
    scripted.engine.texts = [CALL, "20 degrees."]
    first = client.responses.create(model=MODEL, input="Weather?", tools=[TOOL])
    (call,) = first.output
    given = {"type": "function_call_output", "call_id": call.call_id, "output": "20"}
    turns = [{"role": "user", "content": "Weather?"}, *first.output, given]
    second = client.responses.create(model=MODEL, input=turns, tools=[TOOL])
    assert second.output_text == "20 degrees."


def test_responses_that_fail_under_way(scripted, client):
    scripted.engine.dies = True
    scripted.engine.texts = ["one two three four"]
    events = list(client.responses.create(model=MODEL, input="Hi", stream=True))
    assert events[-1].type == "response.failed" and events[-1].response.error.code == "server_error"


# --- messages ---------------------------------------------------------------------------------------------------------

ASK = dict(model=MODEL, max_tokens=64, messages=[{"role": "user", "content": "What is the weather?"}])
CLAUDE_TOOL = {"name": "weather", "description": "The weather.", "input_schema": WEATHER}


def test_messages_with_the_real_model(real):
    with anthropic.Anthropic(base_url=real.url, api_key="none") as claude:
        asked = dict(model=MODEL, messages=[{"role": "user", "content": "Why is the sky blue?"}], max_tokens=10)
        whole = claude.messages.create(**asked, system="Be brief.", extra_body={"temperature": 0})
        assert whole.stop_reason == "max_tokens" and whole.usage.output_tokens == 10
        with claude.messages.stream(**asked, system="Be brief.", extra_body={"temperature": 0}) as stream:
            assert stream.get_final_text() == whole.content[0].text
        choice = {"type": "tool", "name": "weather"}
        called = claude.messages.create(**asked | {"max_tokens": 64}, tools=[CLAUDE_TOOL], tool_choice=choice)
        assert called.stop_reason == "tool_use" and called.content[0].input["unit"] in ("C", "F")


def test_a_tool_loop_over_messages(scripted, claude):
    scripted.engine.texts = ["I look. " + CALL, "I look. " + CALL, "20 degrees."]
    first = claude.messages.create(**ASK, tools=[CLAUDE_TOOL])
    assert [block.type for block in first.content] == ["text", "tool_use"] and first.stop_reason == "tool_use"
    with claude.messages.stream(**ASK, tools=[CLAUDE_TOOL]) as stream:
        final = stream.get_final_message()
    assert final.content[1].input == first.content[1].input == {"city": "Paris", "unit": "C"}
    assert final.content[0].text == first.content[0].text == "I look." and final.stop_reason == "tool_use"
    assert all(each.id.startswith("msg_") and each.content[1].id.startswith("toolu_") for each in (first, final))
    given = {"type": "tool_result", "tool_use_id": first.content[1].id, "content": [{"type": "text", "text": "20"}]}
    turns = [*ASK["messages"], {"role": "assistant", "content": first.content}, {"role": "user", "content": [given]}]
    second = claude.messages.create(**ASK | {"messages": turns}, tools=[CLAUDE_TOOL])
    assert second.content[0].text == "20 degrees." and second.stop_reason == "end_turn"
    assert "20" in scripted.engine.asked[-1][0]


def test_stop_sequences_and_counting(scripted, claude):
    scripted.engine.texts = ["one two three"]
    answer = claude.messages.create(**ASK, stop_sequences=["two"])
    assert answer.content[0].text == "one " and answer.stop_reason == "stop_sequence" and answer.stop_sequence == "two"
    counted = claude.messages.count_tokens(model=MODEL, messages=ASK["messages"]).input_tokens
    assert counted == answer.usage.input_tokens + answer.usage.cache_read_input_tokens


def test_errors_in_anthropics_shape(scripted, claude):
    with pytest.raises(anthropic.BadRequestError, match="temperature"):
        claude.messages.create(**ASK, extra_body={"temperature": -1.0})
    with pytest.raises(anthropic.NotFoundError):
        claude.messages.create(**ASK | {"model": "other"})
    with pytest.raises(anthropic.BadRequestError, match="budget_tokens"):
        claude.messages.create(**ASK, thinking={"type": "enabled", "budget_tokens": 1024})
    answer = httpx.post(f"{scripted.url}/v1/messages", json=ASK | {"mx": 1}).json()
    assert answer["type"] == "error" and answer["error"]["type"] == "invalid_request_error"


# --- the small routes -------------------------------------------------------------------------------------------------


def test_models(client):
    (model,) = client.models.list().data
    assert model.id == MODEL and client.models.retrieve(MODEL).max_model_len == 512
    assert model.vocab_size == 49152  # a load generator makes prompts of it
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_ids_of_calls_come_back_from_anthropics_clients_as_the_template_wants_them():
    for make in (call_id, short_id):  # Mistral's template takes the short ones alone
        id = make()
        assert _anthropic_id(id).startswith("toolu_") and _call_id(_anthropic_id(id)) == id
    assert _call_id("another") == "another"


def test_models_are_complete_for_both_clients(scripted, client, claude):
    scripted.engine.info.adapters = {name: LoadedAdapter("DIR", 3) for name in ("a", "b", "org/c")}
    names = [MODEL, "a", "b", "org/c"]
    for model in client.models.list():
        assert (model.object, model.owned_by) == ("model", "dovetail") and model.created > 1.7e9
    page = claude.models.list()
    assert [model.id for model in page] == names
    assert (page.has_more, page.first_id, page.last_id) == (False, MODEL, "org/c")
    for model in (*page.data, claude.models.retrieve(MODEL), claude.models.retrieve("org/c")):
        assert (model.type, model.display_name, model.lifecycle) == ("model", model.id, "active")
        assert model.created_at.year >= 2024 and (model.max_input_tokens, model.max_tokens) == (511, 511)
    assert [model.id for model in claude.models.list(limit=1)] == names, "page by page"
    first = claude.models.list(limit=3)
    assert [model.id for model in first.data] == names[:3] and first.has_more
    assert [model.id for model in claude.models.list(before_id="b", limit=1).data] == ["a"]
    with pytest.raises(anthropic.BadRequestError, match="after_id"):
        claude.models.list(after_id="nothing")
    with pytest.raises(anthropic.NotFoundError):
        claude.models.retrieve("nothing")


def test_tokenize_and_back(scripted, tokenizer):
    def post(path, **body):
        return httpx.post(scripted.url + path, json=body)

    found = post("/tokenize", prompt="Hello there", return_token_strs=True).json()
    assert found["tokens"] == tokenizer.encode("Hello there") and len(found["token_strs"]) == found["count"]
    assert post("/detokenize", tokens=found["tokens"]).json() == {"prompt": "Hello there"}
    chat = post("/tokenize", messages=[{"role": "user", "content": "Hi"}]).json()["tokens"]
    assert chat == tokenizer.encode_chat([{"role": "user", "content": "Hi"}])
    assert post("/tokenize").status_code == post("/tokenize", prompt="a", messages=[]).status_code == 400
    assert post("/detokenize", tokens=[10**6]).status_code == 400


def test_health_version_and_metrics(scripted, client):
    from dovetail import __version__

    assert httpx.get(f"{scripted.url}/version").json() == {"version": __version__}
    assert httpx.get(f"{scripted.url}/health").status_code == 200
    client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "Hi"}])
    text = httpx.get(f"{scripted.url}/metrics").text
    for name in (
        "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "prefix_cache_queries_total",
        "prefix_cache_hits_total", "time_to_first_token_seconds_bucket", "inter_token_latency_seconds_bucket",
        "e2e_request_latency_seconds_count", "prompt_tokens_total", "generation_tokens_total", "request_success_total",
    ):  # fmt: skip
        assert f"\nvllm:{name}{{" in text, name
    assert 'finished_reason="stop"} 1' in text and "vllm:kv_cache_usage_perc" in text
    prometheus = pytest.importorskip("prometheus_client.parser")
    families = {family.name for family in prometheus.text_string_to_metric_families(text)}
    assert "vllm:time_to_first_token_seconds" in families


def test_embeddings_as_base64_and_numbers(scripted, client):
    asked = dict(model=MODEL, input=[[1, 2, 3], [4, 5]])
    assert [item.embedding for item in client.embeddings.create(**asked).data] == [[3.0, 1.0], [2.0, 1.0]]
    with openai_refuses(openai.BadRequestError, "dimensions", "refused_field"):
        client.embeddings.create(**asked, dimensions=1)
    answer = httpx.post(f"{scripted.url}/v1/embeddings", json={"input": ""})
    assert answer.status_code == 400 and json.loads(answer.text)["error"]["param"] == "input"
