"""What ends a sequence: the ends that are found in arrays are those that a look at each token finds."""

from __future__ import annotations

import numpy as np
import pytest

from dovetail.engine.params import SamplingParams
from dovetail.engine.sequence import Request, Sequence
from dovetail.engine.stops import Stops
from dovetail.engine.text import Text

EOS = (2, 5)


class Letters:
    """A detokenizer: token 1 is b."""

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
        (dict(structured={"regex": "a"}), [1, 0, 0], [1, 0], ("stop", None)),
    ],
)
def test_what_is_looked_for_token_by_token(params, tokens, kept, end):
    stops, seq = Stops(EOS, grammar_done=lambda seq: seq.tokens[-1] == 0), sequence(**params)
    seq.text = Text(Letters(), seq.request.params.stop, False)  # type: ignore[arg-type]
    stops.watch(seq)
    assert seq.by_token and stops.append_each(seq, tokens) == (kept, end)


def test_who_is_looked_at_token_by_token():
    stops, plain, stopped = Stops(EOS), sequence(logprobs=0), sequence(stop=("ba",))
    plain.text = Text(Letters(), (), False)  # type: ignore[arg-type]
    for seq in (plain, stopped):  # without a text, the caller looks for stop strings
        stops.watch(seq)
        assert not seq.by_token
