"""Rewards that read the text: what each of them takes for right."""

import pytest

from dovetail.tune.rl.rewards.matches import Exact, Format, Length, Regex
from dovetail.tune.rl.rewards.text import block_of, text_of, transcript_of

MESSAGES = [
    {"role": "assistant", "content": "let me see"},
    {"role": "tool", "content": "17"},
    {"role": "assistant", "content": [{"type": "text", "text": "Pa"}, {"type": "text", "text": "ris"}]},
]


def test_exact_forgives_space_and_compares_with_each_accepted_answer():
    reward = Exact("city")
    completions = [" Paris\n", "paris", MESSAGES, "The  Hague", "Paris"]
    cities = ["Paris", "Paris", "Paris", ["Den Haag", "The Hague"], None]
    assert reward([""] * 5, completions, city=cities) == [1, 0, 1, 1, None]
    assert Exact("city", case=False)([""], ["paris"], city=["PARIS"]) == [1]
    assert Exact("n")([""], ["42"], n=[42]) == [1]


def test_exact_can_compare_a_part():
    reward = Exact(extract=r"<answer>(.*?)</answer>")
    texts = ["<answer>3</answer> no: <answer> 4 </answer>", "4", "<answer>5</answer>"]
    assert reward([""] * 3, texts, answer=["4"] * 3) == [1, 0, 0]


def test_regex_is_found_or_is_the_whole():
    texts = ["I say yes.", "yes", MESSAGES]
    assert Regex("yes")([""] * 3, texts) == [1, 1, 0]
    assert Regex("(?i)YES", full=True)([""] * 3, texts) == [0, 1, 0]


def test_length_in_each_unit_and_how_it_falls():
    assert Length(2, 3, "words")([""] * 4, ["a", "a b", "a b c", "a b c d"]) == [0, 1, 1, 0]
    assert Length(most=3, unit="characters")([""] * 2, ["abc", "abcd"]) == [1, 0]
    assert Length(most=2, soft=3)([""] * 4, [""] * 4, completion_ids=[[1, 2], [1] * 3, [1] * 5, [1] * 9]) == [
        1, 0.75, 0.25, 0,
    ]  # fmt: skip
    assert Length().columns == ("completion_ids",) and Length(unit="words").columns == ()


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
def test_format_wants_each_tag_once_in_order(text, right):
    assert Format()([""], [text]) == [right]


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: Regex("(a"), "pattern must be a regular expression"),
        (lambda: Exact(extract="[z"), "extract must be a regular expression"),
        (lambda: Length(5, 3), "most must be at least 5"),
        (lambda: Length(unit="letters"), "unit must be one of"),
        (lambda: Format(("a b",)), "tags must be names"),
    ],
)
def test_a_wrong_setting_is_told(make, sentence):
    with pytest.raises(ValueError, match=sentence.replace("(", r"\(")):
        make()


def test_texts_of_messages_and_blocks():
    assert text_of(MESSAGES) == "Paris" and text_of([]) == ""
    assert transcript_of([{"role": "user", "content": "hi"}]) == "user: hi"
    text = "first\n```python\na = 1\n```\nthen\n```python\na = 2\n```\nprints\n```\n2\n```"
    assert block_of(text, "python") == "a = 2\n"
    assert block_of(text, "json") == "2\n" and block_of("none", "json") == "none"
