"""What a connection attempt without a response shows, and pools of thousands of connections."""

import time

import pytest

from fulcrum_router.http1.upstream import ConnectionPool, EngineConnection, classify_connect_timeout
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


def test_thousands_of_connections_are_lost_at_once_without_a_search_for_each() -> None:
    """An engine ends with its idle connections, or clients leave while as many are idle."""
    pool, count = ConnectionPool("127.0.0.1", 1), 8_000
    idle, busy = ([EngineConnection(pool) for _ in range(count)] for _ in range(2))
    for connection in idle:
        pool.put_idle(connection)
    began_s = time.thread_time()
    for connection in (*busy, *reversed(idle[::2]), *reversed(idle[1::2])):
        connection.connection_lost(None)
    assert (pool.idle_count, time.thread_time() - began_s < 0.1) == (0, True)
