"""Test that both packings read every token once per epoch and never put two documents into one segment."""

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dovetail.data.pack import PACKINGS, BestFit, Concat, best_fit, permutation, place

pytestmark = pytest.mark.slow


class Documents:
    """A store in memory. A token tells its document and place: document * 10_000 + place."""

    def __init__(self, lengths):
        self.lengths = np.asarray(lengths, np.int64)

    def read(self, document, start, stop):
        return document * 10_000 + np.arange(start, min(stop, self.lengths[document]))


def packed(kind, lengths, length, seed=0, documents=None):
    return PACKINGS[kind](Documents(lengths), np.arange(len(lengths)) if documents is None else documents, length, seed)


def epoch(rows, number=0):
    return [rows.row(i) for i in range(number * rows.count, (number + 1) * rows.count)]


def whole(lengths):
    return [i * 10_000 + j for i, length in enumerate(lengths) for j in range(length)]


def later(lengths):
    """Every token that another comes before: what has to be a target."""
    return [i * 10_000 + j for i, length in enumerate(lengths) for j in range(1, length)]


PERMUTATION = [2, 6, 5, 3, 0, 4, 7, 1]
PLACES = [7, 5, 3, 4, 6, 0, 2, 1]
LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=30)
KIND = pytest.mark.parametrize("kind", PACKINGS)


@KIND
@settings(max_examples=25, deadline=None)
@given(lengths=LENGTHS, length=st.integers(2, 17), seed=st.integers(0, 3), number=st.integers(0, 2))
def test_every_token_is_read_once_per_epoch_and_is_a_target_once(kind, lengths, length, seed, number):
    rows = epoch(packed(kind, lengths, length, seed), number)
    tokens = np.concatenate([row.tokens[row.segment_ids > 0] for row in rows])
    targets = np.concatenate([row.targets[row.loss_mask > 0] for row in rows])
    assert sorted(tokens.tolist()) == whole(lengths)
    assert sorted(targets.tolist()) == later(lengths)


@KIND
@settings(max_examples=25, deadline=None)
@given(lengths=LENGTHS, length=st.integers(2, 17))
def test_a_segment_is_a_run_of_one_document_from_position_zero(kind, lengths, length):
    for row in epoch(packed(kind, lengths, length)):
        used = int((row.segment_ids > 0).sum())
        assert (row.segment_ids[used:] == 0).all() and (row.loss_mask[used:] == 0).all()
        ids = row.segment_ids[:used]
        assert ids[0] == 1 and set(np.diff(ids)) <= {0, 1}
        for segment in range(1, ids[-1] + 1):
            (at,) = np.nonzero(ids == segment)
            assert row.positions[at].tolist() == list(range(len(at)))
            assert set(np.diff(row.tokens[at])) <= {1}, "other tokens than the next of the same document"
            counted = row.loss_mask[at] > 0
            assert (row.targets[at][counted] == row.tokens[at][counted] + 1).all()
            assert counted[:-1].all()
            document, place = divmod(int(row.tokens[at[-1]]), 10_000)
            assert counted[-1] == (place + 1 < lengths[document])


@settings(max_examples=25, deadline=None)
@given(lengths=LENGTHS, length=st.integers(2, 45))
def test_best_fit_cuts_only_what_is_too_long(lengths, length):
    rows = packed("best_fit", lengths, length)
    pieces = [piece for i in range(rows.count) for piece in rows.pieces(i)]
    for document, start, stop in pieces:
        assert start % length == 0 and stop == min(start + length, lengths[document])


@settings(max_examples=100, deadline=None)
@given(lengths=st.lists(st.integers(1, 20), max_size=60), spare=st.integers(0, 9))
def test_bins_by_lengths_are_best_fit_decreasing_bins(lengths, spare):
    """The same number of rows as putting one piece after another into the fullest row that takes it."""
    capacity = max(lengths, default=1) + spare
    rows, count = best_fit(np.asarray(lengths, np.int64), capacity)
    assert (np.bincount(rows, lengths, minlength=count) <= capacity).all()
    assert sorted(set(rows)) == list(range(count))
    room = []
    for length in sorted(lengths, reverse=True):
        fits = [left for left in room if left >= length]
        if fits:
            room.remove(min(fits))
        room.append((min(fits) if fits else capacity) - length)
    assert count == len(room)


def realistic(count):
    """Web pages: log-normal lengths, a median of 400 tokens and a long tail."""
    draws = np.random.default_rng(0).lognormal(np.log(400), 1.1, count)
    return np.clip(draws.astype(np.int64), 2, 200_000)


def test_little_is_padding_on_realistic_lengths():
    lengths = realistic(20_000)
    for length in (1024, 2048, 8192):
        best = BestFit(Documents(lengths), np.arange(len(lengths)), length, 0)
        assert best.padding < 0.03, (length, best.padding)
        assert Concat(Documents(lengths), np.arange(len(lengths)), length, 0).padding < 0.001


def test_windows_bound_the_plan_and_cost_little(monkeypatch):
    lengths = realistic(8_000)
    monkeypatch.setattr("dovetail.data.pack.WINDOW", 2_000)
    rows = BestFit(Documents(lengths), np.arange(len(lengths)), 2048, 0)
    assert rows.padding < 0.03
    seen = sum(int((rows.row(i).segment_ids > 0).sum()) for i in range(rows.count))
    assert seen == lengths.sum() == rows.tokens


@KIND
def test_epochs_and_seeds_have_different_orders(kind):
    def order(seed, number):
        return [row.tokens[0] for row in epoch(packed(kind, [5] * 50, 5, seed), number)]

    assert order(0, 0) == order(0, 0)
    assert len({tuple(order(seed, number)) for seed in (0, 1) for number in (0, 1, 2)}) == 6


@KIND
def test_rows_come_in_any_order(kind):
    lengths = realistic(300)
    there, back = packed(kind, lengths, 128), packed(kind, lengths, 128)
    wanted = list(range(0, 3 * there.count, 7))
    ahead = {i: there.row(i) for i in wanted}
    for i in reversed(wanted):
        jax.tree.map(np.testing.assert_array_equal, ahead[i], back.row(i))


@KIND
def test_a_subset_of_documents(kind):
    rows = packed(kind, [7] * 20, 6, documents=np.array([3, 11, 12]))
    assert {int(token) // 10_000 for row in epoch(rows) for token in row.tokens[row.segment_ids > 0]} == {3, 11, 12}


def test_rows_of_a_long_document_are_not_adjacent():
    rows = packed("concat", [4_000], 10)
    first = [row.tokens[0] for row in epoch(rows)]
    assert np.mean(np.abs(np.diff(first)) == 10) < 0.1


def test_orders_are_permutations_with_fixed_values():
    for count in (1, 2, 3, 100, 1023):
        assert sorted(permutation(count, 5).tolist()) == list(range(count))
        assert sorted(place(i, count, 5, 1) for i in range(count)) == list(range(count))
    assert permutation(8, 0, 0).tolist() == PERMUTATION, "every run in progress would change its order"
    assert [place(i, 8, 0, 0) for i in range(8)] == PLACES
