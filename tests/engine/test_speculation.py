"""Speculative decoding: whatever a drafter proposes, the output is the one without it."""

from __future__ import annotations

import random
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from engine.engines import GREEDY, OPTIONS, make_llm, mixed_prompts, tokens_of, variant
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from refusals import refuses
from tune.small_models import model_folder

from dovetail.core.errors import UnsupportedError, UserError
from dovetail.engine.device.runner import Runner
from dovetail.engine.llm import LLM
from dovetail.engine.options import EngineOptions
from dovetail.engine.request.params import SamplingParams
from dovetail.engine.request.sequence import Request, Sequence, Status
from dovetail.engine.spec.draft_length import LEAST_MEASURED, PROBE_AFTER, DraftLength
from dovetail.engine.spec.ngram import NgramDrafter
from dovetail.engine.spec.speculator import Speculator
from dovetail.engine.spec.suffix import SuffixDrafter, SuffixTrie, likeliest

pytestmark = pytest.mark.slow

DRAFTS = 5
SAMPLED = SamplingParams(temperature=0.9, seed=3, max_tokens=24, ignore_eos=True)
PROMPTS = mixed_prompts(5)
CASES = {
    "greedy": replace(GREEDY, max_tokens=24),
    "sampled, n=3": replace(SAMPLED, n=3),
    "logprobs": replace(SAMPLED, logprobs=4),
    "penalties": replace(SAMPLED, presence_penalty=1.0, frequency_penalty=0.5, repetition_penalty=1.3),
    "truncation": replace(SAMPLED, top_k=20, top_p=0.9, min_p=0.02),
    "bias": replace(SAMPLED, logit_bias={5: 4.0, 7: -4.0}),
    "allowed tokens": replace(SAMPLED, allowed_token_ids=tuple(range(3, 60))),
    "min_tokens": replace(SAMPLED, ignore_eos=False, min_tokens=9),
    "stop token": replace(SAMPLED, stop_token_ids=(20, 40, 60, 80, 100, 120, 140)),
    "max_tokens=1": replace(SAMPLED, max_tokens=1),
}


class Replay:
    """Propose what the target will sample, each token replaced by another with a probability of `wrong`."""

    runs_ahead = False

    def __init__(self, outputs, wrong: float = 0.3, seed: int = 0):
        done = [(output, each) for output in outputs for each in output.outputs]
        self._answers = {(output.prompt_token_ids, each.index): each.token_ids for output, each in done}
        self._wrong, self._random = wrong, random.Random(seed)

    def propose(self, seq, most):
        answer = self._answers[seq.request.prompt, seq.index][len(seq.output) :]
        count = self._random.randint(0, most)
        guess = [*answer[:count], *(self._random.randrange(3, 160) for _ in range(count - len(answer)))]
        return tuple(t if self._random.random() >= self._wrong else self._random.randrange(3, 160) for t in guess)

    def finish(self, seq):
        pass


class Always(DraftLength):
    """Speculate at every step."""

    def choose(self, rows):
        return self.choices[-1]


def speculating(llm, outputs, wrong=0.3, seed=0, **how):
    engine = variant(llm, **how)
    engine.engine.speculator = Speculator(Replay(outputs, wrong, seed), Always((DRAFTS,)))
    return engine


def same(before, after):
    assert [[each.token_ids for each in output.outputs] for output in before] == [
        [each.token_ids for each in output.outputs] for output in after
    ]
    for a, b in zip(before, after, strict=True):
        for one, other in zip(a.outputs, b.outputs, strict=True):
            assert (one.finish_reason, one.stop_reason) == (other.finish_reason, other.stop_reason)
            if one.logprobs is not None:
                np.testing.assert_allclose(one.token_logprobs, other.token_logprobs, atol=2e-5)
                for x, y in zip(one.logprobs, other.logprobs, strict=True):
                    assert x.rank == y.rank and [token for token, _ in x.top] == [token for token, _ in y.top]


@pytest.fixture(scope="module")
def llm():
    made = make_llm("llama3.1", speculative_config={"num_speculative_tokens": DRAFTS})
    buckets, steps = made.runner.buckets, made.runner.steps
    steps.all([buckets.verify(8, DRAFTS)])  # a step that is not compiled is not waited for
    return made


@pytest.mark.parametrize("name", CASES)
def test_the_output_is_the_one_without_draft_tokens(llm, name):
    params = CASES[name]
    expected = variant(llm).generate(PROMPTS, params)
    engine = speculating(llm, expected)
    same(expected, engine.generate(PROMPTS, params))
    counts = engine.engine.stats().speculation
    assert counts.accepted_tokens <= counts.draft_tokens and sum(counts.accepted_per_pos) == counts.accepted_tokens
    assert params.max_tokens == 1 or 0 < counts.accepted_tokens < counts.draft_tokens


def test_right_draft_tokens_save_steps(llm):
    params = replace(GREEDY, max_tokens=24)
    plain = variant(llm)
    expected = plain.generate(PROMPTS[:1], params)
    engine = speculating(llm, expected, wrong=0.0)
    engine.engine.speculator.drafter._random = random.Random(1)
    same(expected, engine.generate(PROMPTS[:1], params))
    assert engine.engine.stats().steps < plain.engine.stats().steps


@settings(deadline=None, max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**20), wrong=st.floats(0, 1), pages=st.sampled_from([None, 60]))
def test_any_drafter(llm, seed, wrong, pages):
    """Proposals of any length and quality, with a pool that may be too small for all sequences."""
    rng = random.Random(seed)
    some = {"temperature": rng.choice([0.0, 0.7, 1.0]), "n": rng.choice([1, 2]), "seed": seed, "logprobs": 0}
    params = SamplingParams(**some, max_tokens=rng.randint(2, 30), presence_penalty=rng.choice([0.0, 0.8]))
    expected = variant(llm).generate(PROMPTS, params)
    same(expected, speculating(llm, expected, wrong, seed, pages=pages).generate(PROMPTS, params))


def test_preempted_sequences_and_prefix_hits(llm):
    params = replace(SAMPLED, n=2, max_tokens=40)
    expected = variant(llm).generate(PROMPTS, params)
    engine = speculating(llm, expected, pages=70)
    for _ in range(2):  # the second time, prompts and outputs are in the prefix cache
        same(expected, engine.generate(PROMPTS, params))
    assert engine.engine.stats().preemptions > 0 and engine.engine.stats().prefix_hit_tokens > 0


def test_a_request_can_turn_it_off(llm):
    params = replace(SAMPLED, speculation=False)
    expected = variant(llm).generate(PROMPTS, SAMPLED)
    engine = speculating(llm, expected)
    same(expected, engine.generate(PROMPTS, params))
    assert engine.engine.stats().speculation.draft_tokens == 0


def test_over_two_devices():
    llm = make_llm("llama3.1", speculative_config={"num_speculative_tokens": DRAFTS}, tensor_parallel_size=2)
    llm.runner.steps.all([llm.runner.buckets.verify(8, DRAFTS)])
    params = replace(SAMPLED, presence_penalty=1.0, logprobs=2)
    expected = variant(llm).generate(PROMPTS, params)
    engine = speculating(llm, expected)
    same(expected, engine.generate(PROMPTS, params))
    assert engine.engine.stats().speculation.accepted_tokens > 0


@pytest.mark.thorough
@pytest.mark.parametrize("family", ["deepseek-v3", "gemma3", "gpt-oss"])
def test_other_attention(family):
    """Sliding windows, latents and sinks."""
    llm = make_llm(family, speculative_config={"num_speculative_tokens": DRAFTS})
    llm.runner.steps.all([llm.runner.buckets.verify(8, DRAFTS)])
    expected = variant(llm).generate(PROMPTS, SAMPLED)
    engine = speculating(llm, expected)
    same(expected, engine.generate(PROMPTS, SAMPLED))
    assert engine.engine.stats().speculation.accepted_tokens > 0


@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_a_repetitive_prompt_needs_fewer_steps(method):
    """With the default options, which begin to speculate when steps have been measured."""
    llm = make_llm("llama3.1", speculative_config={"method": method}, max_num_seqs=2)
    llm.runner.steps.all([llm.runner.buckets.verify(1, drafts) for drafts in llm.runner.buckets.drafts])
    params = replace(GREEDY, max_tokens=60)
    (expected,) = tokens_of(variant(llm).generate([PROMPTS[0][:8]], params))
    prompt = [*PROMPTS[0][:8], *expected, *PROMPTS[0][:8]]  # the answer stands in the prompt
    answer = variant(llm).generate([prompt], params)
    llm.engine.speculator.length = Always(llm.runner.buckets.drafts)
    same(answer, llm.generate([prompt], params))
    assert llm.engine.stats().speculation.accepted_tokens > 0


TEXTS = {
    "JSON schema": dict(structured_outputs={"json": {"type": "object", "properties": {
        "name": {"type": "string", "maxLength": 8}, "ok": {"type": "boolean"}}, "required": ["name", "ok"]}}),
    "regular expression": dict(structured_outputs={"regex": "[a-d]{2,9}-[0-9]{3}"}),
    "choice": dict(structured_outputs={"choice": ("red", "green", "dark blue")}),
    "bad words": dict(bad_words=("ab", "the one", "say")),
    "stop string": dict(stop=("a", "th", "on")),
    "min_tokens and a mask": dict(min_tokens=12, allowed_token_ids=tuple(range(1, 120))),
    "grammar, penalties, logprobs": dict(structured_outputs={"regex": "([a-f]{1,3} ){1,9}"}, presence_penalty=1.5,
                                         logprobs=3),
}  # fmt: skip


@pytest.fixture(scope="module")
def text_llm(tmp_path_factory):
    folder = model_folder(tmp_path_factory.mktemp("speculation"))
    llm = LLM(folder, **OPTIONS, speculative_config={"num_speculative_tokens": DRAFTS})
    llm.runner.steps.all([llm.runner.buckets.verify(8, DRAFTS)])
    return llm


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("name", TEXTS)
def test_grammars_and_texts(text_llm, name, temperature):
    """Masks follow the draft tokens, and a grammar is rolled back to the accepted ones."""
    params = SamplingParams(temperature=temperature, max_tokens=30, seed=5, **TEXTS[name])
    prompts = ["say 5", "the one and the other", "<7>"]
    expected = variant(text_llm).generate(prompts, params)
    engine = speculating(text_llm, expected, wrong=0.2)
    found = engine.generate(prompts, params)
    same(expected, found)
    assert [each.outputs[0].text for each in found] == [each.outputs[0].text for each in expected]
    assert engine.engine.stats().speculation.accepted_tokens > 0


def test_decode_steps_of_a_grammar_alone_are_measured(text_llm, monkeypatch):
    """None is queued behind another, so each is measured from its planning on; else speculation would never begin."""
    monkeypatch.setattr(Runner, "is_compiling", False)  # beside a compiler none is
    engine, length = variant(text_llm), DraftLength((DRAFTS,))
    engine.engine.speculator = Speculator(NgramDrafter(2, 3), length)
    monkeypatch.setattr(length, "choose", lambda rows: 0)
    engine.generate("say 5", SamplingParams(max_tokens=12, structured_outputs={"regex": "[a-d]{12}"}))
    (measured,) = length._rows.values()
    assert measured.measured >= LEAST_MEASURED and measured.seconds[0] > 0


# --- drafters ---------------------------------------------------------------------------------------------------------


def sequence(tokens, id="a", index=0, prompt=1):
    seq = Sequence(Request(id, tuple(tokens[:prompt]), SamplingParams()), index)
    seq.tokens = list(tokens)
    return seq


def test_an_ngram_is_continued_as_it_was_last_time():
    drafter = NgramDrafter(2, 3)
    seq = sequence([1, 2, 3, 4, 9, 1, 2, 3, 5, 8, 7, 1, 2, 3])
    assert drafter.propose(seq, 3) == (5, 8, 7)
    seq.tokens += [5, 8]
    assert drafter.propose(seq, 9) == (7, 1, 2, 3, 5, 8)
    seq.tokens.append(50)
    assert drafter.propose(seq, 3) == ()
    assert drafter.propose(sequence([4]), 3) == () and drafter.propose(sequence([6, 6]), 3) == ()


def test_an_ngram_shorter_than_the_least_is_no_match():
    assert NgramDrafter(2, 4).propose(sequence([1, 2, 3, 9, 3]), 4) == ()
    assert NgramDrafter(1, 4).propose(sequence([1, 2, 3, 9, 3]), 4) == (9, 3)


def test_a_suffix_is_continued_by_what_followed_it_most_often():
    drafter = SuffixDrafter(factor=2.0)
    assert drafter.propose(sequence([1, 2, 3, 9, 1, 2, 3, 8, 1, 2, 4, 7, 1, 2]), 1) == (3,)
    assert drafter.propose(sequence([1, 2, 3, 1, 2], "short"), 1) == (3,)


def test_past_outputs_and_sequences_of_the_same_request_draft_too():
    drafter = SuffixDrafter()
    first = sequence([5, 11, 12, 13, 14, 15], "r", 0)
    drafter.propose(first, 4)
    sibling = sequence([5, 11, 12], "r", 1)
    assert drafter.propose(sibling, 4) == (13, 14, 15)
    other = sequence([6, 11, 12], "other")
    assert drafter.propose(other, 4) == ()
    first.status = Status.FINISHED
    drafter.finish(first)
    assert drafter.propose(sequence([6, 11, 12], "later"), 4) == (13, 14)  # as long as the match


def test_the_oldest_output_is_dropped():
    drafter = SuffixDrafter(cached=1)
    for tokens in ([1, 11, 12, 13], [1, 21, 22, 23]):
        drafter.finish(sequence(tokens))
    assert drafter.propose(sequence([2, 11, 12], "b"), 4) == ()
    assert drafter.propose(sequence([2, 21, 22], "c"), 4) == (23,)


@settings(deadline=None)
@given(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=12), min_size=1, max_size=4), st.integers(1, 5))
def test_a_trie_counts_every_substring(streams, depth):
    trie = SuffixTrie(depth)
    for tokens in streams:
        ends = []
        for token in tokens:
            ends = trie.extend(ends, token)
    for tokens in streams:
        for start in range(len(tokens)):
            part = tokens[start : start + depth]
            node = trie.root
            for token in part:
                node = node.children[token]
            found = sum(each[i : i + len(part)] == part for each in streams for i in range(len(each)))
            assert node.count == found
    for tokens in streams:
        trie.remove(tokens)
    assert not trie.root.children and trie.root.count == 0


def test_a_continuation_ends_where_it_becomes_improbable():
    trie, ends = SuffixTrie(4), []
    for token in [1, 2, 1, 2, 1, 3, 1, 4]:
        ends = trie.extend(ends, token)
    assert likeliest(trie.root.children[1], 2, 0.4) == ([2, 1], 1.0)
    assert likeliest(trie.root.children[1], 3, 0.6) == ([], 0.0)


# --- how many draft tokens --------------------------------------------------------------------------------------------


def test_decode_steps_are_measured_first():
    length = DraftLength((2, 4))
    assert length.choose(1) == 0
    length.measured(1, 0, 0.01 * LEAST_MEASURED, LEAST_MEASURED)
    assert length.choose(1) == 4 and length.choose(8) == 0  # each number of rows has its own step times


def test_it_turns_itself_off_and_tries_again():
    length = DraftLength((4,))
    length.measured(8, 0, 0.1, 10)
    for _ in range(60):
        length.measured(8, 4, 0.03)  # three times a decode step
        length.verified([1] * 8, 4)  # for 2 tokens per row
    assert length.choose(8) == 0
    length.measured(8, 0, 0.01 * PROBE_AFTER, PROBE_AFTER)
    assert length.choose(8) == 4
    length.measured(8, 4, 0.03)
    length.verified([4] * 8, 4)
    for _ in range(30):
        length.verified([4] * 8, 4)  # the text has changed: now it is worth it
    assert length.choose(8) == 4


def test_the_first_step_of_a_program_is_not_measured():
    length = DraftLength((4,))
    length.measured(1, 0, 0.1, 10)
    length.measured(1, 4, 1.0)  # with what is set up when it first runs
    assert length.choose(1) == 4
    length.measured(1, 4, 0.1)
    assert length.choose(1) == 0


def test_fewer_draft_tokens_where_the_later_ones_are_rejected():
    length = DraftLength((2, 6))
    length.measured(1, 0, 0.1, 10)
    for _ in range(60):
        length.measured(1, 2, 0.011)
        length.measured(1, 6, 0.014)
        length.verified([2], 6)
    assert length.choose(1) == 2
    assert length.tokens(6) == pytest.approx(3, abs=0.1)


@pytest.mark.parametrize(("streams", "wanted"), [(1, 4), (64, 4), (65, 0), (256, 0)])
def test_it_is_off_with_many_streams(streams, wanted):
    """A decode step is then limited by computing, so a verify step is never measured."""
    demand = SimpleNamespace(prompts=0, decoding=streams)
    scheduler = SimpleNamespace(demand=lambda: demand, config=SimpleNamespace(max_num_batched_tokens=2048))
    buckets = SimpleNamespace(decode=lambda count: SimpleNamespace(rows=count))
    runner = SimpleNamespace(buckets=buckets, drafts_ready=lambda rows, drafts: True)
    assert Speculator(NgramDrafter(2, 3), Always((4,))).wanted(scheduler, runner) == wanted


# --- options ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ("ngram", "speculative_config"),
        ([1], "speculative_config"),
        ({"method": "ngrm"}, "method"),
        ({"num_speculative_tokens": 0}, "num_speculative_tokens"),
        ({"num_draft_tokens": 3}, "num_draft_tokens"),
        ({"method": "suffix", "prompt_lookup_max": 3}, "speculative_config.prompt_lookup_max"),
        ({"prompt_lookup_min": 6}, "speculative_config.prompt_lookup_min"),
    ],
)
def test_a_wrong_config_is_refused_before_a_model_is_read(given, param):
    with refuses(param, UserError):
        EngineOptions(speculative_config=given)


@pytest.mark.parametrize(
    ("given", "param", "kind"),
    [
        ({"method": "medusa", "model": "x"}, "speculative_config.method", UnsupportedError),
        ({"method": "eagle3"}, "speculative_config.model", UserError),
        ({"method": "ngram", "model": "x"}, "speculative_config.model", UserError),
    ],
)
def test_methods_and_models_must_fit(given, param, kind):
    with refuses(param, kind):
        EngineOptions(speculative_config=given)


def test_json_text_is_read():
    options = EngineOptions(speculative_config='{"method": "suffix", "num_speculative_tokens": 3}')
    assert options.speculative_config.method == "suffix" and options.speculative_config.choices(7) == (3,)


@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_the_engine_process_gets_the_config(method):
    """`dovetail serve` sends the options to another process, with every key of the config."""
    msgspec = pytest.importorskip("msgspec")
    options = EngineOptions(speculative_config={"method": method, "num_speculative_tokens": 3})
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(options), type=EngineOptions) == options
