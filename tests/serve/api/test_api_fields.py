"""Every field of every request, one by one.

A supported field changes the engine's request or the answer, a field without effect is ignored, and a known unsupported
field is refused by name. The tables are compared with the request models: a new field needs a row.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import httpx
import pytest
from serve.api.test_api_tools import CALL, TOOLS, WEATHER
from serve.images import SizeWriter, png
from serve.servers import Script, running

from dovetail.io.tokenizer import Tokenizer
from dovetail.serve.api import anthropic, chat, completions, controls, pooling, requests, responses, status
from dovetail.serve.api.requests import Body

pytestmark = pytest.mark.slow

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
# It writes all that it is given, so that whatever reaches it shows in the prompt.
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m | tojson }}<|im_end|>\n{% endfor %}{{ tools }}{{ documents }}"
    "{{ reasoning_effort }}{{ enable_thinking }}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
THOUGHT, SCHEMA = "<think>\nHm.\n</think>\n\nFine.", {"type": "integer"}

NOTHING: Mapping[str, Any] = MappingProxyType({})


class V(NamedTuple):
    """A value, the request's other fields (with and without it), and what the model says."""

    value: Any
    beside: Mapping[str, Any] = NOTHING
    says: str | None = None


class Same(NamedTuple):
    """A value that is accepted without effect, for the reason given."""

    value: Any
    why: str
    beside: Mapping[str, Any] = NOTHING


LABEL = "a label for the reader of the request"
CACHED = "every prefix is cached"


class Table(NamedTuple):
    path: str
    base: dict[str, Any]  # of the object in question
    taken: dict[str, V | Same]
    refused: Mapping[str, Any] = NOTHING  # a value of each
    wrap: Callable[[dict[str, Any]], dict[str, Any]] = lambda body: body  # the request around the object
    ignored: Mapping[str, Any] = NOTHING  # a value of each


SAMPLING: dict[str, V | Same] = {
    "model": V("other"), "n": V(2), "best_of": Same(1, "all samples are returned: it can only be n"),
    "temperature": V(0.5), "top_p": V(0.5), "top_k": V(3), "min_p": V(0.5),
    "presence_penalty": V(1.0), "frequency_penalty": V(1.0), "repetition_penalty": V(1.5), "logit_bias": V({"5": 1.0}),
    "seed": V(7), "stop": V("ne"), "stop_token_ids": V([5]),
    "include_stop_str_in_output": V(True, {"stop": "ne"}), "ignore_eos": V(True), "min_tokens": V(3),
    "allowed_token_ids": V([1, 2]), "bad_words": V(["x"]), "prompt_logprobs": V(1), "speculation": V(False),
    "structured_outputs": V({"regex": "a"}), "priority": V(3), "cache_salt": V("mine"),
    "skip_special_tokens": V(False, says="Fi<|im_start|>ne."), "return_token_ids": V(True), "stream": V(True),
    "stream_options": V({"include_usage": True}, {"stream": True}),
}  # fmt: skip
SAMPLING_REFUSED = {
    "use_beam_search": True, "length_penalty": 0.5, "truncate_prompt_tokens": 5,
    "logits_processors": ["x"],
    "spaces_between_special_tokens": False, "kv_transfer_params": {}, "lora_request": {}, "thinking_token_budget": 5,
    "return_tokens_as_token_ids": True, "guided_json": {}, "guided_regex": "a", "guided_choice": ["a"],
    "guided_grammar": "a",
}  # fmt: skip
LABELS = {
    "user": "me", "safety_identifier": "me", "metadata": {"a": "b"}, "store": True, "request_id": "r1",
    "service_tier": "flex", "prompt_cache_key": "me", "prompt_cache_retention": "24h", "prompt_cache_options": {},
}  # fmt: skip
HELLO = {"role": "user", "content": "Hello"}
OTHER = {"role": "user", "content": "Other"}
PREFILLED = [HELLO, {"role": "assistant", "content": "Well,"}]
CALLED = {"id": "a", "function": {"name": "weather", "arguments": "{}"}}
CALLS = {"role": "assistant", "tool_calls": [CALLED]}
NAMED = {"type": "function", "function": {"name": "weather"}}
TWO_CALLS = f"{CALL}\n{CALL}"
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}

# --- /v1/chat/completions ---------------------------------------------------------------------------------------------


def asking(**more: Any) -> dict[str, Any]:
    return {"messages": [HELLO], **more}


ONLY = {"choice": None}
MEDIA = dict.fromkeys("input_audio audio_url video_url file image image_embeds".split(), "x")
SMALL, LARGE = (png(width=width, height=2) for width in (2, 3))
A_PART = {"type": "image_url", "image_url": {"url": SMALL}}
AN_IMAGE = {"type": "input_image", "image_url": SMALL}
SOURCE = {"type": "base64", "media_type": "image/png", "data": SMALL.partition(",")[2]}
TABLES: dict[type[Body], Table] = {
    chat.ChatRequest: Table(
        CHAT,
        asking(),
        {
            **SAMPLING,
            "messages": V([OTHER]), "max_tokens": V(1), "max_completion_tokens": V(1), "logprobs": V(True),
            "top_logprobs": V(2, {"logprobs": True}), "response_format": V({"type": "json_object"}), "tools": V(TOOLS),
            "tool_choice": V("required", {"tools": TOOLS}),
            "parallel_tool_calls": V(False, {"tools": TOOLS}, TWO_CALLS), "reasoning_effort": V("low"),
            "chat_template": V("{{ messages }}"), "chat_template_kwargs": V({"enable_thinking": True}),
            "documents": V([{"text": "A fact."}]), "add_generation_prompt": V(False),
            "continue_final_message": V(True, {"messages": PREFILLED}), "add_special_tokens": V(True),
            "include_reasoning": V(False, says=THOUGHT),
        },
        {
            **SAMPLING_REFUSED,
            "audio": {}, "modalities": ["audio"], "web_search_options": {}, "moderation": {}, "functions": [],
            "function_call": "auto", "mm_processor_kwargs": {},
        },
        ignored=LABELS | {"verbosity": "low", "prediction": {"type": "content", "content": "x"}},
    ),
    chat.Message: Table(
        CHAT,
        HELLO,
        {
            "role": V("system"), "content": V("Other"), "name": V("Ann"), "tool_calls": V([CALLED]),
            "tool_call_id": V("a"), "reasoning_content": V("Hm."), "reasoning": V("Hm."),
            "refusal": V("No.", {"role": "assistant", "content": None, "tool_calls": [CALLED]}),
        },
        {"audio": {}, "function_call": {}},
        lambda message: {"messages": [message]},
        {"annotations": [{}], "parsed": {}, "provider_specific_fields": {}},
    ),
    chat.Part: Table(
        CHAT,
        {"type": "text", "text": "Hi", "refusal": "No."},
        {
            "type": V("refusal"), "text": V("Ho"), "refusal": V("Never.", {"type": "refusal"}),
            "image_url": V({"url": LARGE}, A_PART),
        },
        MEDIA,
        lambda part: {"messages": [{"role": "user", "content": [part]}]},
        {"cache_control": {"type": "ephemeral"}, "uuid": "x"},
    ),
    chat.ImageUrl: Table(
        CHAT, {"url": SMALL}, {"url": V(LARGE), "detail": V("low")},
        wrap=lambda url: {"messages": [{"role": "user", "content": [A_PART | {"image_url": url}]}]},
    ),
    chat.FunctionCall: Table(
        CHAT,
        CALLED,
        {
            "id": V("b"), "type": V("custom"), "function": V({"name": "now"}),
            "index": Same(0, "clients that send a stream's deltas back send it"),
        },
        wrap=lambda call: {"messages": [{"role": "assistant", "tool_calls": [call]}]},
    ),
    chat.CalledFunction: Table(
        CHAT,
        CALLED["function"],
        {"name": V("now"), "arguments": V('{"a": 1}')},
        wrap=lambda function: {"messages": [{"role": "assistant", "tool_calls": [{"id": "a", "function": function}]}]},
        ignored={"parsed_arguments": {}},
    ),
    chat.ChatTool: Table(
        CHAT, TOOLS[1], {"type": V("custom"), "function": V(TOOLS[0]["function"])}, {"custom": {}},
        lambda tool: asking(tools=[tool]),
    ),
    chat.Function: Table(
        CHAT, {"name": "now"},
        {"name": V("then"), "description": V("The time."), "parameters": V(WEATHER), "strict": V(True)},
        wrap=lambda function: asking(tools=[{"type": "function", "function": function}]),
    ),
    chat.NamedChoice: Table(
        CHAT, NAMED, {"type": V("custom"), "function": V({"name": "now"})}, {"allowed_tools": {}},
        lambda choice: asking(tools=TOOLS, tool_choice=choice),
    ),
    chat.NamedFunction: Table(
        CHAT, NAMED["function"], {"name": V("now")},
        wrap=lambda function: asking(tools=TOOLS, tool_choice={"type": "function", "function": function}),
    ),
    requests.ResponseFormat: Table(
        CHAT, FORMAT, {"type": V("text"), "json_schema": V({"name": "x", "schema": WEATHER})}, {"grammar": "x"},
        lambda form: asking(response_format=form),
    ),
    requests.JsonSchema: Table(
        CHAT, FORMAT["json_schema"],
        {
            "name": Same("y", LABEL), "description": Same("It.", LABEL), "schema": V(WEATHER),
            "strict": Same(True, "it is always followed to the letter"),
        },
        wrap=lambda schema: asking(response_format={"type": "json_schema", "json_schema": schema}),
    ),
    requests.StructuredOutputs: Table(
        CHAT, {"choice": ["a"]},
        {
            "json": V({}, ONLY), "regex": V("a", ONLY), "choice": V(["a", "b"]), "grammar": V("start: \"a\"", ONLY),
        },
        {"json_object": True, "structural_tag": {}},
        lambda structured: asking(structured_outputs=structured),
    ),
    requests.StreamOptions: Table(
        CHAT, {}, {"include_usage": V(True)}, {"continuous_usage_stats": True},
        lambda options: asking(stream=True, stream_options=options), {"include_obfuscation": True},
    ),
    completions.CompletionRequest: Table(
        "/v1/completions",
        {"prompt": "Hello"},
        {
            **SAMPLING,
            "prompt": V("Other"), "max_tokens": V(1), "logprobs": V(1), "echo": V(True),
            "response_format": V({"type": "json_object"}), "add_special_tokens": V(False),
        },
        {**SAMPLING_REFUSED, "suffix": "end", "prompt_embeds": "x", "max_completion_tokens": 3},
        ignored=LABELS,
    ),
}  # fmt: skip

# --- /v1/responses ----------------------------------------------------------------------------------------------------

FUNCTION = {"type": "function", "name": "weather", "parameters": WEATHER}
TEXT = {"type": "json_schema", "name": "x", "schema": SCHEMA}
SCORED = {"include": [responses.LOGPROBS]}
GIVEN = {"type": "function_call_output", "call_id": "a", "output": "20"}
FUNCTION_CALL = {"type": "function_call", "call_id": "a", "name": "weather"}
SAYS = {"role": "assistant", "content": "Fine."}


def items(item: dict[str, Any]) -> dict[str, Any]:
    return {"input": [item, SAYS]}


TABLES |= {
    responses.ResponsesRequest: Table(
        RESPONSES,
        {"input": "Hello"},
        {
            "model": V("other"), "input": V("Other"), "instructions": V("Be brief."), "max_output_tokens": V(1),
            "temperature": V(0.5), "top_p": V(0.5), "tools": V([FUNCTION]),
            "tool_choice": V("required", {"tools": [FUNCTION]}),
            "parallel_tool_calls": V(False, {"tools": [FUNCTION]}, TWO_CALLS),
            "text": V({"format": {"type": "json_object"}}), "reasoning": V({"effort": "low"}),
            "metadata": V({"a": "b"}), "include": V([responses.LOGPROBS]), "top_logprobs": V(2, SCORED),
            "stream": V(True), "user": V("me"),
        },
        {
            "previous_response_id": "x", "conversation": "x", "prompt": {}, "background": True, "truncation": "auto",
            "context_management": [{}], "moderation": {}, "access_programs": [], "image": "x",
        },
        ignored={name: value for name, value in LABELS.items() if name not in ("user", "metadata")}
        | {"max_tool_calls": 1, "stream_options": {"include_obfuscation": True}},
    ),
    responses.Item: Table(
        RESPONSES,
        {"role": "user", "content": "Hello"},
        {
            "type": V("reasoning"), "id": Same("x", LABEL), "status": Same("completed", LABEL), "role": V("system"),
            "content": V("Other"), "call_id": V("b", FUNCTION_CALL | {"role": None, "content": None}),
            "name": V("now", FUNCTION_CALL), "arguments": V('{"a": 1}', FUNCTION_CALL), "output": V("21", GIVEN),
            "summary": V([{"type": "summary_text", "text": "Hm."}], {"type": "reasoning", "content": None}),
        },
        dict.fromkeys("encrypted_content phase caller namespace async async_".split(), "x"),
        items,
    ),
    responses.InputPart: Table(
        RESPONSES,
        {"type": "input_text", "text": "Hi", "refusal": "No."},
        {
            "type": V("refusal"), "text": V("Ho"), "refusal": V("Never.", {"type": "refusal"}),
            "image_url": V(LARGE, AN_IMAGE), "detail": V("low", AN_IMAGE),
            "logprobs": Same([{}], "an answer comes back: its text is what is read"),
        },
        dict.fromkeys("file_id file_data input_audio".split(), "x"),
        lambda part: {"input": [{"role": "user", "content": [part]}]},
        {"annotations": [{}]},
    ),
    responses.FunctionTool: Table(
        RESPONSES,
        FUNCTION,
        {
            "type": V("web_search"), "name": V("now"), "description": V("It."), "parameters": V({"type": "object"}),
            "strict": V(True),
        },
        {"defer_loading": True},
        lambda tool: {"input": "Hello", "tools": [tool]},
    ),
    responses.NamedFunctionChoice: Table(
        RESPONSES, {"type": "function", "name": "weather"}, {"type": V("custom"), "name": V("then")},
        wrap=lambda choice: {"input": "Hello", "tools": [FUNCTION, FUNCTION | {"name": "then"}], "tool_choice": choice},
    ),
    responses.TextOptions: Table(
        RESPONSES, {}, {"format": V(TEXT)}, wrap=lambda text: {"input": "Hello", "text": text},
        ignored={"verbosity": "low"},
    ),
    responses.TextFormat: Table(
        RESPONSES,
        TEXT,
        {
            "type": V("text"), "name": V("y"), "description": V("It."), "schema": V(WEATHER), "strict": V(True),
        },  # in the answer, which repeats the request
        wrap=lambda form: {"input": "Hello", "text": {"format": form}},
    ),
    responses.ReasoningOptions: Table(
        RESPONSES, {}, {"effort": V("low")}, {"summary": "detailed", "generate_summary": "auto"},
        lambda reasoning: {"input": "Hello", "reasoning": reasoning},
    ),
}  # fmt: skip

# --- /v1/messages -----------------------------------------------------------------------------------------------------

TOOL = {"name": "weather", "input_schema": WEATHER}
COUNTED = {
    "model": V("other"), "messages": V([{"role": "user", "content": "Many more words."}]), "system": V("Be brief."),
    "tools": V([TOOL]), "tool_choice": V({"type": "none"}, {"tools": [TOOL]}), "thinking": V({"type": "enabled"}),
    "output_config": V({"effort": "low"}), "cache_control": Same({"type": "ephemeral"}, CACHED),
}  # fmt: skip
COUNT_REFUSED = {
    "mcp_servers": [{}], "context_management": {}, "user_profile_id": "x", "workspace_id": "x", "output_format": {},
}  # fmt: skip


def turn(block: dict[str, Any], role: str = "user") -> dict[str, Any]:
    return {"max_tokens": 9, "messages": [{"role": role, "content": [block]}, HELLO]}


def claude(**more: Any) -> dict[str, Any]:
    return {"max_tokens": 9, "messages": [HELLO], **more}


RESULT, USE = {"type": "tool_result", "tool_use_id": "a"}, {"type": "tool_use", "id": "a", "name": "weather"}
TABLES |= {
    anthropic.CountRequest: Table(
        f"{MESSAGES}/count_tokens", {"messages": [HELLO]}, COUNTED, COUNT_REFUSED, ignored={"anthropic_version": "x"}
    ),
    anthropic.MessagesRequest: Table(
        MESSAGES,
        claude(),
        {
            **COUNTED,
            "max_tokens": V(1), "stop_sequences": V(["ne"]), "temperature": V(0.5), "top_p": V(0.5), "top_k": V(3),
            "stream": V(True),
        },
        COUNT_REFUSED | {"container": "x", "inference_geo": "x", "diagnostics": {}},
        ignored={"anthropic_version": "x", "metadata": {"user_id": "me"}, "service_tier": "auto", "speed": "fast"},
    ),
    anthropic.MessagesTurn: Table(
        MESSAGES, HELLO, {"role": V("assistant"), "content": V("Other")}, wrap=lambda turn: claude(messages=[turn])
    ),
    anthropic.Block: Table(
        MESSAGES,
        {"type": "text", "text": "Hi"},
        {
            "type": V("redacted_thinking", {"role": "assistant"}), "text": V("Ho"),
            "source": V(SOURCE | {"data": LARGE.partition(",")[2]}, {"type": "image", "source": SOURCE}),
            "thinking": V("Ah.", {"type": "thinking", "thinking": "Hm.", "role": "assistant"}),
            "signature": Same("x", "thinking comes back as it is", {"type": "text"}),
            "data": Same("x", "what was hidden stays so", {"type": "text"}),
            "id": V("b", USE | {"role": "assistant"}), "name": V("now", USE | {"role": "assistant"}),
            "input": V({"a": 1}, USE | {"role": "assistant"}), "tool_use_id": V("b", RESULT),
            "content": V("20", RESULT), "is_error": V(True, RESULT),
            "cache_control": Same({"type": "ephemeral"}, CACHED),
        },
        {"citations": {"enabled": True}, "caller": {"type": "x"}},
        lambda block: turn({k: v for k, v in block.items() if k != "role"}, block.get("role", "user")),
    ),
    anthropic.ImageSource: Table(
        MESSAGES,
        SOURCE,
        {
            "type": V("file"), "media_type": Same("image/jpeg", "the file says what it is"),
            "data": V(LARGE.partition(",")[2]),
            "url": V(LARGE, {"type": "url", "url": SMALL, "media_type": None, "data": None}),
        },
        {"file_id": "x"},
        lambda source: turn({"type": "image", "source": source}, "user"),
    ),
    anthropic.CacheControl: Table(
        MESSAGES, {"type": "ephemeral"}, {"type": V("x"), "ttl": Same("1h", CACHED)},
        wrap=lambda control: claude(cache_control=control),
    ),
    anthropic.MessageTool: Table(
        MESSAGES,
        TOOL,
        {
            "name": V("now"), "type": V("bash"), "description": V("It."), "input_schema": V({"type": "object"}),
            "strict": V(True), "cache_control": Same({"type": "ephemeral"}, CACHED),
        },
        {"defer_loading": True, "input_examples": [{}], "allowed_callers": ["x"], "eager_input_streaming": False},
        lambda tool: claude(tools=[tool]),
    ),
    anthropic.MessageToolChoice: Table(
        MESSAGES,
        {"type": "auto"},
        {
            "type": V("any"), "name": V("then", {"type": "tool", "name": "weather"}),
            "disable_parallel_tool_use": V(True, says=TWO_CALLS),
        },
        wrap=lambda choice: claude(tools=[TOOL, TOOL | {"name": "then"}], tool_choice=choice, max_tokens=99),
    ),
    anthropic.Thinking: Table(
        MESSAGES, {"type": "enabled"}, {"type": V("disabled")}, {"budget_tokens": 1024, "display": "omitted"},
        lambda thinking: claude(thinking=thinking),
    ),
    anthropic.OutputConfig: Table(
        MESSAGES, {}, {"format": V({"type": "json_schema", "schema": SCHEMA}), "effort": V("low")}, {"task_budget": 5},
        lambda config: claude(output_config=config),
    ),
    anthropic.OutputFormat: Table(
        MESSAGES, {"type": "json_schema", "schema": SCHEMA}, {"type": V("text"), "schema": V(WEATHER)},
        wrap=lambda form: claude(output_config={"format": form}),
    ),
}  # fmt: skip

# --- the small routes -------------------------------------------------------------------------------------------------

ALONE, UNREAD = {"prompt": None}, {"input": None}
TALK = {"prompt": None, "messages": PREFILLED}
TABLES |= {
    status.TokenizeRequest: Table(
        "/tokenize",
        {"prompt": "Hello"},
        {
            "model": V("other"), "prompt": V("Other"), "messages": V([HELLO], ALONE),
            "tools": V(TOOLS, TALK), "add_special_tokens": V(False), "add_generation_prompt": V(False, TALK),
            "chat_template": V("{{ messages }}", TALK), "chat_template_kwargs": V({"enable_thinking": True}, TALK),
            "return_token_strs": V(True),
        },
    ),
    status.DetokenizeRequest: Table(
        "/detokenize", {"tokens": [1, 504]},
        {"model": V("other"), "tokens": V([504]), "skip_special_tokens": V(True)},
    ),
    pooling.EmbeddingRequest: Table(
        "/v1/embeddings",
        {"input": "Hello"},
        {
            "model": V("other"), "input": V("Hello there"), "encoding_format": V("base64"), "pooling": V("last"),
        },
        {"dimensions": 5},
        ignored=LABELS,
    ),
    pooling.ScoreRequest: Table(
        "/v1/score",
        {"input": "Hello"},
        {
            "model": V("other"), "input": V("Hello there"), "messages": V([HELLO], UNREAD),
            "tools": V(TOOLS, UNREAD | {"messages": PREFILLED}),
        },
        ignored=LABELS,
    ),
    controls.SleepRequest: Table("/sleep", {}, {"level": V(2)}, {"mode": "abort"}),
    controls.WakeRequest: Table("/wake_up", {}, {}, {"tags": "weights"}),
    controls.PauseRequest: Table(
        "/pause", {}, {}, {"mode": "abort", "wait_for_inflight_requests": True, "clear_cache": True}
    ),
    controls.ResetRequest: Table(
        "/reset_prefix_cache", {}, {}, {"reset_running_requests": True, "reset_external": True}
    ),
    controls.WeightsRequest: Table(
        "/update_weights", {"path": "x"}, {"path": V("y")}, {"reset_prefix_cache": False}
    ),
    controls.LoadAdapterRequest: Table(
        "/v1/load_lora_adapter", {"lora_name": "a", "lora_path": "x"},
        {"lora_name": V("b"), "lora_path": V("y"), "wait": V(False)},
        {"load_inplace": False, "is_3d_lora_weight": True},
    ),
    controls.UnloadAdapterRequest: Table(
        "/v1/unload_lora_adapter", {"lora_name": "a"}, {"lora_name": V("b"), "wait": V(False)}, {"lora_int_id": 1}
    ),
}  # fmt: skip

# --- the tests --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server(tokenizer):
    backend = type(tokenizer.backend).from_str(tokenizer.backend.to_str())
    talker = Tokenizer(backend, bos=tokenizer.bos, eos=tokenizer.eos, add_bos=True, chat_template=TEMPLATE)

    async def engine():
        return Script(talker)

    options = dict(
        admin_key="boss", trust_request_chat_template=True, tool_call_parser="hermes", reasoning_parser="qwen3"
    )
    with (
        running(engine, talker, SizeWriter(), **options) as found,
        httpx.Client(headers={"authorization": "Bearer boss"}) as client,
    ):
        found.client = client
        yield found


def seen(server, path: str, body: dict[str, Any], says: str | None = None) -> tuple[Any, ...]:
    """Return the answer without its ids and times, and the engine's request."""
    engine = server.engine
    engine.texts, engine.asked, engine.called = [says] if says else [], [], []
    answer = server.client.post(server.url + path, json=body)
    text = re.sub(r'"(created|created_at|completed_at)":\d+|[0-9a-f]{12,}', "", answer.text)
    return answer.status_code, text, engine.asked, engine.called


def every(which: str) -> list[Any]:
    rows = ((kind, name) for kind, table in TABLES.items() for name in getattr(table, which))
    return [pytest.param(kind, name, id=f"{kind.__name__}.{name}") for kind, name in rows]


def models(kind: type[Body] = Body) -> set[type[Body]]:
    return {each for sub in kind.__subclasses__() for each in {sub, *models(sub)}}


def test_every_field_of_every_request_has_a_row():
    ours = {kind for kind in models() if kind.__module__.startswith("dovetail.serve.api.")}
    assert ours - {requests.GenerationRequest} == set(TABLES)
    for kind, table in TABLES.items():
        fields = {field.alias or name for name, field in kind.model_fields.items()}
        assert set(table.taken) == fields, kind.__name__
        assert set(table.refused) == set(kind.refused), kind.__name__
        assert set(table.ignored) == set(kind.ignored), kind.__name__


@pytest.mark.parametrize(("kind", "name"), every("taken"))
def test_a_field_that_is_taken_changes_the_result(server, kind, name):
    path, base, taken, _, wrap, _ = TABLES[kind]
    row = taken[name]
    says = row.says if isinstance(row, V) else None
    without = base | row.beside
    # Where it takes another field's place, it is compared with that one.
    before = seen(server, path, wrap(base if row.beside in (ONLY, ALONE, UNREAD) else without), says)
    after = seen(server, path, wrap(without | {name: row.value}), says)
    assert (before == after) == isinstance(row, Same), after
    assert before[0] == 200, before
    if name not in ("model", "type"):  # of these some have one right value, and any other is refused
        assert after[0] == 200, after


@pytest.mark.parametrize(("kind", "name"), every("refused"))
def test_a_known_unsupported_field_is_refused_by_name(server, kind, name):
    path, base, _, refused, wrap, _ = TABLES[kind]
    status, text, asked, called = seen(server, path, wrap(base | {name: refused[name]}))
    assert status == 400 and f"{name} is not supported" in text and not asked and not called, text
    if path.startswith("/v1/chat"):
        assert re.search(rf'"param":"[a-z_.0-9]*\b{name}"', text), text
    for accepted in (None, *kind.refused[name].accepted):  # a value that asks for nothing is not refused
        assert seen(server, path, wrap(base | {name: accepted})) == seen(server, path, wrap(base)), accepted


@pytest.mark.parametrize(("kind", "name"), every("ignored"))
def test_a_field_that_changes_no_answer_is_ignored_and_the_log_says_so_once(server, kind, name, caplog, monkeypatch):
    path, base, _, _, wrap, ignored = TABLES[kind]
    before = seen(server, path, wrap(base))
    monkeypatch.setattr(requests, "_logged", set())
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert seen(server, path, wrap(base | {name: ignored[name]})) == before
    (line,) = [record.getMessage() for record in caplog.records]
    assert f"{name!r} is ignored" in line and "'me'" not in line
    assert before[0] == 200, before
