"""Speculation with the real drafters: the outputs are those without it, in batches of every kind."""

from __future__ import annotations

from dataclasses import replace

import pytest
from engine.engines import GREEDY, OPTIONS, make_llm, mixed_prompts, variant
from engine.test_adapters import saved
from engine.test_speculation import Always, same
from tune.small_models import model_folder

from dovetail.engine.llm import LLM
from dovetail.engine.request.params import SamplingParams
from dovetail.engine.spec.ngram import NgramDrafter
from dovetail.engine.spec.speculator import Speculator
from dovetail.engine.spec.suffix import SuffixDrafter

DRAFTS = 3
PROMPTS = [3 * prompt for prompt in mixed_prompts(6, 8, 24)]  # with n-grams that occur before
SAMPLED = SamplingParams(temperature=0.4, seed=7, max_tokens=32, ignore_eos=True)
DRAFTERS = {"ngram": lambda: NgramDrafter(1, 4), "suffix": SuffixDrafter}
CASES = {
    "greedy": replace(GREEDY, max_tokens=32),
    "sampled, n=3": replace(SAMPLED, n=3),
    "logprobs": replace(SAMPLED, logprobs=3),
    "penalties": replace(SAMPLED, presence_penalty=0.5, repetition_penalty=1.1),
    "stop tokens": replace(SAMPLED, stop_token_ids=tuple(range(0, 160, 9))),
}


def speculating(llm: LLM, method: str, **how) -> LLM:
    engine = variant(llm, **how)
    engine.engine.speculator = Speculator(DRAFTERS[method](), Always((DRAFTS,)))
    return engine


def compiled(llm: LLM) -> LLM:
    """Compile the verify steps: one that is not compiled is not waited for."""
    llm.runner.steps.all([llm.runner.buckets.verify(rows, DRAFTS) for rows in (1, 2, 4, 8)])
    return llm


@pytest.fixture(scope="module")
def llm(tmp_path_factory) -> LLM:
    at = tmp_path_factory.mktemp("adapters")
    folders = {name: saved(at / name, "llama3.1", rank, rank) for name, rank in (("a", 4), ("b", 7))}
    config = {"num_speculative_tokens": DRAFTS}
    return compiled(make_llm("llama3.1", lora_modules=folders, speculative_config=config))


@pytest.mark.parametrize("method", DRAFTERS)
@pytest.mark.parametrize("name", CASES)
def test_rows_with_different_adapters(llm, name, method):
    params, adapters = CASES[name], [None, "a", "b", "a", None, "b"]
    expected = variant(llm).generate(PROMPTS, params, adapter=adapters)
    engine = speculating(llm, method)
    found = engine.generate(PROMPTS, params, adapter=adapters)
    same(expected, found)
    counts = engine.engine.stats().speculation
    each = [one.spec_decode_metrics for output in found for one in output.outputs if one.spec_decode_metrics]
    assert 0 < counts.drafts == sum(one.num_spec_steps for one in each)
    assert counts.draft_tokens == sum(one.num_draft_tokens for one in each)
    assert counts.accepted_tokens <= sum(one.num_accepted_draft_tokens for one in each)  # some follow a stop


@pytest.mark.parametrize("method", DRAFTERS)
def test_prefix_hits_and_preempted_sequences(llm, method):
    params = replace(CASES["greedy"], max_tokens=48)
    expected = variant(llm).generate(PROMPTS, params)
    engine = speculating(llm, method, pages=70)
    for _ in range(2):  # the second time, prompts and outputs are in the prefix cache
        same(expected, engine.generate(PROMPTS, params))
    stats = engine.engine.stats()
    assert stats.preemptions > 0 and stats.prefix_hit_tokens > 0 and stats.speculation.accepted_tokens > 0


@pytest.mark.parametrize("method", DRAFTERS)
@pytest.mark.parametrize(
    "params",
    [
        pytest.param(dict(stop=("th", "on", "a"), include_stop_str_in_output=True), id="stop strings"),
        pytest.param(dict(stop=("e",), min_tokens=6), id="stop string and min_tokens"),
        pytest.param(dict(structured_outputs={"regex": "(the one and ){3}[a-c]{2}"}), id="grammar"),
    ],
)
def test_texts_that_end_inside_a_block(text_llm, method, params):
    asked = SamplingParams(temperature=0.4, seed=2, max_tokens=40, **params)
    prompts = ["the one and the other and the one and", "on and on and on and on"]
    expected = variant(text_llm).generate(prompts, asked)
    engine = speculating(text_llm, method)
    found = engine.generate(prompts, asked)
    same(expected, found)
    assert [each.outputs[0].text for each in found] == [each.outputs[0].text for each in expected]


@pytest.fixture(scope="module")
def text_llm(tmp_path_factory) -> LLM:
    folder = model_folder(tmp_path_factory.mktemp("drafters"))
    return compiled(LLM(folder, **OPTIONS, speculative_config={"num_speculative_tokens": DRAFTS}))


@pytest.mark.thorough
def test_over_two_devices():
    config = {"num_speculative_tokens": DRAFTS}
    llm = compiled(make_llm("llama3.1", speculative_config=config, tensor_parallel_size=2))
    expected = variant(llm).generate(PROMPTS, CASES["greedy"])
    for method in DRAFTERS:
        engine = speculating(llm, method)
        same(expected, engine.generate(PROMPTS, CASES["greedy"]))
        assert engine.engine.stats().speculation.accepted_tokens > 0


# --- refresh ----------------------------------------------------------------------------------------------------------


def test_a_refresh_drops_what_was_learned_before_the_last_one():
    from engine.test_speculation import sequence

    drafter = SuffixDrafter()
    for tokens in ([1, 11, 12, 13], [1, 21, 22, 23]):
        drafter.finish(sequence(tokens))
        drafter.refresh()
    assert drafter.propose(sequence([2, 11, 12], "b"), 4) == ()
    assert drafter.propose(sequence([2, 21, 22], "c"), 4) == (23,)
    drafter.refresh()
    assert drafter.propose(sequence([2, 21, 22], "d"), 4) == ()
