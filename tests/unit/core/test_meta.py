"""Durations and times in the API: parsing, formatting and refusals."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fulcrum_core.api.meta import format_duration, format_time, parse_duration, parse_time


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("50ms", 0.05),
        ("1s", 1.0),
        ("1.5s", 1.5),
        ("2m", 120.0),
        ("1h30m", 5400.0),
        ("1m0.5s", 60.5),
        ("0s", 0.0),
    ],
)
def test_durations_are_parsed_in_kubernetes_notation(text: str, seconds: float) -> None:
    assert parse_duration(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "s", "-1s", "1 s", "1s1m", "1d", "nan", "infs"])
def test_invalid_duration_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a duration"):
        parse_duration(text)


@pytest.mark.parametrize("text", ["5", "1.5"])
def test_number_without_unit_is_refused_with_the_units(text: str) -> None:
    with pytest.raises(ValueError, match=f"has no unit: write {text}s, {text}m or {text}ms"):
        parse_duration(text)


@given(st.integers(min_value=0, max_value=10_000_000))
def test_formatted_duration_parses_to_the_same_seconds(millis: int) -> None:
    seconds = millis / 1000
    assert parse_duration(format_duration(seconds)) == pytest.approx(seconds, abs=1e-6, rel=1e-5)


@given(st.floats(min_value=0, max_value=4e9))
def test_formatted_time_parses_to_the_same_microsecond(at_s: float) -> None:
    assert parse_time(format_time(at_s)) == pytest.approx(at_s, abs=2e-6)
