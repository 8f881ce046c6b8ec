"""Rewards that compare text: answers, patterns, lengths, formats and numbers."""

from decimal import Decimal

import pytest
from refusals import refuses

from dovetail.core.errors import RecipeError
from dovetail.tune.rl.rewards.completion import block_of, text_of, transcript_of
from dovetail.tune.rl.rewards.matches import (
    ExactReward,
    FormatReward,
    LengthReward,
    NumberReward,
    RegexReward,
    number_of,
)

MESSAGES = [
    {"role": "assistant", "content": "let me see"},
    {"role": "tool", "content": "17"},
    {"role": "assistant", "content": [{"type": "text", "text": "Pa"}, {"type": "text", "text": "ris"}]},
]


def test_exact_ignores_space_and_compares_with_each_accepted_answer():
    reward = ExactReward("city")
    completions = [" Paris\n", "paris", MESSAGES, "The  Hague", "Paris"]
    cities = ["Paris", "Paris", "Paris", ["Den Haag", "The Hague"], None]
    assert reward([""] * 5, completions, city=cities) == [1, 0, 1, 1, None]
    assert ExactReward("city", case=False)([""], ["paris"], city=["PARIS"]) == [1]
    assert ExactReward("n")([""], ["42"], n=[42]) == [1]


def test_exact_can_compare_a_part():
    reward = ExactReward(extract=r"<answer>(.*?)</answer>")
    texts = ["<answer>3</answer> no: <answer> 4 </answer>", "4", "<answer>5</answer>"]
    assert reward([""] * 3, texts, answer=["4"] * 3) == [1, 0, 0]


def test_regex_is_found_or_matches_everything():
    texts = ["I say yes.", "yes", MESSAGES]
    assert RegexReward("yes")([""] * 3, texts) == [1, 1, 0]
    assert RegexReward("(?i)YES", full=True)([""] * 3, texts) == [0, 1, 0]


def test_length_in_each_unit_and_its_soft_limit():
    assert LengthReward(2, 3, "words")([""] * 4, ["a", "a b", "a b c", "a b c d"]) == [0, 1, 1, 0]
    assert LengthReward(most=3, unit="characters")([""] * 2, ["abc", "abcd"]) == [1, 0]
    assert LengthReward(most=2, soft=3)([""] * 4, [""] * 4, completion_ids=[[1, 2], [1] * 3, [1] * 5, [1] * 9]) == [
        1, 0.75, 0.25, 0,
    ]  # fmt: skip
    assert LengthReward().columns == ("completion_ids",) and LengthReward(unit="words").columns == ()


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("<think>so</think>\n<answer>4</answer>\n", 1),
        ("<think>so</think> well, <answer>4</answer>", 0),
        ("<answer>4</answer><think>so</think>", 0),
        ("<think>so</think><answer> </answer>", 0),
        ("<think>a</think><think>b</think><answer>4</answer>", 0),
        ("<think>so<answer>4</answer></think>", 0),
        ("<think>so</think>", 0),
        ("<think>so</think><answer>4</answer> and more", 0),
    ],
)
def test_format_requires_each_tag_once_in_order(text, right):
    assert FormatReward()([""], [text]) == [right]


@pytest.mark.parametrize(
    ("make", "param"),
    [
        (lambda: RegexReward("(a"), "pattern"),
        (lambda: RegexReward(""), "pattern"),
        (lambda: ExactReward(extract="[z"), "extract"),
        (lambda: LengthReward(5, 3), "most"),
        (lambda: LengthReward(-1), "least"),
        (lambda: LengthReward(unit="letters"), "unit"),
        (lambda: FormatReward(("a b",)), "tags"),
        (lambda: NumberReward(tolerance=-1), "tolerance"),
    ],
)
def test_a_wrong_setting_is_refused(make, param):
    with refuses(param, RecipeError):
        make()


def test_texts_of_messages_and_blocks():
    assert text_of(MESSAGES) == "Paris" and text_of([]) == ""
    assert transcript_of([{"role": "user", "content": "hi"}]) == "user: hi"
    text = "first\n```python\na = 1\n```\nthen\n```python\na = 2\n```\nprints\n```\n2\n```"
    assert block_of(text, "python") == "a = 2\n"
    assert block_of(text, "json") == "2\n" and block_of("none", "json") == "none"


# --- numbers ----------------------------------------------------------------------------------------------------------

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
    assert NumberReward()([""], [text], answer=[answer]) == [1.0]


@pytest.mark.parametrize(("text", "answer"), OTHER)
def test_another_number(text, answer):
    assert NumberReward()([""], [text], answer=[answer]) == [0.0]


def test_tolerance_is_relative_above_one():
    near = NumberReward(tolerance=0.01)
    assert near([""] * 3, ["101", "102", "0.005"], answer=[100, 100, 0]) == [1, 0, 1]
    assert NumberReward(tolerance=0)(
        [""] * 2, ["12345678901234567890", "0.1"], answer=["12345678901234567891", "0.1"]
    ) == [
        0,
        1,
    ]


def test_a_row_without_an_answer_has_no_reward():
    assert NumberReward("n")([""] * 3, ["1"] * 3, n=[None, "none", 1.0]) == [None, None, 1]


def test_the_number_and_its_percent():
    assert number_of("12.5 %") == (Decimal("12.5"), True)
    assert number_of("GPT-4") == (Decimal(4), False)
