"""Ledger of the work that this router has in flight on one instance; dispatch reads its sums.

Every `add_…` returns an entry. Its `release()` takes the work out again, once; a second call changes nothing,
so that the sums are right whatever way a request ends.
"""

from typing import Protocol


class LedgerView(Protocol):
    """The sums of a ledger, read-only."""

    @property
    def prefill_queued_s(self) -> float:
        """Predicted duration of the prefill work in flight in seconds, local prefills included."""

    @property
    def prefill_tokens(self) -> int:
        """Prompt tokens of the prefill work in flight, local prefills included."""

    @property
    def decode_tokens(self) -> int:
        """KV tokens of decode legs in flight: prompt and output so far."""

    @property
    def decode_legs(self) -> int:
        """Decode legs in flight."""


class Ledger:
    """Work in flight on one instance: see `LedgerView`."""

    __slots__ = (
        "decode_legs",
        "decode_tokens",
        "local_prefills",
        "pending_transfers",
        "prefill_legs",
        "prefill_queued_s",
        "prefill_tokens",
    )

    def __init__(self) -> None:
        self.prefill_queued_s = 0.0
        self.prefill_tokens = 0
        self.prefill_legs = 0
        self.local_prefills = 0
        self.decode_tokens = 0
        self.decode_legs = 0
        self.pending_transfers = 0

    @property
    def legs(self) -> int:
        """All legs in flight. A local prefill is part of its decode leg and not counted again."""
        return self.prefill_legs + self.decode_legs

    def add_prefill(self, *, tokens: int, predicted_s: float) -> "PrefillEntry":
        """Add a prefill leg that is predicted to take `predicted_s`."""
        self.prefill_legs += 1
        return PrefillEntry(self, tokens, predicted_s, local=False)

    def add_local_prefill(self, *, tokens: int, predicted_s: float) -> "PrefillEntry":
        """Add the prefill that the engine of a decode leg does itself, without a KV transfer."""
        self.local_prefills += 1
        return PrefillEntry(self, tokens, predicted_s, local=True)

    def add_decode(self, *, tokens: int) -> "DecodeEntry":
        """Add a decode leg for a prompt of `tokens`."""
        return DecodeEntry(self, tokens)

    def add_pending_transfer(self) -> "PendingTransferEntry":
        """Add a prompt whose KV no decode instance has fetched yet."""
        return PendingTransferEntry(self)


class PrefillEntry:
    """One prompt to be computed on the instance."""

    __slots__ = ("_ledger", "_local", "_predicted_s", "_tokens")

    def __init__(self, ledger: Ledger, tokens: int, predicted_s: float, *, local: bool) -> None:
        self._ledger: Ledger | None = ledger
        self._tokens = tokens
        self._predicted_s = predicted_s
        self._local = local
        ledger.prefill_queued_s += predicted_s
        ledger.prefill_tokens += tokens

    def release(self) -> None:
        """Take the entry out of the ledger. A second call has no effect."""
        ledger = self._ledger
        if ledger is None:
            return
        self._ledger = None
        if self._local:
            ledger.local_prefills -= 1
        else:
            ledger.prefill_legs -= 1
        ledger.prefill_tokens -= self._tokens
        idle = not ledger.prefill_legs and not ledger.local_prefills
        # Adding and subtracting floats leaves a rounding error: reset the sum when nothing is in flight.
        ledger.prefill_queued_s = 0.0 if idle else max(0.0, ledger.prefill_queued_s - self._predicted_s)


class DecodeEntry:
    """One decode leg, with the tokens of its prompt and its output so far."""

    __slots__ = ("_ledger", "_tokens")

    def __init__(self, ledger: Ledger, tokens: int) -> None:
        self._ledger: Ledger | None = ledger
        self._tokens = tokens
        ledger.decode_legs += 1
        ledger.decode_tokens += tokens

    def add_tokens(self, tokens: int) -> None:
        """Add output tokens; no effect after the release."""
        ledger = self._ledger
        if ledger is not None:
            self._tokens += tokens
            ledger.decode_tokens += tokens

    def release(self) -> None:
        """Take the entry out of the ledger. A second call has no effect."""
        ledger = self._ledger
        if ledger is None:
            return
        self._ledger = None
        ledger.decode_legs -= 1
        ledger.decode_tokens -= self._tokens


class PendingTransferEntry:
    """One prompt whose KV no decode instance has fetched yet."""

    __slots__ = ("_ledger",)

    def __init__(self, ledger: Ledger) -> None:
        self._ledger: Ledger | None = ledger
        ledger.pending_transfers += 1

    def release(self) -> None:
        """Take the entry out of the ledger. A second call has no effect."""
        ledger = self._ledger
        if ledger is not None:
            self._ledger = None
            ledger.pending_transfers -= 1
