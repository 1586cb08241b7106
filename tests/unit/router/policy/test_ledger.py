"""The ledger's sums are right whatever way a request ends."""

from fulcrum_router.policy import Ledger


def totals(ledger: Ledger) -> tuple[float, int, int, int, int, int, int]:
    return (
        ledger.prefill_queued_s,
        ledger.prefill_tokens,
        ledger.local_prefills,
        ledger.decode_tokens,
        ledger.decode_legs,
        ledger.pending_transfers,
        ledger.legs,
    )


EMPTY = totals(Ledger())


def test_every_kind_of_work_is_counted_until_it_is_released() -> None:
    ledger = Ledger()
    prefill = ledger.add_prefill(tokens=100, predicted_s=0.5)
    local = ledger.add_local_prefill(tokens=10, predicted_s=0.1)
    decode = ledger.add_decode(tokens=100)
    transfer = ledger.add_pending_transfer()
    decode.add_tokens(7)
    assert totals(ledger) == (0.6, 110, 1, 107, 1, 1, 2)
    for entry in (prefill, local, decode, transfer):
        entry.release()
    assert totals(ledger) == EMPTY


def test_a_second_release_changes_nothing() -> None:
    ledger = Ledger()
    for entry in (ledger.add_prefill(tokens=5, predicted_s=1.0), ledger.add_pending_transfer()):
        entry.release()
        entry.release()
    decode = ledger.add_decode(tokens=5)
    decode.release()
    decode.release()
    assert totals(ledger) == EMPTY


def test_output_after_the_release_is_not_counted() -> None:
    ledger = Ledger()
    decode = ledger.add_decode(tokens=5)
    decode.release()
    decode.add_tokens(3)
    assert totals(ledger) == EMPTY


def test_an_idle_ledger_has_no_rounding_error() -> None:
    ledger = Ledger()
    entries = [ledger.add_prefill(tokens=1, predicted_s=0.1) for _ in range(10)]
    for entry in entries:
        entry.release()
    assert ledger.prefill_queued_s == 0.0
