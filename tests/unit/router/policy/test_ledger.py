"""The ledger's sums are right whatever way a request ends, and prefill work shrinks with time."""

import pytest

from fulcrum_router.policy import Ledger


def totals(ledger: Ledger) -> tuple[float, int, int, int, int, int, int, int, int]:
    return (
        ledger.prefill_queued_s,
        ledger.prefill_tokens,
        ledger.local_prefills,
        ledger.decode_tokens,
        ledger.decode_legs,
        ledger.pending_transfers,
        ledger.legs,
        ledger.reserved_tokens,
        len(ledger.awaited_first_tokens),
    )


EMPTY = totals(Ledger())


def test_every_kind_of_work_is_counted_until_it_is_released() -> None:
    ledger = Ledger()
    prefill = ledger.add_prefill(tokens=100, predicted_s=0.5, now_s=0.0)
    local = ledger.add_local_prefill(tokens=10, predicted_s=0.1, now_s=0.0)
    decode = ledger.add_decode(tokens=100)
    decode.await_first_token(1.0, 0)
    transfer = ledger.add_pending_transfer()
    reservation = ledger.reserve(tokens=50)
    decode.add_tokens(7)
    assert totals(ledger) == (0.6, 110, 1, 107, 1, 1, 2, 50, 1), "a reservation is no leg"
    prefill.release(1.0)
    local.release(1.0)
    decode.release()
    transfer.release()
    reservation.release()
    assert totals(ledger) == EMPTY


def test_a_second_release_changes_nothing() -> None:
    ledger = Ledger()
    prefill = ledger.add_prefill(tokens=5, predicted_s=1.0, now_s=0.0)
    prefill.release(1.0)
    prefill.release(1.0)
    for entry in (ledger.add_decode(tokens=5), ledger.add_pending_transfer(), ledger.reserve(tokens=5)):
        entry.release()
        entry.release()
    assert totals(ledger) == EMPTY


def test_what_comes_after_the_release_is_not_counted() -> None:
    ledger = Ledger()
    decode = ledger.add_decode(tokens=5)
    decode.release()
    decode.add_tokens(3)
    decode.await_first_token(1.0, 0)
    decode.note_first_token()
    assert totals(ledger) == EMPTY


def test_tokens_that_several_legs_share_are_counted_as_those_of_each() -> None:
    ledger = Ledger()
    early, late, alone = (ledger.add_decode(tokens=100) for _ in range(3))
    early.share_count()
    early.share_count()
    ledger.add_shared_tokens(5)
    late.share_count()
    ledger.add_shared_tokens(2)
    alone.add_tokens(1)
    late.add_tokens(1)
    assert [entry.output_tokens for entry in (early, late, alone)] == [7, 3, 1]
    assert ledger.decode_tokens == 311
    early.end_sharing()
    early.end_sharing()
    ledger.add_shared_tokens(10)
    late.release()
    late.share_count()
    ledger.add_shared_tokens(10)
    assert [entry.output_tokens for entry in (early, late, alone)] == [7, 13, 1]
    assert ledger.decode_tokens == 208
    early.release()
    alone.release()
    assert totals(ledger) == EMPTY


def test_an_idle_ledger_has_no_rounding_error() -> None:
    ledger = Ledger()
    entries = [ledger.add_prefill(tokens=1, predicted_s=0.1, now_s=0.0) for _ in range(10)]
    for entry in entries:
        entry.release(1.0)
    assert ledger.prefill_queued_s == 0.0


@pytest.mark.parametrize(
    ("now_s", "remaining_s"),
    [
        pytest.param(10.0, 5.0, id="all of it at first"),
        pytest.param(11.5, 3.5, id="the oldest prompt shrinks while it is computed"),
        pytest.param(12.0, 3.0, id="nothing is left of the oldest prompt when it is due"),
        pytest.param(13.0, 4.0, id="an overdue prompt takes as long again as it is overdue"),
        pytest.param(99.0, 5.0, id="an engine that hangs counts whole"),
        pytest.param(9.0, 5.0, id="a clock that went back adds nothing"),
    ],
)
def test_prefill_work_shrinks_with_time(now_s: float, remaining_s: float) -> None:
    ledger = Ledger()
    ledger.add_prefill(tokens=20, predicted_s=2.0, now_s=10.0)
    ledger.add_prefill(tokens=30, predicted_s=3.0, now_s=11.0)
    assert ledger.remaining_s(now_s) == remaining_s


def test_the_next_prompt_starts_when_the_oldest_one_ends() -> None:
    ledger = Ledger()
    first = ledger.add_prefill(tokens=20, predicted_s=2.0, now_s=10.0)
    cancelled = ledger.add_prefill(tokens=10, predicted_s=1.0, now_s=10.0)
    ledger.add_prefill(tokens=30, predicted_s=3.0, now_s=10.0)
    cancelled.release(11.0)
    assert ledger.remaining_s(11.0) == 4.0
    first.release(14.0)
    assert ledger.remaining_s(15.0) == 2.0
