"""Which number a text comes to."""

from decimal import Decimal

import pytest

from dovetail.tune.rl.rewards.number import Number, number_of

SAME = [
    ("The answer is 72.", "72"),
    ("3 apples and 4 pears make 7", "#### 7"),
    ("so\n#### 1,234,567", "1234567"),
    (r"hence \boxed{\frac{3}{4}} as shown in step 2", "0.75"),
    (r"\boxed{1} no, \boxed{\dfrac{-7}{2}}", "-3.5"),
    ("x = -3", "-3"),
    ("x = − 3", "-3"),
    ("it is 10-3", "3"),
    ("$1,200.50", "1200.5"),
    ("3/4", ".75"),
    ("50%", "0.5"),
    ("50%", "50"),
    ("0.5", "50%"),
    (r"50\%", "50 %"),
    ("6.02e23", r"6.02 \times 10^{23}"),
    ("2 * 10^3", "2000"),
    ("about 3.14159265", "3.1415927"),
    ("100,200", "100200"),
    ("12, 13", "13"),
    (r"\boxed{\text{about } 5 \text{ km}}", "5"),
    ("1000000000000000000000000000001", "1000000000000000000000000000001"),
]
OTHER = [
    ("", "5"),
    ("no number here", "5"),
    ("5 then 6", "5"),
    ("1/0", "1"),
    ("-3", "3"),
    ("50%", "5"),
    ("1e999999999", "1"),
    (r"\boxed{}", "5"),
    ("9" * 5000, "9"),
]


@pytest.mark.parametrize(("text", "answer"), SAME)
def test_the_same_number(text, answer):
    assert Number()([""], [text], answer=[answer]) == [1.0]


@pytest.mark.parametrize(("text", "answer"), OTHER)
def test_another_number(text, answer):
    assert Number()([""], [text], answer=[answer]) == [0.0]


def test_tolerance_is_relative_above_one():
    near = Number(tolerance=0.01)
    assert near([""] * 3, ["101", "102", "0.005"], answer=[100, 100, 0]) == [1, 0, 1]
    assert Number(tolerance=0)([""] * 2, ["12345678901234567890", "0.1"], answer=["12345678901234567891", "0.1"]) == [
        0,
        1,
    ]


def test_a_row_without_an_answer_is_left_out():
    assert Number("n")([""] * 3, ["1"] * 3, n=[None, "none", 1.0]) == [None, None, 1]


def test_the_number_and_its_percent():
    assert number_of("12.5 %") == (Decimal("12.5"), True)
    assert number_of("GPT-4") == (Decimal(4), False)
