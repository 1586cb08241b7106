"""How long KV transfers and handshakes take when the links or engines at both ends are busy."""

import pytest

from fulcrum_simulator.engine import (
    HandshakeQueue,
    HandshakeResult,
    LinkEnd,
    LinkReservation,
    estimate_transfer_s,
    reserve_transfer,
)


def test_a_pull_takes_setup_and_bytes_over_the_link() -> None:
    assert estimate_transfer_s(1000, link_bytes_per_s=500.0, link_setup_s=0.5) == 2.5


def test_transfers_queue_at_either_end() -> None:
    p, d1, d2 = LinkEnd(), LinkEnd(), LinkEnd()
    other_p = LinkEnd()
    slots = [
        reserve_transfer(p, d1, 2.0, now_s=0.0),
        reserve_transfer(p, d2, 2.0, now_s=1.0),
        reserve_transfer(other_p, d2, 1.0, now_s=1.5),
        reserve_transfer(other_p, d1, 1.0, now_s=9.0),
    ]
    assert slots == [
        LinkReservation(start_s=0.0, end_s=2.0),
        LinkReservation(start_s=2.0, end_s=4.0),
        LinkReservation(start_s=4.0, end_s=5.0),
        LinkReservation(start_s=9.0, end_s=10.0),
    ]


@pytest.mark.parametrize(
    ("contacts", "expected"),
    [
        pytest.param(
            [("p", True, 0.0), ("p", True, 1.0)],
            [HandshakeResult(end_s=0.25, ok=True), HandshakeResult(end_s=1.0, ok=True)],
            id="one handshake per pair",
        ),
        pytest.param(
            [("p", True, 0.0), ("p", True, 0.125)],
            [HandshakeResult(end_s=0.25, ok=True), HandshakeResult(end_s=0.25, ok=True)],
            id="a second pull waits for the handshake under way",
        ),
        pytest.param(
            [("dead", False, 0.0), ("new", True, 1.0), ("dead", False, 2.0)],
            [
                HandshakeResult(end_s=5.0, ok=False),
                HandshakeResult(end_s=5.25, ok=True),
                HandshakeResult(end_s=10.25, ok=False),
            ],
            id="an unreachable prefill instance delays the next handshake for its timeout",
        ),
        pytest.param(
            [("p", True, 0.0), ("dead", False, 1.0), ("p", True, 2.0)],
            [
                HandshakeResult(end_s=0.25, ok=True),
                HandshakeResult(end_s=6.0, ok=False),
                HandshakeResult(end_s=2.0, ok=True),
            ],
            id="a pull from a known prefill instance is not delayed",
        ),
    ],
)
def test_handshakes_run_one_after_another(
    contacts: list[tuple[str, bool, float]], expected: list[HandshakeResult]
) -> None:
    handshakes = HandshakeQueue(0.25)
    assert [
        handshakes.reserve_handshake(engine_id, reachable=up, now_s=now_s)
        for engine_id, up, now_s in contacts
    ] == expected
