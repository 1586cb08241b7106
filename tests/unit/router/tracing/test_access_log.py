"""The access log takes the configured share of the requests, evenly."""

import pytest

from fulcrum_router.tracing.access_log import AccessLog


@pytest.mark.parametrize(
    ("share", "taken"),
    [
        pytest.param(0.0, [], id="none"),
        pytest.param(0.25, [3, 7], id="each fourth"),
        pytest.param(1.0, [0, 1, 2, 3, 4, 5, 6, 7], id="all"),
    ],
)
def test_a_share_of_the_requests_is_taken_evenly(share: float, taken: list[int]) -> None:
    log = AccessLog()
    log.share = share
    assert [number for number in range(8) if log.takes_next()] == taken
