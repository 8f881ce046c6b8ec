"""Formatting of numbers, bytes and durations."""

from __future__ import annotations

import pytest

from dovetail.core.units import format_bytes, format_clock, format_count, format_duration, format_number


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (0.12345, "0.123"), (45.67, "45.7"), (99.96, "100"), (1234.4, "1,234"), (2e-5, "2.0e-05"), (-7, "-7")],
)
def test_numbers_have_three_significant_digits(value, text):
    assert format_number(value) == text


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0"), (512, "512"), (48_434, "48.4k"), (1_235_814_400, "1.24B"), (5e15, "5,000T")]
)
def test_counts(value, text):
    assert format_count(value) == text


@pytest.mark.parametrize(("value", "text"), [(512, "512 bytes"), (1536, "1.5 KiB"), (134.2 * 2**30, "134.2 GiB")])
def test_bytes(value, text):
    assert format_bytes(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 s"), (3.12e-5, "31.2 µs"), (0.0031, "3.1 ms"), (2.4, "2.4 s"), (900, "15 min"), (9000, "2.5 h")],
)
def test_durations(seconds, text):
    assert format_duration(seconds) == text


@pytest.mark.parametrize(("seconds", "text"), [(123, "2:03"), (3723, "1:02:03"), (273_900, "3d 04:05")])
def test_clocks(seconds, text):
    assert format_clock(seconds) == text
