"""The books balance whatever way a request ends."""

from fulcrum_router.policy import Ledger


def sums(ledger: Ledger) -> tuple[float, int, int, int, int, int, int]:
    return (
        ledger.prefill_s,
        ledger.prefill_tokens,
        ledger.local_prefills,
        ledger.decode_tokens,
        ledger.decode_requests,
        ledger.open_handoffs,
        ledger.legs,
    )


EMPTY = sums(Ledger())


def test_every_kind_of_work_is_in_the_books_until_it_is_released() -> None:
    ledger = Ledger()
    prefill = ledger.open_prefill(tokens=100, seconds=0.5)
    local = ledger.open_local_prefill(tokens=10, seconds=0.1)
    decode = ledger.open_decode(tokens=100)
    handoff = ledger.open_handoff()
    decode.grow(7)
    assert sums(ledger) == (0.6, 110, 1, 107, 1, 1, 2)
    for entry in (prefill, local, decode, handoff):
        entry.release()
    assert sums(ledger) == EMPTY


def test_a_second_release_changes_nothing() -> None:
    ledger = Ledger()
    for entry in (ledger.open_prefill(tokens=5, seconds=1.0), ledger.open_handoff()):
        entry.release()
        entry.release()
    decode = ledger.open_decode(tokens=5)
    decode.release()
    decode.release()
    assert sums(ledger) == EMPTY


def test_output_after_the_release_is_not_counted() -> None:
    ledger = Ledger()
    decode = ledger.open_decode(tokens=5)
    decode.release()
    decode.grow(3)
    assert sums(ledger) == EMPTY


def test_an_idle_ledger_holds_no_float_dust() -> None:
    ledger = Ledger()
    entries = [ledger.open_prefill(tokens=1, seconds=0.1) for _ in range(10)]
    for entry in entries:
        entry.release()
    assert ledger.prefill_s == 0.0
