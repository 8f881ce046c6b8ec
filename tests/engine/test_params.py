"""SamplingParams: every parameter is accepted or refused by name."""

from __future__ import annotations

import pytest
from refusals import refuses

from dovetail.core.errors import RequestError
from dovetail.engine.request.params import SamplingParams, StructuredOutputsParams, check_room

NAN = float("nan")
REFUSED = [
    ("n", 0), ("n", 1.5), ("n", True), ("n", None), ("max_tokens", 0), ("max_tokens", "5"), ("min_tokens", -1),
    ("min_tokens", 17), ("temperature", -0.1), ("temperature", NAN), ("temperature", float("inf")),
    ("temperature", "hot"), ("temperature", None), ("top_k", -2), ("top_k", 2.0), ("top_p", 0.0), ("top_p", 1.01),
    ("min_p", -0.1), ("min_p", 1.1), ("presence_penalty", 2.1), ("presence_penalty", -2.1), ("frequency_penalty", 3),
    ("repetition_penalty", 0.0), ("repetition_penalty", -1.0), ("seed", 1.0), ("seed", 2**64), ("logprobs", 21),
    ("logprobs", -1), ("logprobs", True), ("prompt_logprobs", 21), ("logit_bias", {5: 101}), ("logit_bias", {5: NAN}),
    ("logit_bias", {"5": 1.0}), ("logit_bias", {-1: 1.0}), ("logit_bias", [5]), ("allowed_token_ids", ()),
    ("allowed_token_ids", ("5",)), ("allowed_token_ids", 5), ("stop_token_ids", (-1,)), ("stop_token_ids", (1.5,)),
    ("stop", ""), ("stop", ("a", "")), ("stop", (5,)), ("stop", None), ("bad_words", ("",)), ("bad_words", 3),
    ("ignore_eos", 1), ("include_stop_str_in_output", "no"), ("structured_outputs", {"jsn": {}}),
    ("structured_outputs", {}), ("structured_outputs", {"regex": 5}), ("structured_outputs", "json"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), REFUSED, ids=[f"{name}={value!r}" for name, value in REFUSED])
def test_a_refusal_names_its_field(name: str, value):
    with refuses(name, RequestError, naming=name):
        SamplingParams(**{name: value})


def test_contradictions_are_refused():
    with refuses("structured_outputs", RequestError):
        SamplingParams(structured_outputs=StructuredOutputsParams(regex="a"), allowed_token_ids=(1,))
    with pytest.raises(RequestError, match=r"`min_tokens` must be at most max_tokens=8, got 9"):
        SamplingParams(min_tokens=9, max_tokens=8)


def test_structured_takes_exactly_one():
    for given in ({}, dict(regex="a", choice=("b",))):
        with refuses("structured_outputs", RequestError, naming="json, regex, choice, grammar"):
            StructuredOutputsParams(**given)
    for choice in ((), ("a", ""), (1,)):
        with refuses("structured_outputs", RequestError, naming="`choice`"):
            StructuredOutputsParams(choice=choice)
    assert StructuredOutputsParams(choice=["a", "b"]).choice == ("a", "b")  # pyright: ignore[reportArgumentType]


def test_sampling_params_normalise_their_values():
    params = SamplingParams(
        stop="end", bad_words=["x"], stop_token_ids=[1], logit_bias={5: 1}, max_tokens=None, seed=-1
    )
    assert params.stop == ("end",) and params.bad_words == ("x",) and params.stop_token_ids == (1,)
    assert SamplingParams(temperature=0).greedy and not params.greedy


def test_structured_may_be_a_dict():
    params = SamplingParams(structured_outputs={"choice": ["a", "b"]})  # type: ignore[arg-type]
    assert params.structured_outputs == StructuredOutputsParams(choice=("a", "b"))
    with refuses("structured_outputs", RequestError, naming="'choices'"):
        SamplingParams(structured_outputs={"choices": ["a"]})  # type: ignore[arg-type]


def test_max_tokens_must_fit_after_the_prompt():
    check_room("max_tokens", None, 5, 16)
    check_room("max_tokens", 11, 5, 16)
    with refuses("max_completion_tokens", RequestError, code="context_length_exceeded", naming="11"):
        check_room("max_completion_tokens", 12, 5, 16)


@pytest.mark.parametrize("given", [dict(regex=5), dict(grammar=5), dict(json=5)])
def test_structured_output_of_a_wrong_type_is_refused(given):
    with refuses("structured_outputs", RequestError, naming=next(iter(given))):
        StructuredOutputsParams(**given)


def test_stop_token_ids_are_a_list():
    with refuses("stop_token_ids", RequestError):
        SamplingParams(stop_token_ids=None)  # type: ignore[arg-type]


def test_top_k_of_minus_one_and_zero_are_off():
    assert SamplingParams().top_k == -1 and SamplingParams(top_k=0).top_k == 0


@pytest.mark.parametrize(
    ("old", "new"),
    [("structured", "structured_outputs"), ("guided_decoding", "structured_outputs"), ("max_new_tokens", "max_tokens")],
)
def test_an_old_or_foreign_name_is_refused_with_the_right_one(old, new):
    with refuses(old, RequestError, naming=f"use '{new}'"):
        SamplingParams(**{old: 1})
    with pytest.raises(AttributeError, match=f"no attribute '{old}': use '{new}'"):
        getattr(SamplingParams(), old)


def test_an_unknown_name_is_refused_with_a_suggestion():
    with refuses("temprature", RequestError, naming="Did you mean 'temperature'?"):
        SamplingParams(temprature=1)  # type: ignore[call-arg]
