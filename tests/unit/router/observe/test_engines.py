"""Latency of an engine between two probes."""

import pytest

from fulcrum_router.observe.engines import LatencySums


@pytest.mark.parametrize(
    ("before", "now", "mean"),
    [
        pytest.param(LatencySums(1.0, 10), LatencySums(2.0, 30), 0.05, id="mean since the last read"),
        pytest.param(None, LatencySums(2.0, 30), None, id="first read"),
        pytest.param(LatencySums(2.0, 30), LatencySums(2.0, 30), None, id="no tokens since"),
        pytest.param(LatencySums(2.0, 30), LatencySums(0.5, 3), None, id="engine restarted"),
    ],
)
def test_mean_itl_covers_only_the_tokens_since_the_last_read(
    before: LatencySums | None, now: LatencySums, mean: float | None
) -> None:
    assert now.mean_since(before) == (None if mean is None else pytest.approx(mean))
