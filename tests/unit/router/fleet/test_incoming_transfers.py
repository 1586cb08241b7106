"""When a KV transfer without a response is late: its KV may have been fetched after the lease expired."""

from dataclasses import dataclass

import pytest

from fulcrum_router.fleet.incoming_transfers import IncomingTransfers


@dataclass(frozen=True)
class Transfer:
    sent_s: float = 0.0
    deadline_s: float = 25.0
    lease_s: float = 30.0


def build_incoming(*transfers: Transfer) -> IncomingTransfers[Transfer]:
    incoming: IncomingTransfers[Transfer] = IncomingTransfers()
    for transfer in transfers:
        incoming.add(transfer)
    return incoming


OLD, YOUNG = Transfer(), Transfer(sent_s=10.0, deadline_s=35.0)


@pytest.mark.parametrize(
    ("now_s", "expected"),
    [
        pytest.param(25.0, [], id="at the deadline of the old one"),
        pytest.param(25.1, [OLD], id="after the deadline of the old one"),
        pytest.param(35.1, [OLD, YOUNG], id="after both deadlines"),
    ],
)
def test_a_transfer_without_a_response_by_its_deadline_is_late(
    now_s: float, expected: list[Transfer]
) -> None:
    incoming = build_incoming(OLD, YOUNG)
    assert [sorted(incoming.find_late(at_s), key=id) for at_s in (now_s, now_s)] == [
        sorted(expected, key=id)
    ] * 2


def test_discarded_and_cleared_transfers_are_never_late() -> None:
    incoming = build_incoming(OLD, YOUNG)
    incoming.discard(OLD)
    incoming.discard(OLD)
    assert incoming.find_late(30.0) == []
    assert incoming.find_late(40.0) == [YOUNG]
    incoming.clear()
    assert incoming.find_late(40.0) == []


@pytest.mark.parametrize(
    ("sent_s", "responded_s", "late_from_s"),
    [
        pytest.param(1.0, 20.0, 35.0, id="sent later: its response shows that the lease was renewed"),
        pytest.param(1.0, 5.0, 25.0, id="an early response extends nothing"),
        pytest.param(0.9, 20.0, 25.0, id="sent at the same time: the engine may have received it first"),
    ],
)
def test_a_response_to_a_later_request_extends_the_deadline(
    sent_s: float, responded_s: float, late_from_s: float
) -> None:
    incoming = build_incoming(OLD)
    incoming.record_response(sent_s=sent_s, now_s=responded_s)
    assert incoming.find_late(late_from_s) == []
    assert incoming.find_late(late_from_s + 0.1) == [OLD]
    incoming.record_response(sent_s=30.0, now_s=31.0)  # the response to a still later request
    assert incoming.find_late(45.9) == []


def test_a_response_to_an_earlier_request_does_not_extend_the_deadline() -> None:
    incoming = build_incoming(OLD)
    incoming.record_response(sent_s=5.0, now_s=6.0)
    incoming.record_response(sent_s=2.0, now_s=24.0)
    assert incoming.find_late(25.1) == [OLD]
