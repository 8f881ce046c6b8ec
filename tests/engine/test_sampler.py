"""The sampler's host side, checked through the sampled tokens."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from refusals import refuses

from dovetail.core.errors import RequestError
from dovetail.engine.device import sampler as sampler_module
from dovetail.engine.device.sampler import MAX_BIAS, Sampler
from dovetail.engine.request.params import SamplingParams, StructuredOutputsParams
from dovetail.engine.request.sequence import Request, Sequence
from dovetail.engine.schedule.plan import PlanRow, StepPlan
from dovetail.io.tokenizer import Tokenizer
from dovetail.ops import sample as ops

pytestmark = pytest.mark.slow

V, EOS, STOP = 100, 99, 98
SLOTS = 4


class Letters:
    """A tokenizer with one token per letter; " a" and " b" are one token each."""

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        assert not add_special
        text = text.replace(" a", "A").replace(" b", "B")
        return [ord(letter) - ord(" ") for letter in text]


def ids(text: str) -> tuple[int, ...]:
    return tuple(Letters().encode(text, add_special=False))


@pytest.fixture(scope="module")
def sampler() -> Sampler:
    return Sampler(V, SLOTS, Letters(), eos_ids=(EOS,))


@pytest.fixture(scope="module")
def step():
    def run(logits, inputs, history):
        tokens, _ = ops.sample(logits, inputs, history, 0)
        return tokens, ops.count_tokens(history, inputs.slot, tokens)

    return jax.jit(run)


def make(prompt=(1, 2, 3), slot: int = 0, index: int = 0, seed: int = 0, **params) -> Sequence:
    request = Request(
        "r", tuple(prompt), SamplingParams(**({"temperature": 0.0, "max_tokens": 64} | params)), seed=seed
    )
    return Sequence(request, slot=slot, index=index)


def plan_for(*seqs: Sequence, steps: int = 1) -> StepPlan:
    """Return a sequence as the scheduler leaves it: tokens to come are counted as pending."""
    rows = [PlanRow(seq, seq.length - 1, 1, True) for seq in seqs]
    for seq in seqs:
        seq.pending += steps
    return StepPlan(rows, steps)


def run(sampler: Sampler, step, logits: np.ndarray, *seqs: Sequence, size: int = 4) -> list[int]:
    """Run one step of these sequences, all with logits [V], and commit its tokens."""
    inputs = sampler.inputs(plan_for(*seqs), size)
    tokens, sampler.history = step(np.broadcast_to(logits, (size, V)), inputs, sampler.history)
    for seq, token in zip(seqs, np.asarray(tokens).tolist(), strict=False):
        seq.tokens.append(token)
        seq.pending -= 1
    return [seq.tokens[-1] for seq in seqs]


def slope(*first: int) -> np.ndarray:
    """Return logits that prefer the given tokens in their order, then the lowest ids."""
    logits = -np.arange(V, dtype=np.float32)
    for i, token in enumerate(first):
        logits[token] = 100.0 - i
    return logits


# --- masks ------------------------------------------------------------------------------------------------------------


def test_min_tokens_masks_every_end_until_then(sampler, step):
    seq = make(min_tokens=2, stop_token_ids=(STOP,))
    assert [run(sampler, step, slope(EOS, STOP, 7), seq)[0] for _ in range(3)] == [7, 7, EOS]


def test_min_tokens_ends_within_a_dispatch_of_several_steps(sampler, step):
    seq = make(min_tokens=2)
    assert not sampler.start(seq).needs_host
    inputs, tokens = sampler.inputs(plan_for(seq, steps=4), 4), []
    for _ in range(4):
        out, _ = step(np.broadcast_to(slope(EOS, 7), (4, V)), inputs, sampler.history)
        tokens.append(int(out[0]))
        inputs = ops.advance(inputs)
    assert tokens == [7, 7, EOS, EOS]


def test_min_tokens_beside_another_mask_needs_the_host(sampler, step):
    seq = make(min_tokens=2, allowed_token_ids=(EOS, 8))
    assert sampler.start(seq).needs_host and seq.single_step
    assert [run(sampler, step, slope(7, EOS), seq)[0] for _ in range(3)] == [8, 8, EOS]


def test_allowed_token_ids(sampler, step):
    seq = make(allowed_token_ids=(40, 50), temperature=100.0)
    assert not sampler.start(seq).needs_host
    assert {run(sampler, step, slope(), seq)[0] for _ in range(30)} == {40, 50}


def test_a_bad_word_of_one_token_is_masked_with_and_without_its_space(sampler, step):
    seq = make(bad_words=("a",))
    assert not sampler.start(seq).needs_host
    assert run(sampler, step, slope(*ids("a"), *ids(" a"), 7), seq) == [7]
    assert not sampler.start(make(bad_words=("z",))).needs_host, "z is one token, also after the token of a space"


def test_the_last_token_of_a_long_bad_word_is_masked_after_its_prefix(sampler, step):
    seq = make(prompt=ids("xx"), bad_words=("bad",))
    assert sampler.start(seq).needs_host
    text = [run(sampler, step, slope(*ids(wanted), 7), seq)[0] for wanted in ("b", "a", "d", "d", " b", "a", "d")]
    assert text == [*ids("ba"), 7, *ids("d b"), *ids("a"), 7]
    started = make(prompt=ids("xba"), bad_words=("bad",))
    assert run(sampler, step, slope(*ids("d"), 7), started) == [7], "the prompt holds the beginning"


def test_masks_that_stay_are_sent_once(sampler):
    first, second = make(allowed_token_ids=(4,)), make(slot=1)
    one, two = (sampler.inputs(plan_for(first, second), 4) for _ in range(2))
    assert one.mask is two.mask and isinstance(one.mask, jax.Array)
    third = sampler.inputs(plan_for(second, first), 4)
    assert (np.asarray(third.mask)[[1, 0]] == np.asarray(one.mask)[[0, 1]]).all()


def test_a_grammar_guides_and_ends_a_sequence(make_tokenizer):
    tokenizer = make_tokenizer()
    size = tokenizer.vocab_size + 37  # a model's vocabulary is often padded
    sampler = Sampler(size, SLOTS, tokenizer, tokenizer.eos_ids)
    plain, guided = make(slot=1), make(structured_outputs=StructuredOutputsParams(choice=("yes", "no")), min_tokens=30)
    sampler.prepare(guided.request.params)
    assert sampler.start(guided).needs_host and not sampler.start(plain).needs_host
    logits = np.random.default_rng(0).normal(size=(4, size)).astype(np.float32)
    logits[:, -1] = 50
    for _ in range(9):
        tokens, _ = ops.sample(logits, sampler.inputs(plan_for(plain, guided), 4), sampler.history, 0)
        for seq, token in zip((plain, guided), np.asarray(tokens).tolist(), strict=False):
            seq.tokens.append(token)
            seq.pending -= 1
        if sampler.is_done(guided):
            break
    assert tokenizer.decode(guided.output) in ("yes", "no")
    assert plain.output == [size - 1] * len(guided.output)
    # done: only the end is left, though min_tokens has not come
    inputs = sampler.inputs(plan_for(guided), 4)
    assert int(ops.sample(logits, inputs, sampler.history, 0)[0][0]) == tokenizer.eos_id


def test_a_failing_grammar_ends_only_its_own_sequence(make_tokenizer):
    tokenizer = make_tokenizer()
    sampler = Sampler(tokenizer.vocab_size, SLOTS, tokenizer, tokenizer.eos_ids)
    plain, guided = make(slot=1), make(structured_outputs=StructuredOutputsParams(regex="a+"))
    guided.tokens.append(tokenizer.id("b"))  # what no mask would have let through
    logits = np.zeros((4, tokenizer.vocab_size), np.float32)
    tokens, _ = ops.sample(logits, sampler.inputs(plan_for(plain, guided), 4), sampler.history, 0)
    assert np.asarray(tokens)[:2].tolist() == [0, tokenizer.eos_id]
    assert sampler.is_done(guided) and "cannot continue" in guided.error and plain.error is None


@pytest.fixture
def make_tokenizer():
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers

    def made() -> Tokenizer:
        alphabet = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "<end>"]
        backend = Backend(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
        backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
        return Tokenizer(backend, eos="<end>")

    return made


# --- penalties and bias -----------------------------------------------------------------------------------------------


def penalized(seq: Sequence, logits: np.ndarray) -> int:
    """Return the greedy token by definition, from the sequence's tokens."""
    params, x = seq.request.params, logits.astype(np.float64).copy()
    for token in {*seq.tokens}:
        x[token] = x[token] / params.repetition_penalty if x[token] > 0 else x[token] * params.repetition_penalty
    for token in {*seq.output}:
        x[token] -= params.presence_penalty + params.frequency_penalty * seq.output.count(token)
    return int(x.argmax())


def test_penalties_are_counted_on_the_device_through_preemption(sampler, step):
    logits = np.random.default_rng(3).normal(size=V).astype(np.float32) * 2
    top = np.argsort(logits)[::-1].tolist()
    prompt = [top[0], top[0], top[3]]
    asks = dict(presence_penalty=0.7, frequency_penalty=0.4, repetition_penalty=1.5)
    seqs = [make(prompt, slot=2, **asks), make(slot=1), make(prompt, slot=0, frequency_penalty=-1.0)]
    for turn in range(12):
        if turn == 6:  # away and back in the same slot, which another sequence used meanwhile
            run(sampler, step, logits, make(slot=2, presence_penalty=1.0))
            seqs[0].preemptions += 1
        want = [penalized(seq, logits) for seq in seqs]
        assert run(sampler, step, logits, *seqs) == want, turn
    assert len(set(seqs[0].output)) > 3 and len(set(seqs[2].output)) == 1


def test_several_steps_of_a_dispatch_count_as_they_go(sampler, step):
    logits = np.random.default_rng(4).normal(size=V).astype(np.float32) * 2
    alone, looped = make(slot=0, frequency_penalty=0.9), make(slot=1, frequency_penalty=0.9)
    want = [run(sampler, step, logits, alone)[0] for _ in range(8)]
    inputs, got = sampler.inputs(plan_for(looped, steps=8), 4), []
    for _ in range(8):
        tokens, sampler.history = step(np.broadcast_to(logits, (4, V)), inputs, sampler.history)
        got.append(int(tokens[0]))
        inputs = ops.advance(inputs)
    assert got == want


def test_logit_bias(sampler, step):
    assert run(sampler, step, slope(5), make(logit_bias={60: 100.0, 5: -100.0}), make(slot=1)) == [60, 5]


# --- the batch --------------------------------------------------------------------------------------------------------


def test_rows_that_do_not_sample_are_as_padding(sampler):
    busy = make(prompt=range(1, 9), slot=1, presence_penalty=1.0, temperature=1.0, allowed_token_ids=(3,))
    decoding = make(slot=0, temperature=0.5, top_k=5)
    decoding.tokens.append(4)
    inputs = sampler.inputs(StepPlan([PlanRow(busy, 0, 4, False), PlanRow(decoding, 3, 1, True)]), 4)
    assert inputs.temperature.tolist() == [0, 0.5, 0, 0] and inputs.top_k.tolist() == [0, 5, 0, 0]
    assert inputs.position.tolist() == [0, 4, 0, 0]
    assert inputs.slot.tolist() == [SLOTS] * 4 and inputs.mask_until.tolist() == [0] * 4


def test_every_batch_of_a_size_has_the_same_signature(sampler):
    asks = ({}, dict(temperature=1.0), dict(logit_bias={1: 2.0}, presence_penalty=1.0, min_tokens=3, bad_words=("a",)))
    made = [sampler.inputs(plan_for(make(**ask)), 4) for ask in asks]
    signatures = {str(jax.tree.map(lambda x: (x.shape, str(x.dtype)), inputs)) for inputs in made}
    assert len(signatures) == 1


def test_positions_do_not_depend_on_how_the_steps_were_dispatched(sampler, step):
    """The same request gives the same tokens in other slots, rows and dispatches; its n samples differ."""
    flat = np.zeros(V, np.float32)
    first, second = make(temperature=1.0, seed=11), make(temperature=1.0, seed=11, slot=1)
    one = [run(sampler, step, flat, first)[0] for _ in range(6)]
    two = [run(sampler, step, flat, make(slot=3), second, size=8)[1] for _ in range(6)]
    assert one == two and len(set(one)) > 2
    third = make(temperature=1.0, seed=11, slot=1, index=1)
    assert [run(sampler, step, flat, third)[0] for _ in range(6)] != one


def test_any_seed_fits(sampler):
    seeds = (0, -1, -(2**63), 2**63, 2**64 - 1)
    inputs = [sampler.inputs(plan_for(make(seed=seed)), 1) for seed in seeds]
    found = {(int(x.seed_hi[0]), int(x.seed_lo[0])) for x in inputs}
    assert found == {(0, 0), (2**32 - 1, 2**32 - 1), (2**31, 0)}


def test_a_reused_slot_has_the_parameters_of_its_new_sequence(sampler):
    first, second = make(slot=2, temperature=0.5, logprobs=3), make(slot=2, top_k=7, temperature=1.0)
    one, other = (sampler.inputs(plan_for(seq), 2) for seq in (first, second))
    assert (one.temperature.tolist(), one.top_k.tolist(), one.top_logprobs.tolist()) == ([0.5, 0], [0, 0], [3, -1])
    assert (other.temperature.tolist(), other.top_k.tolist(), other.top_logprobs.tolist()) == ([1, 0], [7, 0], [-1, -1])


def test_sequences_that_need_the_host_do_not_run_ahead(sampler):
    for plan in (plan_for(make(bad_words=("bad",)), steps=2), plan_for(make(bad_words=("bad",)))):
        plan.rows[0].start += plan.steps == 1  # a token before it is still on its way
        with pytest.raises(AssertionError, match="the host must see each token"):
            sampler.inputs(plan, 4)


@pytest.mark.parametrize(
    ("ask", "param"),
    [
        (dict(logit_bias={V: 1.0}), "logit_bias"),
        (dict(allowed_token_ids=(3, V)), "allowed_token_ids"),
        (dict(stop_token_ids=(V,)), "stop_token_ids"),
        (dict(logit_bias=dict.fromkeys(range(MAX_BIAS + 1), 1.0)), "logit_bias"),
        (dict(allowed_token_ids=(EOS,), min_tokens=1), "allowed_token_ids"),
        (dict(allowed_token_ids=ids("a"), bad_words=("a",)), "bad_words"),
    ],
)
def test_parameters_that_the_model_cannot_honour_are_refused(sampler, ask: dict, param: str):
    large = Sampler(1000, 1, Letters(), (EOS,)) if len(ask.get("logit_bias", ())) > 1 else sampler
    with refuses(param, RequestError):
        large.prepare(SamplingParams(**ask))


def test_without_a_tokenizer_words_and_grammars_are_refused():
    bare = Sampler(V, 1)
    bare.prepare(SamplingParams(logit_bias={3: 1.0}))
    for name, value in (("bad_words", ("a",)), ("structured_outputs", StructuredOutputsParams(regex="a"))):
        with refuses(name, RequestError):
            bare.prepare(SamplingParams(**{name: value}))


def test_sampling_state_is_shared_by_the_sequences_of_a_request(monkeypatch):
    texts = []
    monkeypatch.setattr(Letters, "encode", lambda self, text, **_: texts.append(text) or [ord(c) - 32 for c in text])
    sampler = Sampler(V, SLOTS, Letters(), eos_ids=(EOS,))
    params = SamplingParams(n=3, bad_words=("bad", "c"), allowed_token_ids=(1, 2, 3), min_tokens=2)
    request = Request("r", (1, 2), params, sampling=sampler.prepare(params))
    asked = len(texts)
    states = [sampler.start(Sequence(request, index=i)) for i in range(3)]
    assert asked and len(texts) == asked, "tokenized again, on the engine's thread"
    assert all(state.mask is states[0].mask and state.early is states[0].early for state in states)


def test_history_row_of_a_prompt(sampler):
    seq = make(prompt=(5, 5, 6), slot=3, presence_penalty=1.0)
    seq.tokens += [6, 7, 7]
    sampler.inputs(plan_for(seq), 1)
    row = np.asarray(jnp.asarray(sampler.history)[3])
    assert {int(v): int(row[v]) for v in np.flatnonzero(row)} == {5: 1, 6: 3, 7: 4}


def test_a_slot_of_a_step_that_failed_is_written_for_its_next_sequence(sampler):
    failed, lost, seq = (make(prompt=prompt, slot=3, presence_penalty=1.0) for prompt in ((5, 6), (7,), (6, 8)))
    lost.slot = None
    with pytest.raises(AssertionError):
        sampler.inputs(plan_for(failed, lost), 2)
    sampler.inputs(plan_for(seq), 1)
    assert np.flatnonzero(np.asarray(sampler.history)[3]).tolist() == [6, 8]


def test_history_rows_of_many_sequences_are_written_in_parts(monkeypatch):
    monkeypatch.setattr(sampler_module, "ROWS_AT_ONCE", 2)
    monkeypatch.setattr(sampler_module, "COUNTS_AT_ONCE", 4)
    sampler, rng = Sampler(V, SLOTS), np.random.default_rng(0)
    sampler.history = jnp.full((SLOTS, V), 9, jnp.int32)  # of sequences that have left
    seqs = [make(prompt=rng.integers(0, V, 7).tolist(), slot=slot, repetition_penalty=1.1) for slot in (2, 0, 3)]
    sampler.inputs(plan_for(*seqs), 4)
    table = np.asarray(sampler.history)
    for seq in seqs:
        assert np.flatnonzero(table[seq.slot]).tolist() == sorted({*seq.request.prompt})
    assert (table[1] == 9).all()
