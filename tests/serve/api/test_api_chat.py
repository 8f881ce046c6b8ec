"""/v1/chat/completions and /v1/completions, driven by OpenAI's own client over loopback, with a real engine."""

from __future__ import annotations

import json
import math
import threading
import time

import httpx
import jsonschema
import pytest
from serve.servers import MODEL, SHORT_JSON

pytestmark = pytest.mark.slow

SKY = [{"role": "user", "content": "Why is the sky blue?"}]
SHORT = dict(model=MODEL, messages=SKY, temperature=0, max_tokens=10)
PARIS = dict(model=MODEL, prompt="The capital of France is", temperature=0, max_tokens=4)


def streamed(client, **asked):
    """The text, finish reason and chunks of each choice of a streamed chat."""
    texts, reasons, chunks = {}, {}, []
    for chunk in client.chat.completions.create(stream=True, **asked):
        chunks.append(chunk)
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + (choice.delta.content or "")
            if choice.finish_reason:
                reasons[choice.index] = choice.finish_reason
    return texts, reasons, chunks


def test_chat_whole_and_streamed_say_the_same(openai_client):
    whole = openai_client.chat.completions.create(**SHORT)
    (choice,) = whole.choices
    assert choice.finish_reason == "length" and choice.message.role == "assistant" and choice.message.content
    assert whole.usage.completion_tokens == 10 and whole.usage.prompt_tokens > 10 and whole.model == MODEL
    texts, reasons, chunks = streamed(openai_client, **SHORT, stream_options={"include_usage": True})
    assert texts == {0: choice.message.content} and reasons == {0: "length"}
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == 10
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert len({chunk.id for chunk in chunks}) == 1


def test_a_stop_string_across_tokens_ends_the_text_before_it(openai_client):
    text = openai_client.chat.completions.create(**SHORT).choices[0].message.content
    stop = text[9:14]  # it begins within a word
    cut = openai_client.chat.completions.create(**SHORT, stop=stop)
    assert cut.choices[0].message.content == text[: text.index(stop)]
    assert cut.choices[0].finish_reason == "stop" and cut.choices[0].stop_reason == stop
    assert cut.usage.completion_tokens < 10
    texts, reasons, _ = streamed(openai_client, **SHORT, stop=["never written", stop])
    assert (texts, reasons) == ({0: text[: text.index(stop)]}, {0: "stop"})
    whole = openai_client.chat.completions.create(**SHORT, stop=stop, extra_body={"include_stop_str_in_output": True})
    assert whole.choices[0].message.content == text[: text.index(stop) + len(stop)]


def test_n_answers_differ_and_a_seed_repeats_them(openai_client):
    asked = SHORT | dict(temperature=1.0, n=3, seed=5, max_tokens=6)
    first = [choice.message.content for choice in openai_client.chat.completions.create(**asked).choices]
    assert len(set(first)) == 3
    texts, reasons, _ = streamed(openai_client, **asked)
    assert [texts[i] for i in range(3)] == first and set(reasons) == {0, 1, 2}
    other = openai_client.chat.completions.create(**asked | {"seed": 6})
    assert [choice.message.content for choice in other.choices] != first


def test_logprobs_of_chat(openai_client):
    asked = SHORT | dict(logprobs=True, top_logprobs=2, max_tokens=6)
    choice = openai_client.chat.completions.create(**asked).choices[0]
    entries = choice.logprobs.content
    assert len(entries) == 6 and "".join(entry.token for entry in entries) == choice.message.content
    for entry in entries:
        assert len(entry.top_logprobs) == 2 and entry.top_logprobs[0].token == entry.token  # greedy
        assert entry.logprob <= 0 and bytes(entry.bytes).decode() == entry.token
    _, _, chunks = streamed(openai_client, **asked)
    parts = [c.logprobs.content for chunk in chunks for c in chunk.choices if c.logprobs]
    flat = [entry for part in parts for entry in part]
    assert [entry.token for entry in flat] == [entry.token for entry in entries]
    assert all(math.isclose(a.logprob, b.logprob, abs_tol=1e-3) for a, b in zip(flat, entries, strict=True))


def test_completion_echo_and_logprobs(openai_client):
    plain = openai_client.completions.create(**PARIS)
    assert plain.choices[0].text
    echoed = openai_client.completions.create(**PARIS, echo=True, logprobs=1)
    choice = echoed.choices[0]
    assert choice.text == PARIS["prompt"] + plain.choices[0].text
    assert "".join(choice.logprobs.tokens) == choice.text and choice.logprobs.token_logprobs[0] is None
    assert [choice.text[at] for at in choice.logprobs.text_offset] == [token[0] for token in choice.logprobs.tokens]
    scored = openai_client.completions.create(**PARIS | {"max_tokens": 0}, echo=True, logprobs=1).choices[0]
    assert (
        scored.text == PARIS["prompt"]
        and scored.logprobs.tokens == choice.logprobs.tokens[: len(scored.logprobs.tokens)]
    )
    chunks = list(openai_client.completions.create(**PARIS, echo=True, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == choice.text


def test_batches_and_token_ids_as_prompts(openai_client, tokenizer):
    prompts = [PARIS["prompt"], "One, two, three,"]
    apart = [openai_client.completions.create(**PARIS | {"prompt": p}).choices[0].text for p in prompts]
    both = openai_client.completions.create(**PARIS | {"prompt": prompts})
    assert [choice.text for choice in both.choices] == apart and [c.index for c in both.choices] == [0, 1]
    ids = [tokenizer.encode(prompt) for prompt in prompts]
    assert [c.text for c in openai_client.completions.create(**PARIS | {"prompt": ids}).choices] == apart
    one = openai_client.completions.create(**PARIS | {"prompt": ids[0]}, extra_body={"return_token_ids": True})
    assert one.choices[0].text == apart[0] and one.choices[0].prompt_token_ids == ids[0]
    assert tokenizer.decode(one.choices[0].token_ids) == apart[0]
    texts = ["", ""]
    for chunk in openai_client.completions.create(**PARIS | {"prompt": prompts}, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == apart


SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}, "people": {"type": "integer", "maximum": 9999}},
    "required": ["city", "people"],
    "additionalProperties": False,
}


def test_json_schema_and_object(openai_client):
    asked = dict(model=MODEL, messages=[{"role": "user", "content": "Paris, as JSON."}], max_tokens=64, temperature=0)
    asked["logit_bias"] = SHORT_JSON
    schema = {"type": "json_schema", "json_schema": {"name": "city", "schema": SCHEMA, "strict": True}}
    text = openai_client.chat.completions.create(**asked, response_format=schema).choices[0].message.content
    jsonschema.validate(json.loads(text), SCHEMA)
    streamed_text = streamed(openai_client, **asked, response_format=schema)[0][0]
    assert streamed_text == text


@pytest.mark.parametrize(
    ("structured", "check"),
    [
        ({"choice": ["yes", "no"]}, lambda text: text in ("yes", "no")),
        ({"regex": "[0-9]{4}"}, lambda text: text.isdigit() and len(text) == 4),
        ({"grammar": 'start: "a" "b"'}, lambda text: text == "ab"),
        ({"json": {"type": "integer", "minimum": 10, "maximum": 99}}, lambda text: 10 <= int(text) < 100),
    ],
)
def test_structured_outputs(openai_client, structured, check):
    answer = openai_client.chat.completions.create(**SHORT, extra_body={"structured_outputs": structured})
    assert check(answer.choices[0].message.content)


GREEDY_DIFFERENT = {
    "logit_bias": {"logit_bias": {"2": 42, "365": -100}},  # " ("
    "allowed_token_ids": {"extra_body": {"allowed_token_ids": [100, 200, 300]}},
    "repetition_penalty": {"extra_body": {"repetition_penalty": 5.0}},
    "min_tokens": {"extra_body": {"min_tokens": 12}},
    "ignore_eos": {"extra_body": {"ignore_eos": True}},
    "max_completion_tokens": {"max_completion_tokens": 3},
    "bad_words": {"extra_body": {"bad_words": [" (", " and", " I"]}},
    "stop_token_ids": {"extra_body": {"stop_token_ids": list(range(200, 2000))}},
}


# The end token is 57, 50, 65, 49 and 35 below the likeliest one: " (  and I" is the whole answer.
HI = dict(model=MODEL, messages=[{"role": "user", "content": "Hi"}], temperature=0, logit_bias={"2": 42})


@pytest.fixture(scope="module")
def plain(openai_client):
    return openai_client.chat.completions.create(**HI, max_tokens=12)


@pytest.mark.parametrize("name", GREEDY_DIFFERENT)
def test_each_parameter_changes_the_answer(openai_client, plain, name):
    assert plain.choices[0].finish_reason == "stop"
    most = {} if name == "max_completion_tokens" else {"max_tokens": 12}
    other = openai_client.chat.completions.create(**HI | most | GREEDY_DIFFERENT[name])
    answers = [(a.choices[0].message.content, a.usage.completion_tokens) for a in (plain, other)]
    assert answers[0] != answers[1], answers


def test_penalties_change_what_repeats(openai_client):
    asked = dict(model=MODEL, messages=[{"role": "user", "content": "Say: hi hi hi hi"}], temperature=0, max_tokens=20)
    penalties = ({}, {"presence_penalty": 2.0}, {"frequency_penalty": 2.0})
    answers = [openai_client.chat.completions.create(**asked, **penalty) for penalty in penalties]
    plain, *others = [answer.choices[0].message.content for answer in answers]
    assert plain not in others


@pytest.mark.parametrize("extra", [{"top_k": 1}, {"min_p": 1.0}, {"top_p": 1e-6}])
def test_a_choice_of_one_token_is_greedy(openai_client, extra):
    hot = SHORT | {"temperature": 2.0, "seed": 3, "max_tokens": 5}
    greedy = openai_client.chat.completions.create(**SHORT | {"max_tokens": 5}).choices[0].message.content
    assert openai_client.chat.completions.create(**hot).choices[0].message.content != greedy
    assert openai_client.chat.completions.create(**hot, extra_body=extra).choices[0].message.content == greedy


def test_prompt_logprobs_and_token_ids(openai_client):
    extra = {"prompt_logprobs": 1, "return_token_ids": True}
    answer = openai_client.chat.completions.create(**SHORT, extra_body=extra)
    assert len(answer.prompt_logprobs) == len(answer.prompt_token_ids) == answer.usage.prompt_tokens
    assert answer.prompt_logprobs[0] is None
    assert str(answer.prompt_token_ids[1]) in answer.prompt_logprobs[1]
    assert len(answer.choices[0].token_ids) == 10


def test_cached_tokens_are_reported(openai_client):
    long = [{"role": "user", "content": "word " * 100}]
    for _ in range(2):
        usage = openai_client.chat.completions.create(**SHORT | {"messages": long, "max_tokens": 1}).usage
    assert usage.prompt_tokens_details.cached_tokens > 50


def test_a_salt_keeps_prefixes_apart(openai_client):
    long = [{"role": "user", "content": "salt " * 100}]

    def cached(**extra):
        answer = openai_client.chat.completions.create(
            **SHORT | {"messages": long, "max_tokens": 1}, extra_body=extra or None
        )
        return answer.usage.prompt_tokens_details.cached_tokens

    assert cached(cache_salt="mine") == 0
    assert cached(cache_salt="mine") > 50
    assert cached(cache_salt="yours") == 0 and cached() < 50  # every prompt shares the template's first words


def test_special_tokens_are_shown_on_request(openai_client):
    asked = SHORT | dict(max_tokens=4, logit_bias={"2": 100})
    hidden, shown = (
        openai_client.chat.completions.create(
            **asked, extra_body={"ignore_eos": True, "skip_special_tokens": skip}
        ).choices[0].message.content
        for skip in (True, False)
    )  # fmt: skip
    assert "<|im_end|>" in shown and "<|im_end|>" not in hidden


def test_an_urgent_request_overtakes(openai_client, real):
    """Nine requests wait, the most urgent comes last, and the batch has room for eight."""
    ended, lock = [], threading.Lock()

    def ask(name: str, priority: int):
        openai_client.completions.create(
            **PARIS | {"max_tokens": 6, "prompt": f"{name}, two, three,"},
            extra_body={"priority": priority, "ignore_eos": True},
        )
        with lock:
            ended.append(name)

    def tell(command: str):  # the engine itself: a server that knows of a pause takes no requests
        real.run(real.engine._supervisor.child.call(command))

    tell("pause")
    threads = []
    for i in range(9):
        threads.append(threading.Thread(target=ask, args=(f"n{i}", 0 if i == 8 else 5)))
        threads[-1].start()
        while len(real.app.state.service.inflight) <= i and threads[-1].is_alive():
            time.sleep(0.01)
    tell("resume")
    for thread in threads:
        thread.join(60)
    assert len(ended) == 9 and ended[-1] == "n7", ended


def test_continue_final_message_goes_on_with_it(openai_client):
    messages = [*SKY, {"role": "assistant", "content": "The sky is blue because"}]
    extra = {"continue_final_message": True, "add_generation_prompt": False, "return_token_ids": True}
    answer = openai_client.chat.completions.create(**SHORT | {"messages": messages}, extra_body=extra)
    assert answer.choices[0].message.content.startswith(" ")


def test_embeddings(openai_client):
    found = openai_client.embeddings.create(model=MODEL, input=["A cat.", "A kitten.", "Stock prices fell."])
    vectors = [item.embedding for item in found.data]
    assert len(vectors[0]) == 576 and found.usage.prompt_tokens > 5
    near, far = (sum(a * b for a, b in zip(vectors[0], vectors[i], strict=True)) for i in (1, 2))
    assert near > far
    last = openai_client.embeddings.create(model=MODEL, input="A cat.", extra_body={"pooling": "last"})
    assert last.data[0].embedding != vectors[0]
    plain = openai_client.embeddings.create(model=MODEL, input="A cat.", encoding_format="float").data[0].embedding
    assert plain == pytest.approx(vectors[0], abs=1e-3)


def test_of_two_limits_the_newer_name_counts(scripted):
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 5, "max_completion_tokens": 2}
    scripted.engine.texts = ["one two three four"] * 2
    answers = [
        httpx.post(f"{scripted.url}/v1/chat/completions", json=body | more).json() for more in ({}, {"max_tokens": 1})
    ]
    assert [answer["usage"]["completion_tokens"] for answer in answers] == [2, 2]


def test_an_assistants_message_may_have_no_content(scripted):
    """Clients send this back after an answer that was truncated before its text."""
    talk = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": None},
        {"role": "user", "content": "Well?"},
    ]
    for path, body in (("chat/completions", {"messages": talk}), ("responses", {"input": talk})):
        assert httpx.post(f"{scripted.url}/v1/{path}", json=body).status_code == 200
        assert "<|im_start|>assistant\n<|im_end|>" in scripted.engine.asked[-1][0]
    nothing = httpx.post(f"{scripted.url}/v1/chat/completions", json={"messages": [{"role": "user", "content": None}]})
    assert nothing.status_code == 400 and "messages.0.content is missing" in nothing.text
