"""The whole engine on tiny random models: its tokens equal transformers', for every division of the work."""

from __future__ import annotations

import itertools
import time
from dataclasses import replace

import numpy as np
import pytest
from corners import corners
from engine.engines import GREEDY, NEW, OPTIONS, PAGE, log_softmax, make_llm, mixed_prompts, theirs, tokens_of, variant
from reference_models import reference
from refusals import refuses

import dovetail as dt
from dovetail.core.errors import OutOfMemoryError, RequestError
from dovetail.engine.llm import LLM
from dovetail.engine.request.params import SamplingParams
from dovetail.models.spec import kv_bytes_per_token

pytestmark = pytest.mark.slow  # some forty compiled steps
PROMPTS = mixed_prompts(64)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return make_llm("llama3.1")


@pytest.fixture(scope="module")
def model():
    return reference("llama3.1")[0]


@pytest.fixture(scope="module")
def expected(model) -> list[list[int]]:
    return [theirs(model, prompt) for prompt in PROMPTS]


def check_clean(llm: LLM) -> None:
    """Assert that no request, page or step is left."""
    scheduler = llm.engine.scheduler
    assert not llm.engine.has_work and not scheduler.has_work and not llm.engine._requests
    assert scheduler.stats().pages_used == 0


# --- the right tokens -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("caching", "steps"), corners(itertools.product((True, False), (1, 4)), [(True, 4), (False, 1)])
)
def test_64_prompts_together(llm, expected, caching, steps):
    engine = variant(llm, caching=caching, steps=steps)
    assert tokens_of(engine.generate(PROMPTS, GREEDY, progress=False)) == expected
    assert set(engine.launched) == {1, steps}
    stats = engine.engine.scheduler.stats()
    assert stats.preemptions == 0 and stats.prefix_hit_tokens == 0
    again = engine.generate(PROMPTS[-4:], GREEDY)
    assert tokens_of(again) == expected[-4:]
    found = [output.num_cached_tokens for output in again]
    assert found == ([(len(prompt) - 1) // PAGE * PAGE for prompt in PROMPTS[-4:]] if caching else [0] * 4)
    check_clean(engine)


@pytest.mark.parametrize(
    ("caching", "steps"),
    [(True, 4), pytest.param(True, 1, marks=pytest.mark.thorough), pytest.param(False, 4, marks=pytest.mark.thorough)],
)
def test_64_prompts_in_so_few_pages_that_some_are_preempted(llm, expected, caching, steps):
    engine = variant(llm, pages=48, caching=caching, steps=steps)
    assert tokens_of(engine.generate(PROMPTS, GREEDY, progress=False)) == expected
    assert engine.engine.scheduler.stats().preemptions > 0
    check_clean(engine)


@pytest.mark.thorough
def test_kv_bytes_and_the_engines_own_number_of_steps(model, expected):
    page_bytes = kv_bytes_per_token(dt.load(reference("llama3.1")[1]).config, 4) * PAGE
    small = make_llm("llama3.1", kv_cache_memory_bytes=48 * page_bytes + 1)
    assert small.engine.scheduler.config.num_pages == 48 and "48 KV pages of 4 tokens" in small.describe()
    assert tokens_of(small.generate(PROMPTS[:32], GREEDY, progress=True)) == expected[:32]
    assert small.engine.scheduler.stats().preemptions > 0
    with refuses(None, OutOfMemoryError):
        make_llm("llama3.1", kv_cache_memory_bytes=page_bytes)


def test_a_new_request_does_not_wait_for_a_multi_step_dispatch(llm, monkeypatch):
    own = variant(llm)
    del own.engine._steps_wanted  # the engine's own choice again
    engine, many = own.engine, SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)

    def launched(steps: int) -> list[int]:
        own.launched.clear()
        for _ in range(steps):
            engine.step()
            engine.pace.decode_seconds = 1e-3  # whatever the machine's pace
            while own.runner.is_compiling:  # until then one step a dispatch is taken
                time.sleep(0.01)
        return own.launched[:]

    monkeypatch.setattr("dovetail.engine.engine.QUIET_SECONDS", 1e9)
    engine.add("first", [5, 6, 7], many)
    assert max(launched(4)) > 1  # no new request: alone it takes several steps per dispatch
    engine.add("second", [7, 8, 9], many)
    assert launched(4) == [1, 1, 1, 1]
    monkeypatch.setattr("dovetail.engine.engine.QUIET_SECONDS", 0)
    assert max(launched(4)) > 1
    engine.abort("first"), engine.abort("second")
    engine.drain()


OTHER_KINDS = ("deepseek-v3", "gpt-oss", "gemma4-per-layer", "phi4-mini", "granite4", "glm4")


@pytest.mark.parametrize(
    "name",
    corners(["gemma3", *OTHER_KINDS], []),
)
def test_other_kinds_of_attention(name):
    """A sliding window, latent attention, sinks, layers that share keys and values, heads of which a part turns, scaled
    residuals and logits."""
    prompts = mixed_prompts(10, seed=1)
    expected = [theirs(reference(name)[0], prompt) for prompt in prompts]
    engine = variant(make_llm(name), pages=44, steps=4)
    assert tokens_of(engine.generate(prompts, GREEDY)) == expected
    assert engine.engine.scheduler.stats().preemptions > 0 and 4 in engine.launched
    engine = variant(engine, caching=False, steps=1)
    assert tokens_of(engine.generate(prompts[:3], GREEDY)) == expected[:3]
    check_clean(engine)


@pytest.mark.thorough
def test_longrope_within_the_original_context():
    """Within it, transformers uses the short factors, and so does an engine with such a max_model_len."""
    model, folder = reference("phi4-mini", original_max_position_embeddings=200)
    prompts = mixed_prompts(3, seed=2)
    assert max(map(len, prompts)) + NEW <= 200
    engine = LLM(folder, **OPTIONS | {"max_model_len": 200})
    assert tokens_of(engine.generate(prompts, GREEDY)) == [theirs(model, prompt) for prompt in prompts]


# --- sampling ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [4, pytest.param(1, marks=pytest.mark.thorough)])
def test_a_seeded_request_gives_the_same_alone_and_among_others(llm, steps):
    asked = SamplingParams(temperature=1.2, top_p=0.95, seed=7, max_tokens=20, ignore_eos=True)
    (alone,) = tokens_of(variant(llm).generate(PROMPTS[0], asked))
    assert tokens_of(variant(llm).generate(PROMPTS[0], replace(asked, seed=8))) != [alone]
    others = [replace(asked, seed=None), replace(asked, presence_penalty=1.0, seed=3), GREEDY]
    each = [asked if i == 5 else others[i % 3] for i in range(12)]
    prompts = [*PROMPTS[1:6], PROMPTS[0], *PROMPTS[6:12]]
    engine = variant(llm, pages=44, steps=steps)
    among = tokens_of(engine.generate(prompts, each))
    assert among[5] == alone and engine.engine.scheduler.stats().preemptions > 0
    assert among[2] == theirs(reference("llama3.1")[0], prompts[2]), "greedy rows of a sampled batch"


@pytest.mark.parametrize("caching", [True, False])
def test_n_samples_differ_and_share_their_prompts_pages(llm, caching):
    engine = variant(llm, caching=caching).engine
    prompt = PROMPTS[0][:30]
    engine.add("a", prompt, SamplingParams(n=3, temperature=1.5, max_tokens=NEW, seed=1, ignore_eos=True))
    engine.step()
    running = engine.scheduler.running
    assert len(running) == 3 and len({tuple(seq.pages[: 29 // PAGE]) for seq in running}) == 1
    while not engine.is_done("a"):
        engine.step()
    completions = engine.output("a").outputs
    assert [c.index for c in completions] == [0, 1, 2] and len({c.token_ids for c in completions}) == 3
    assert {len(c.token_ids) for c in completions} == {NEW}


def test_logprobs(llm, model, expected):
    asked = replace(GREEDY, logprobs=3)
    for steps in (1, 4):
        output = variant(llm, steps=steps).generate([PROMPTS[0], PROMPTS[1]], [asked, GREEDY])[0]
        completion = output.outputs[0]
        assert list(completion.token_ids) == expected[0] and completion.logprobs is not None
        rows = log_softmax(model, [*PROMPTS[0], *expected[0]])[len(PROMPTS[0]) - 1 : -1]
        for token, entry, row in zip(expected[0], completion.logprobs, rows, strict=True):
            best = np.argsort(-row)[:3]
            assert (entry.token, entry.rank) == (token, 1) and [id for id, _ in entry.top] == best.tolist()
            np.testing.assert_allclose(
                [entry.logprob, *(value for _, value in entry.top)], row[[token, *best]], atol=1e-4
            )
    assert variant(llm).generate(PROMPTS[1], GREEDY)[0].outputs[0].logprobs is None


@pytest.mark.parametrize("pages", [None, 44])
def test_prompt_logprobs(llm, model, pages):
    prompts, asked = PROMPTS[:12], replace(GREEDY, max_tokens=30)
    assert max(map(len, prompts)) > 64, "more than a chunk"
    engine = variant(llm, pages=pages)
    engine.generate(prompts[:2], asked)  # what lies in the cache must be scored all the same
    outputs = engine.generate(prompts, replace(asked, prompt_logprobs=2))
    if pages is not None:
        assert engine.engine.scheduler.stats().preemptions > 0
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.prompt_logprobs is not None and output.prompt_logprobs[0] is None
        assert list(output.outputs[0].token_ids[:NEW]) == theirs(model, prompt)
        for token, entry, row in zip(prompt[1:], output.prompt_logprobs[1:], log_softmax(model, prompt), strict=False):
            assert entry is not None and entry.token == token and len(entry.top) == 2
            assert entry.top[0][0] == row.argmax() and entry.rank == 1 + (row > row[token]).sum()
            np.testing.assert_allclose([entry.logprob, entry.top[0][1]], [row[token], row.max()], atol=1e-4)
        assert len(output.prompt_logprobs) == len(prompt)


def test_a_prompt_of_one_token_has_no_logprob(llm):
    output = variant(llm).generate([5], replace(GREEDY, prompt_logprobs=0))[0]
    assert output.prompt_logprobs == (None,) and len(output.outputs[0].token_ids) == NEW


# --- where an answer ends ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [1, 4])
def test_stop_token_ids(llm, expected, steps):
    stop = expected[0][5]
    end = expected[0].index(stop) + 1
    done = variant(llm, steps=steps).generate(PROMPTS[:3], replace(GREEDY, stop_token_ids=(stop,)))
    first = done[0].outputs[0]
    assert list(first.token_ids) == expected[0][:end]
    assert (first.finish_reason, first.stop_reason) == ("stop", stop)
    free = [i for i in (1, 2) if stop not in expected[i]]
    assert free, "choose a token that one of them has not"
    for i in free:
        assert list(done[i].outputs[0].token_ids) == expected[i]
        assert (done[i].outputs[0].finish_reason, done[i].outputs[0].stop_reason) == ("length", None)


def test_the_end_token_and_min_tokens(expected):
    """The end token is another one, because this model never samples its own."""
    at, end = next((i, tokens[-4]) for i, tokens in enumerate(expected) if tokens.index(tokens[-4]) > 1)
    model, folder = reference("llama3.1", eos_token_id=end)
    prompt, where = PROMPTS[at], expected[at].index(end)
    engine = variant(LLM(folder, **OPTIONS), steps=4)
    (done,) = engine.generate(prompt, replace(GREEDY, ignore_eos=False))
    assert list(done.outputs[0].token_ids) == expected[at][: where + 1]
    assert (done.outputs[0].finish_reason, done.outputs[0].stop_reason) == ("stop", None)
    least = where + 2
    (later,) = engine.generate(prompt, replace(GREEDY, ignore_eos=False, min_tokens=least))
    assert list(later.outputs[0].token_ids) == theirs(model, prompt, min_new_tokens=least)
    assert end not in later.outputs[0].token_ids[:least]


def test_max_tokens_and_the_models_length(llm):
    outputs = variant(llm, steps=4).generate(
        [PROMPTS[0], PROMPTS[0], [7] * 250], [replace(GREEDY, max_tokens=n) for n in (1, 6, None)]
    )
    assert [len(output.outputs[0].token_ids) for output in outputs] == [1, 6, 256 - 250]
    assert {output.outputs[0].finish_reason for output in outputs} == {"length"}


def test_allowed_token_ids_and_logit_bias(llm, model, expected):
    first = log_softmax(model, PROMPTS[0])[-1]
    allowed = [9, 30, 77]
    each = [
        replace(GREEDY, allowed_token_ids=allowed),
        replace(GREEDY, logit_bias={50: 100.0}),
        replace(GREEDY, logit_bias={expected[0][0]: -100.0}),
        replace(GREEDY, temperature=1.0, allowed_token_ids=allowed, min_tokens=4),
    ]
    only, always, never, sampled = tokens_of(variant(llm, steps=4).generate([PROMPTS[0]] * 4, each))
    assert set(only) <= set(allowed) and only[0] == max(allowed, key=lambda token: first[token])
    assert always == [50] * NEW
    assert expected[0][0] not in never and never[0] == first.argsort()[-2]
    assert set(sampled) <= set(allowed)


# --- coming and going -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("before", [0, 1, 2, 5])
def test_abort_in_the_middle_frees_pages(llm, expected, before):
    engine = variant(llm, steps=4).engine
    for i in range(3):
        engine.add(str(i), PROMPTS[i], replace(GREEDY, n=2 if i == 0 else 1))
    for _ in range(before):
        engine.step()
    engine.abort("0")
    engine.abort("no such request")
    assert all(seq.request.id != "0" for seq in engine.scheduler.running)
    while engine.has_work:
        engine.step()
    assert [list(engine.output(str(i)).outputs[0].token_ids) for i in (1, 2)] == expected[1:3]
    assert engine.scheduler.stats().pages_used == 0 and not engine._requests


def test_stream(llm, expected):
    engine = variant(llm, steps=4)
    updates = list(engine.stream(PROMPTS[0], GREEDY))
    assert [token for update in updates for token in update.token_ids] == expected[0]
    assert [update.finished for update in updates] == [False] * (len(updates) - 1) + [True]
    for update in engine.stream(PROMPTS[0], GREEDY):
        assert not update.finished
        break
    engine.engine.drain()
    check_clean(engine)


def test_update_weights(llm, expected):
    engine = LLM(reference("llama3.1")[1], **OPTIONS)
    before = engine.generate(PROMPTS[:2], GREEDY)
    params = dt.load(reference("llama3.1")[1]).params
    params = {**params, "embed": params["embed"][::-1]}
    version = engine.update_weights(params)
    after = engine.generate(PROMPTS[:2], GREEDY)
    assert tokens_of(before) == expected[:2] and tokens_of(after) != expected[:2]
    assert [o.outputs[0].weights_version for o in (before[0], after[0])] == [0, version] == [0, 1]
    assert [o.num_cached_tokens for o in after] == [0, 0], "what the old weights computed is not found again"


# --- bad requests -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "code"),
    [
        ([], None),
        ([5] * 256, "context_length_exceeded"),
        ([5, 160], None),
        ([5, -1], None),
        ([5, 1.5], None),
        ([5, "a"], None),
        (None, None),
        ("text", None),
    ],
)
def test_a_bad_prompt_is_refused_and_other_requests_go_on(llm, expected, prompt, code):
    engine = variant(llm)
    with refuses("prompt", RequestError, code=code):
        engine.generate([PROMPTS[0], prompt, PROMPTS[1]], GREEDY)
    check_clean(engine)
    engine.engine.add("good", PROMPTS[0], GREEDY)
    engine.engine.step()
    with refuses("prompt", RequestError, code=code):
        engine.engine.add("bad", prompt, GREEDY)
    while not engine.engine.is_done("good"):
        engine.engine.step()
    assert list(engine.engine.output("good").outputs[0].token_ids) == expected[0]
    assert tokens_of(engine.generate(PROMPTS[1], GREEDY)) == [expected[1]]


def test_other_bad_requests_are_refused(llm):
    engine = variant(llm, pages=8)
    for bad in (dict(stop="x"), dict(logit_bias={160: 1.0}), dict(bad_words=["x"])):
        with refuses(next(iter(bad)), RequestError):
            engine.generate([PROMPTS[0][:8]] * 2, [GREEDY, SamplingParams(**bad)])
    with refuses("prompt", RequestError, code="context_length_exceeded", naming="8 pages"):
        engine.generate([[5] * 8, [5] * 40], replace(GREEDY, n=2))
    for params in ([GREEDY, None], {"temperature": 0}):
        with refuses("sampling_params", RequestError):
            engine.generate([[5], [6]], params)
    for prompts in (None, 5, {5}, b"abc", (n for n in [5])):
        with refuses("prompt" if prompts == b"abc" else "prompts", RequestError):
            engine.generate(prompts, GREEDY)
    for prompts in ([[5], [6]], []):
        with refuses("prompt", RequestError):
            next(engine.stream(prompts, GREEDY))
    with refuses("min_tokens", RequestError, naming="248"):
        engine.generate([[5] * 8], replace(GREEDY, max_tokens=None, min_tokens=250))
    for arrival in (float("nan"), "now"):
        with refuses("arrival", RequestError):
            engine.engine.add("late", [5], GREEDY, arrival=arrival)
    check_clean(engine)
    with refuses("sampling_params", RequestError, naming="got 1 for 2"):
        engine.generate([[5], [6]], [GREEDY])
    engine.engine.add("a", [5], GREEDY)
    with refuses("request_id", RequestError, naming="'a'"):
        engine.engine.add("a", [6], GREEDY)
    engine.engine.abort("a")
    check_clean(engine)
    assert engine.generate([], GREEDY) == []


def test_ids_may_be_numpys(llm, expected):
    prompt = np.array(PROMPTS[0])
    assert tokens_of(variant(llm).generate(prompt, GREEDY)) == expected[:1]
    assert tokens_of(variant(llm).generate([prompt, PROMPTS[1]], GREEDY)) == expected[:2]
