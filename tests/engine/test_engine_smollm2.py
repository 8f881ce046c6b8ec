"""The whole engine on SmolLM2-135M-Instruct: transformers' tokens, and features that need a tokenizer."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from engine.engines import GREEDY as LONGER
from engine.engines import OPTIONS, tokens_of, variant
from refusals import refuses
from smollm2_greedy import NEW, greedy_tokens, mixed_prompts

from dovetail.core.errors import RequestError
from dovetail.core.spec import held_bytes
from dovetail.engine.llm import LLM
from dovetail.engine.request.params import SamplingParams, StructuredOutputsParams

# 135 M parameters, compiled with all optimisations. `make test` asks the server's engine (tests/serve/api).
EVERY_PROGRAM = True
pytestmark = [pytest.mark.thorough, pytest.mark.usefixtures("optimised")]

GREEDY = replace(LONGER, max_tokens=NEW)
QUESTION = [{"role": "user", "content": "List ten animals and say one thing about each."}]


@pytest.fixture(scope="module")
def llm(smollm2_gguf) -> LLM:
    """An engine with few steps to compile. Activations stay in f32: rounded, they depend on the size of the batch."""
    return LLM(smollm2_gguf, **OPTIONS | dict(max_num_seqs=4, max_num_batched_tokens=32, quantization="gguf"))


@pytest.fixture(scope="module")
def prompts(llm) -> list[list[int]]:
    return mixed_prompts(llm.tokenizer)


@pytest.fixture(scope="module")
def expected(smollm2_gguf, tmp_path_factory, prompts) -> list[list[int]]:
    return greedy_tokens(smollm2_gguf, tmp_path_factory.mktemp("smollm2"), prompts)


@pytest.fixture(scope="module")
def question(llm) -> list[int]:
    return llm.tokenizer.encode_chat(QUESTION, add_generation_prompt=True)


@pytest.fixture(scope="module")
def answer(llm, question) -> str:
    return variant(llm).generate(question, replace(GREEDY, max_tokens=24))[0].outputs[0].text


def test_a_cpu_keeps_the_blocks_of_the_file(llm):
    params = llm.runner.weights.params
    assert params["embed"].format.name == "q8_0" and params["layers"][0]["attn"]["q+k+v"].format.name == "q4_1"
    assert held_bytes(params) < 98 * 2**20


def test_16_prompts_together(llm, prompts, expected):
    assert min(map(len, prompts)) == 3 and max(map(len, prompts)) == 100
    engine = variant(llm, caching=False, steps=1)
    assert tokens_of(engine.generate(prompts, GREEDY, progress=False)) == expected


def test_16_prompts_in_so_few_pages_that_some_are_preempted(llm, prompts, expected):
    engine = variant(llm, pages=32, steps=4)
    outputs = engine.generate(prompts, GREEDY, progress=False)
    assert tokens_of(outputs) == expected
    assert engine.engine.scheduler.stats().preemptions > 0 and 4 in engine.launched
    (again,) = engine.generate(prompts[-1:], GREEDY)
    assert tokens_of([again]) == expected[-1:] and again.num_cached_tokens > 0, "prefix caching is on"
    for output in outputs:
        tokenizer = llm.tokenizer
        whole = tokenizer.decode([*output.prompt_token_ids, *output.outputs[0].token_ids])
        assert whole == tokenizer.decode(output.prompt_token_ids) + output.outputs[0].text


def test_chat_and_stream_give_one_text(llm, question, answer):
    engine = variant(llm)
    asked = replace(GREEDY, max_tokens=24)
    assert engine.chat(QUESTION, asked, add_generation_prompt=True).outputs[0].text == answer
    updates = list(engine.stream(question, asked))
    assert len(updates) > 12 and "".join(update.text for update in updates) == answer
    assert answer == llm.tokenizer.decode([token for update in updates for token in update.token_ids])


def test_a_list_of_conversations_gives_a_list(llm, answer):
    engine = variant(llm)
    asked = replace(GREEDY, max_tokens=24)
    other = [{"role": "user", "content": "What is the capital of France?"}]
    found = engine.chat([other, QUESTION], asked)
    assert [output.outputs[0].text for output in found][1] == answer and "Paris" in found[0].outputs[0].text
    (one,) = engine.chat([QUESTION], [replace(asked, max_tokens=2)])
    assert len(one.outputs[0].token_ids) == 2
    for wrong in ([], "Hi", [QUESTION, QUESTION[0]], [["Hi"]], [5]):
        with refuses("messages", RequestError):
            engine.chat(wrong, asked)
    with refuses("sampling_params", RequestError):
        engine.chat(QUESTION, [asked, asked])


@pytest.mark.parametrize("steps", [1, 4])
def test_stop_strings(llm, question, answer, steps):
    stop = answer[30:37]  # over several tokens
    at = answer.index(stop)
    engine = variant(llm, steps=steps)
    asked = replace(GREEDY, max_tokens=24, stop=("never said", stop))
    cut, kept = (
        output.outputs[0]
        for output in engine.generate([question] * 2, [asked, replace(asked, include_stop_str_in_output=True)])
    )
    assert (cut.text, kept.text) == (answer[:at], answer[: at + len(stop)])
    assert {(one.finish_reason, one.stop_reason) for one in (cut, kept)} == {("stop", stop)}
    assert "".join(update.text for update in engine.stream(question, asked)) == answer[:at]


def test_a_stop_string_before_min_tokens_is_text(llm, question, answer):
    (done,) = variant(llm).generate(question, replace(GREEDY, max_tokens=24, min_tokens=24, stop=answer[30:37]))
    assert (done.outputs[0].text, done.outputs[0].finish_reason) == (answer, "length")
    streamed = variant(llm).stream(question, replace(GREEDY, max_tokens=24, min_tokens=23, stop=answer[30:37]))
    assert "".join(update.text for update in streamed) == answer


def test_the_end_token_is_not_in_the_text(llm):
    asked = llm.tokenizer.encode_chat(
        [{"role": "user", "content": "Say yes."}, {"role": "assistant", "content": "Yes."}]
    )
    prompt = asked[: max(i for i, token in enumerate(asked) if token in llm.engine.eos_ids)]
    (done,) = variant(llm).generate(prompt, SamplingParams(temperature=0, max_tokens=NEW))
    completion = done.outputs[0]
    assert completion.finish_reason == "stop" and completion.token_ids[-1] in llm.engine.eos_ids
    assert "<|" not in completion.text


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_structured_output(llm, question, temperature):
    base = SamplingParams(temperature=temperature, max_tokens=40, seed=3)
    colours = ("red", "green", "dark blue")
    each = [
        replace(base, structured_outputs=StructuredOutputsParams(regex=r"[A-Z][a-z]{2,8}, \d{2}/\d{4}")),
        replace(base, structured_outputs=StructuredOutputsParams(choice=colours)),
        replace(GREEDY, max_tokens=12),
    ]
    engine = variant(llm, steps=4)
    dated, chosen, free = (output.outputs[0] for output in engine.generate([question] * 3, each))
    assert re.fullmatch(r"[A-Z][a-z]{2,8}, \d{2}/\d{4}", dated.text) and dated.finish_reason == "stop"
    assert chosen.text in colours and chosen.finish_reason == "stop"
    assert len(free.token_ids) == 12


def test_bad_words_hold_within_a_grammar(llm, question):
    word = replace(GREEDY, structured_outputs=StructuredOutputsParams(choice=("yes", "no")), bad_words=("yes",))
    assert variant(llm).generate(question, word)[0].outputs[0].text == "no"


def test_tools_that_the_template_does_not_read_are_refused(llm):
    tools = [{"type": "function", "function": {"name": "now", "parameters": {}}}]
    with refuses("tools", RequestError):
        llm.chat([{"role": "user", "content": "What time is it?"}], GREEDY, tools=tools)


def test_bad_text_is_refused(llm, question, answer):
    engine = variant(llm)
    broken = replace(GREEDY, structured_outputs=StructuredOutputsParams(regex="("))
    for bad, params, param, code, naming in [
        ("", GREEDY, "prompt", None, ""),
        ("word " * 300, GREEDY, "prompt", "context_length_exceeded", "max_model_len=256"),
        ("x", broken, "structured_outputs", None, "llguidance"),
    ]:
        with refuses(param, RequestError, code=code, naming=naming):
            engine.generate(["hello", bad], [GREEDY, params])
        assert not engine.engine.has_work
    assert answer.startswith(engine.generate(question, GREEDY)[0].outputs[0].text)
