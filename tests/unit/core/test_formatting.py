"""Counts and lists in messages: singular and plural, and lists that are cut off."""

import pytest

from fulcrum_core.formatting import format_count, format_list


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        pytest.param((0, "instance"), "0 instances", id="none"),
        pytest.param((1, "instance"), "1 instance", id="one"),
        pytest.param((12_000, "token"), "12,000 tokens", id="thousands"),
        pytest.param((1, "pass", "passes"), "1 pass", id="one, with an irregular plural"),
        pytest.param((2, "instance serves", "instances serve"), "2 instances serve", id="with a verb"),
    ],
)
def test_count_and_noun_agree_in_number(words: tuple[int, str], expected: str) -> None:
    assert format_count(*words) == expected


@pytest.mark.parametrize(
    ("items", "expected"),
    [([], ""), (["a", "b"], "a, b"), (["a", "b", "c"], "a, b and 1 more")],
    ids=["nothing", "as many as fit", "more than fit"],
)
def test_long_list_is_cut_with_the_remaining_count(items: list[str], expected: str) -> None:
    assert format_list(items, at_most=2) == expected
