"""Test that batches depend only on (seed, step), on any number of hosts, and that mixtures keep their weights."""

import dataclasses
import random
from itertools import islice

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refuses

from dovetail.core.errors import RecipeError
from dovetail.core.types import Batch
from dovetail.data.loader import LONGEST_CYCLE, Loader, Mixture, cycle_shares, open_data
from dovetail.data.settings import PACKINGS, Data, Source

pytestmark = pytest.mark.slow

LENGTH, BATCH = 64, 8


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def opened(cache, tmp_path_factory):
    """open_data on a mixture of the corpus and a folder of small texts."""
    folder = tmp_path_factory.mktemp("texts")
    for i in range(30):
        (folder / f"{i:02d}.txt").write_text(f"text {i} " * (i + 1))
    sources = (Source("fables:200", weight=3.0), Source(str(folder), weight=1.0))

    def call(host_index=0, host_count=1, sources=sources, length=LENGTH, batch=BATCH, **settings):
        data = Data(sources, tokenizer="bytes", **settings)
        return open_data(data, length, batch, host_index=host_index, host_count=host_count, directory=cache)

    return call


def columns(batch: Batch):
    assert batch.columns == {}, "text has the usual columns alone"
    return {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch) if field.name != "columns"}


def same(one: Batch, other: Batch) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(columns(one).values(), columns(other).values(), strict=True))


def test_batch_shapes_and_dtypes(opened):
    train, held_out = opened()
    assert held_out is None
    for name, column in columns(train.batch(0)).items():
        assert column.shape == (BATCH, LENGTH)
        assert column.dtype == (np.float32 if name == "loss_mask" else np.int32)
    assert train.vocab_size == 257
    assert train.tokens_per_epoch > 90_000 and train.rows_per_epoch >= train.tokens_per_epoch / LENGTH
    assert train.epochs(0) == (0, 0) and all(e > 1 for e in train.epochs(train.rows_per_epoch))


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("hosts", [2, 8])
def test_hosts_together_read_the_rows_of_one_host(opened, packing, hosts):
    alone, _ = opened(packing=packing)
    several = [opened(host, hosts, packing=packing)[0] for host in range(hosts)]
    for step in (0, 1, 77):
        parts = [columns(loader.batch(step)) for loader in several]
        joined = Batch(*(np.concatenate([part[name] for part in parts]) for name in parts[0]))
        assert same(joined, alone.batch(step))


@pytest.mark.parametrize("packing", PACKINGS)
def test_a_batch_depends_on_the_seed_and_the_step_alone(opened, packing):
    train, _ = opened(packing=packing, seed=1)
    again, _ = opened(packing=packing, seed=1)
    other, _ = opened(packing=packing, seed=2)
    steps = random.Random(0).sample(range(2000), 12)  # some epochs on
    ahead = {step: train.batch(step) for step in steps}
    for step in sorted(steps):
        assert same(again.batch(step), ahead[step])
        assert not same(other.batch(step), ahead[step])


def test_resuming_at_any_step_gives_the_same_batches(opened):
    train, _ = opened()
    straight = train.iterate()
    batches = list(islice(straight, 40))
    straight.close()
    for step in random.Random(1).sample(range(40), 3):
        resumed = opened()[0].iterate(step, threads=2)
        assert all(same(a, b) for a, b in zip(batches[step:], resumed, strict=False))
        resumed.close()
    assert all(same(train.batch(i), batch) for i, batch in enumerate(batches))


def test_an_error_while_reading_ahead_reaches_the_reader(opened):
    train, _ = opened()
    train.rows.row = lambda i: 1 / 0
    with pytest.raises(ZeroDivisionError):
        next(train.iterate())


# --- mixtures ---------------------------------------------------------------------------------------------------------


class Counted:
    """A source whose row i is i."""

    length, count, tokens, padding = 4, 10, 40, 0.0

    def row(self, i):
        return i


WEIGHTS = st.lists(st.floats(0.01, 100.0), min_size=1, max_size=7)


@settings(max_examples=40, deadline=None)
@given(weights=st.lists(st.integers(1, 60), min_size=1, max_size=7), seed=st.integers(0, 5))
def test_weights_hold_within_one_row_at_every_row(weights, seed):
    rows = Mixture([Counted() for _ in weights], weights, seed)  # pyright: ignore[reportArgumentType]
    taken = [0] * len(weights)
    for i in range(500):
        source, row = rows.locate(i)
        assert row == taken[source], "a row of the source was left out or repeated"
        assert rows.taken(i).tolist() == taken
        taken[source] += 1
        for had, weight in zip(taken, weights, strict=True):
            assert abs(had - (i + 1) * weight / sum(weights)) < 1


def test_weights_over_a_long_run():
    weights = [0.7, 0.2, 0.0999, 0.0001]
    rows = Mixture([Counted() for _ in weights], weights, 0)  # pyright: ignore[reportArgumentType]
    for i in (10, 1_234, 1_000_000, 987_654_321):
        assert np.abs(rows.taken(i) - i * np.asarray(weights)).max() < 1


@settings(max_examples=40, deadline=None)
@given(weights=WEIGHTS)
def test_arbitrary_weights_are_approximated(weights):
    shares = cycle_shares(weights)
    assert min(shares) >= 1 and sum(shares) <= LONGEST_CYCLE + len(weights)
    for share, weight in zip(shares, weights, strict=True):
        assert abs(share / sum(shares) - weight / sum(weights)) < 2 / LONGEST_CYCLE


def test_each_source_is_read_whole_in_each_of_its_epochs(opened):
    train, _ = opened(packing="best_fit")
    small = train.rows.sources[1]
    epochs = [[small.row(number * small.count + i) for i in range(small.count)] for number in (0, 1)]
    for rows in epochs:
        assert sum(int((row.segment_ids > 0).sum()) for row in rows) == small.tokens
    one, other = ([row.tokens.tolist() for row in rows] for rows in epochs)
    assert one != other and sorted(one) == sorted(other)


# --- held-out documents -----------------------------------------------------------------------------------------------


def documents(loader: Loader, source=0):
    """The texts of a source's documents that the loader reads in an epoch: rows hold them whole."""
    rows = loader.rows.sources[source]
    found = set()
    for i in range(rows.count):
        row = rows.row(i)
        for segment in range(1, row.segment_ids.max() + 1):
            ids = row.tokens[row.segment_ids == segment]
            found.add(bytes(ids[ids < 256].tolist()).decode())
    return found


@pytest.mark.parametrize("share", [0.1, 0.004, 3.0])
def test_held_out_documents_are_never_trained_on(opened, share):
    fables = (Source("fables:200"),)
    settings = {"sources": fables, "length": 2048, "packing": "best_fit"}
    train, held_out = opened(held_out=share, seed=0, **settings)
    apart, trained = documents(held_out), documents(train)
    assert apart and not apart & trained
    assert apart | trained == documents(opened(**settings)[0])
    other_seed, hosts = opened(held_out=share, seed=5, **settings)[1], opened(1, 2, held_out=share, **settings)[1]
    assert documents(other_seed) == documents(hosts) == apart
    if share >= 1:
        assert held_out.tokens_per_epoch >= share * 2048
    else:
        assert abs(len(apart) - share * 200) < 15  # each document by its own hash: a binomial number


def test_appended_documents_do_not_change_the_held_out_ones(opened):
    few, more = (
        documents(opened(sources=(Source(f"fables:{n}"),), length=2048, packing="best_fit", held_out=0.1)[1])
        for n in (200, 400)
    )
    assert few < more


def test_held_out_rows_are_shared_by_weight(opened):
    _, held_out = opened(held_out=8.0)
    shares = [source.tokens for source in held_out.rows.sources]
    assert shares[0] >= 6 * LENGTH and shares[1] >= 2 * LENGTH


@pytest.mark.parametrize(
    ("call", "param"),
    [
        ({"batch": 6, "host_count": 4}, "batch"),
        ({"length": 1}, "length"),
        ({"held_out": 1e6}, "data.held_out"),
    ],
)
def test_settings_that_cannot_be_met_are_refused(opened, call, param):
    with refuses(param, RecipeError):
        opened(**call)
