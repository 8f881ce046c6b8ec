"""Log-probabilities are stored as they arrive and behave as a tuple."""

from __future__ import annotations

import pickle

import numpy as np

from dovetail.engine.request.logprobs import Logprobs, TokenLogprob
from dovetail.engine.request.outputs import CompletionOutput, OutputDelta
from dovetail.engine.request.sequence import Times

PLAIN = ([-0.5, -0.25], [2, 1], None)
TOPS = ([-1.5], [3], [([4, 8], [-0.25, -0.5])])
ENTRIES = (
    TokenLogprob(7, -0.5, 2, ()),
    TokenLogprob(8, -0.25, 1, ()),
    TokenLogprob(9, -1.5, 3, ((4, -0.25), (8, -0.5))),
)


def test_logprobs_behave_as_a_tuple():
    found = Logprobs([7, 8, 9], [PLAIN, TOPS])
    assert len(found) == 3 and tuple(found) == ENTRIES and found[1:] == ENTRIES[1:] and found[-1] == ENTRIES[-1]
    assert found == ENTRIES and found == list(ENTRIES) and found != ENTRIES[:2] and found != 3 and ENTRIES[1] in found
    assert found[0] is found[0], "made once"
    assert pickle.loads(pickle.dumps(found)) == found == Logprobs((7, 8, 9), [PLAIN, TOPS])
    assert not Logprobs([], []) and repr(found) == repr(ENTRIES)


def test_token_logprobs_of_a_completion_are_a_float32_array():
    completion = CompletionOutput(0, (7, 8, 9), "", "length", logprobs=Logprobs([7, 8, 9], [PLAIN, TOPS]))
    numbers = completion.token_logprobs
    assert numbers is not None and numbers.dtype == np.float32 and numbers.tolist() == [-0.5, -0.25, -1.5]
    assert completion.logprobs._entries is None, "no object was made for it"
    assert CompletionOutput(0, (), "", "abort").token_logprobs is None


def test_deltas_join_their_logprobs():
    first = OutputDelta("a", 0, [7, 8], "", Times(0.0), scores=[PLAIN])
    later = OutputDelta("a", 0, [9], "", Times(0.0), scores=[TOPS])
    assert first.logprobs == ENTRIES[:2] and first.then(later).logprobs == ENTRIES
    assert later._replace(scores=None).logprobs is None
