"""A connection attempt without a response shows a dead node only if nothing else explains it."""

import pytest

from fulcrum_router.http1.upstream import classify_connect_timeout
from fulcrum_router.policy.faults.failures import Failure


@pytest.mark.parametrize(
    ("took_s", "has_data", "failure"),
    [
        pytest.param(1.01, False, Failure.UNREACHABLE, id="silence: nobody is there"),
        pytest.param(1.01, True, Failure.TIMEOUT, id="data on other connections: the backlog is full"),
        pytest.param(1.60, False, Failure.TIMEOUT, id="a late time-out: the router stood still"),
    ],
)
def test_a_connect_timeout_is_classified(took_s: float, has_data: bool, failure: Failure) -> None:
    assert classify_connect_timeout(took_s=took_s, timeout_s=1.0, has_data=has_data) is failure
