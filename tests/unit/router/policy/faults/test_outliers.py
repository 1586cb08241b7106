"""Outliers are found by comparison with peers, and never all instances are ejected."""

import pytest

from fulcrum_router.policy.faults.outliers import (
    MIN_LEGS,
    LegCounts,
    find_error_outliers,
    find_slow_outliers,
    may_eject,
)


def count(shares: dict[str, float], *, legs: int = 100) -> list[LegCounts]:
    return [
        LegCounts(name, legs - round(share * legs), round(share * legs)) for name, share in shares.items()
    ]


@pytest.mark.parametrize(
    ("shares", "outliers"),
    [
        pytest.param({"a": 0.9, "b": 0.02}, ["a"], id="of two instances, the one that fails"),
        pytest.param({"a": 0.9, "b": 0.8}, [], id="none if all fail"),
        pytest.param({"a": 0.4, "b": 0.0}, [], id="none of few instances below one half"),
        pytest.param({"a": 1.0}, [], id="not the only instance"),
        pytest.param(dict.fromkeys("abcde", 0.01) | {"f": 0.3}, ["f"], id="of many, below mean − 1.9 σ"),
        pytest.param(dict.fromkeys("abcde", 0.0) | {"f": 0.05}, [], id="not for a few errors"),
        pytest.param(dict.fromkeys("abcde", 0.6) | {"f": 0.7}, ["f"], id="also if all have errors"),
        pytest.param(dict.fromkeys("abcdef", 0.5), [], id="none if all are equal"),
    ],
)
def test_an_instance_that_fails_far_more_than_its_peers_is_an_outlier(
    shares: dict[str, float], outliers: list[str]
) -> None:
    assert find_error_outliers(count(shares)) == outliers


def test_few_legs_prove_nothing() -> None:
    counts = [LegCounts("a", 0, MIN_LEGS - 1), LegCounts("b", 100, 0)]
    assert find_error_outliers(counts) == []


@pytest.mark.parametrize(
    ("seconds", "outliers"),
    [
        pytest.param({"a": 5.0, "b": 1.0, "c": 1.0}, ["a"], id="five times slower than its peers"),
        pytest.param({"a": 4.9, "b": 1.0, "c": 1.0}, [], id="hardly slower"),
        pytest.param({"a": 9.0, "b": 1.0}, [], id="one peer may be the fast one"),
        pytest.param({"a": 9.0, "b": 9.0, "c": 1.0}, [], id="the majority is right"),
    ],
)
def test_an_instance_that_is_far_slower_than_its_peers_is_an_outlier(
    seconds: dict[str, float], outliers: list[str]
) -> None:
    assert find_slow_outliers(seconds) == outliers


def test_at_most_half_of_a_role_is_ejected_and_never_the_last_instance() -> None:
    allowed = {
        (serving, ejected): may_eject(serving=serving, ejected=ejected)
        for serving, ejected in [(1, 0), (2, 0), (1, 1), (4, 0), (3, 1), (2, 2)]
    }
    assert [case for case, allows in allowed.items() if allows] == [(2, 0), (4, 0), (3, 1)]
