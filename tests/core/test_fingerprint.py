"""Fingerprints: equal for equal content, different otherwise; large arrays are sampled."""

from __future__ import annotations

import numpy as np

from dovetail.core.fingerprint import fingerprint, of_sources


def test_it_changes_with_the_content_its_type_and_its_order():
    one, two = np.arange(6, dtype=np.int32), np.arange(6, dtype=np.int64)
    given = [(one,), (two,), (one.reshape(2, 3),), (one, b"x"), (b"x", one), ("x",), (b"x",), ({"a": 1},), ({"a": 2},)]
    assert len({fingerprint(*parts) for parts in given}) == len(given)
    assert fingerprint(one) == fingerprint(one.copy()) and fingerprint({"a": 1, "b": 2}) == fingerprint(
        {"b": 2, "a": 1}
    )
    assert fingerprint("ab", "c") != fingerprint("a", "bc")


def test_of_a_large_array_its_ends_and_size_count_without_reading_all_of_it():
    large = np.zeros(1 << 22, np.uint16)
    before = fingerprint(large, whole=False)
    first, last, between = large.copy(), large.copy(), large.copy()
    first[0], last[-1], between[20_000] = 1, 1, 1
    assert before not in (fingerprint(first, whole=False), fingerprint(last, whole=False))
    assert before == fingerprint(between, whole=False) != fingerprint(between)
    assert before != fingerprint(large[:-1], whole=False)


def test_two_sources_of_one_path_are_both_named():
    assert of_sources([("a", "1"), ("a", "2")]) == {"data a": "1", "data a (source 2)": "2"}
