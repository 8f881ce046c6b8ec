"""Ends of a sequence: the vectorised search finds the same ends as a check of each token."""

from __future__ import annotations

import random
from itertools import repeat

import numpy as np
import pytest

from dovetail.engine.request.params import SamplingParams
from dovetail.engine.request.sequence import Request, Sequence, Stops
from dovetail.engine.request.text import OutputText

EOS = (2, 5)


class Letters:
    """Detokenize token 1 as b."""

    def push(self, token: int) -> str:
        return "abcdefghij"[token]

    def flush(self) -> str:
        return ""


def sequence(limit: int = 100, **params) -> Sequence:
    seq = Sequence(Request("a", (7, 7), SamplingParams(max_tokens=None, **params)))
    seq.limit = limit
    return seq


def test_the_first_end_token_of_each_column():
    sampled = np.array([[1, 2, 3, 5], [4, 5, 3, 2], [2, 2, 3, 1]], np.int32)
    assert Stops(EOS).find(sampled) == {0: 2, 1: 0, 3: 0}
    assert Stops([9]).find(sampled) == Stops().find(sampled) == {}


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_the_ends_found_in_arrays_are_those_found_token_by_token(ignore_eos):
    rng, stops, ends = np.random.default_rng(0), Stops(EOS), set()
    for _ in range(300):
        sampled = rng.integers(0, 12, (rng.integers(1, 6), 1))
        tokens, limit = sampled[:, 0].tolist(), int(rng.integers(3, 9))
        one, other = sequence(limit, ignore_eos=ignore_eos), sequence(limit, ignore_eos=ignore_eos)
        found = stops.cut(one, tokens, stops.find(sampled).get(0))
        assert found == stops.append_each(other, tokens)
        assert other.tokens == [7, 7, *found[0]]
        ends.add(found[1])
    assert ends == ({None, ("length", None)} if ignore_eos else {None, ("length", None), ("stop", None)})


@pytest.mark.parametrize(
    ("params", "tokens", "kept", "end"),
    [
        (dict(stop_token_ids=(8,)), [1, 8, 1], [1, 8], ("stop", 8)),
        (dict(min_tokens=3), [2, 8, 2, 2], [2, 8, 2], ("stop", None)),
        (dict(min_tokens=2, stop_token_ids=(8,)), [8, 1, 8, 1], [8, 1, 8], ("stop", 8)),
        (dict(stop=("ba",)), [3, 1, 0, 1], [3, 1, 0], ("stop", "ba")),
        (dict(stop=("ba",), min_tokens=4), [1, 0, 1, 0, 1], [1, 0, 1, 0], ("stop", "ba")),
        (dict(structured_outputs={"regex": "a"}), [1, 0, 0], [1, 0], ("stop", None)),
    ],
)
def test_ends_found_token_by_token(params, tokens, kept, end):
    stops, seq = Stops(EOS, grammar_done=lambda seq: seq.tokens[-1] == 0), sequence(**params)
    seq.text = OutputText(Letters(), seq.request.params.stop, False)  # type: ignore[arg-type]
    stops.watch(seq)
    assert seq.by_token and stops.append_each(seq, tokens) == (kept, end)


def test_sequences_without_text_are_not_checked_token_by_token():
    stops, plain, stopped = Stops(EOS), sequence(logprobs=0), sequence(stop=("ba",))
    plain.text = OutputText(Letters(), (), False)  # type: ignore[arg-type]
    for seq in (plain, stopped):  # without a text, the caller looks for stop strings
        stops.watch(seq)
        assert not seq.by_token


class Pieces:
    """A detokenizer: token i is the i-th piece."""

    def __init__(self, pieces: list[str]):
        self._pieces = pieces

    def push(self, token: int) -> str:
        return self._pieces[token]

    def flush(self) -> str:
        return ""


def shown(pieces: list[str], stops: tuple[str, ...]) -> tuple[list[str], str | None]:
    """Return what is shown after each piece and the stop string found, by searching the whole text each time."""
    text, out, count = "", [], 0
    for piece in pieces:
        text += piece
        if found := [(text.find(stop), stop) for stop in stops if stop in text]:
            return [*out, text[count : min(found)[0]]], min(found)[1]
        sizes = range(min(len(text), 10), 0, -1)
        held = next((size for size in sizes if any(stop.startswith(text[-size:]) for stop in stops)), 0)
        out.append(text[count : len(text) - held])
        count = max(count, len(text) - held)
    return [*out, text[count:]], None


def test_stop_strings_are_found_as_in_the_whole_text():
    rng = random.Random(0)
    ended = 0
    for _ in range(2000):
        pieces, stops = (
            ["".join(rng.choices("ab", k=rng.randint(least, 4))) for _ in range(rng.randint(1, most))]
            for least, most in ((0, 12), (2, 3))
        )
        text, found, out = OutputText(Pieces(pieces), tuple(stops), False), None, []  # type: ignore[arg-type]
        for token in range(len(pieces)):
            found = text.push(token)
            out.append(text.take(ended=found is not None))
            if found is not None:
                break
        out += [] if found is not None else [text.take(ended=True)]
        assert (out, found) == shown(pieces, tuple(stops))
        assert text.whole == "".join(out)
        ended += found is not None
    assert 500 < ended < 1900


@pytest.mark.parametrize("unit", ["b", "a" * 254 + "bb"], ids=["no beginning", "half of each"])
def test_a_token_costs_a_few_comparisons_however_long_the_stop_strings_are(unit, monkeypatch):
    compared = []
    monkeypatch.setattr("dovetail.engine.request.text.repeat", lambda end: compared.append(end) or repeat(end))
    pieces = [unit[i % len(unit)] for i in range(2048)]
    stops = tuple("a" * 255 + chr(200 + i) for i in range(16))
    text = OutputText(Pieces(pieces), stops, False)  # type: ignore[arg-type]
    for token in range(len(pieces)):
        text.push(token)
        text.take()
    assert len(compared) <= 3 * len(pieces), "each size of each stop string was compared before: 255 for each token"
