"""What one instance is doing for this router: the books that dispatch reads.

Every line in the books is opened by exactly one call and taken out by exactly one `release()` of the
entry that the call returned; a second release changes nothing. So the sums are right whatever way a
request ends.
"""

from typing import Protocol


class LedgerView(Protocol):
    """The books, to be read only."""

    @property
    def prefill_queued_s(self) -> float:
        """Predicted seconds of prefill work in flight, local prefills included."""

    @property
    def prefill_tokens(self) -> int:
        """Prompt tokens of that work."""

    @property
    def decode_tokens(self) -> int:
        """KV tokens of decode legs in flight: prompt and output so far."""

    @property
    def decode_legs(self) -> int:
        """Decode legs in flight."""


class Ledger:
    """The books of one instance."""

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
        """All legs in flight; a local prefill is part of its decode leg."""
        return self.prefill_legs + self.decode_legs

    def add_prefill(self, *, tokens: int, seconds: float) -> "PrefillEntry":
        """A prefill leg that is predicted to take `seconds`."""
        self.prefill_legs += 1
        return PrefillEntry(self, tokens, seconds, local=False)

    def add_local_prefill(self, *, tokens: int, seconds: float) -> "PrefillEntry":
        """The prefill that a decode leg without a hand-off does first."""
        self.local_prefills += 1
        return PrefillEntry(self, tokens, seconds, local=True)

    def add_decode(self, *, tokens: int) -> "DecodeEntry":
        """A decode leg over a prompt of `tokens`."""
        return DecodeEntry(self, tokens)

    def add_pending_transfer(self) -> "PendingTransferEntry":
        """A prompt whose KV blocks wait here to be fetched."""
        return PendingTransferEntry(self)


class PrefillEntry:
    """Prefill work in flight."""

    __slots__ = ("_ledger", "_local", "_seconds", "_tokens")

    def __init__(self, ledger: Ledger, tokens: int, seconds: float, *, local: bool) -> None:
        self._ledger: Ledger | None = ledger
        self._tokens = tokens
        self._seconds = seconds
        self._local = local
        ledger.prefill_queued_s += seconds
        ledger.prefill_tokens += tokens

    def release(self) -> None:
        """Take it out of the books."""
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
        ledger.prefill_queued_s = (
            0.0 if idle else max(0.0, ledger.prefill_queued_s - self._seconds)
        )  # no float dust


class DecodeEntry:
    """A decode leg in flight."""

    __slots__ = ("_ledger", "_tokens")

    def __init__(self, ledger: Ledger, tokens: int) -> None:
        self._ledger: Ledger | None = ledger
        self._tokens = tokens
        ledger.decode_legs += 1
        ledger.decode_tokens += tokens

    def add_tokens(self, tokens: int) -> None:
        """Count output tokens; nothing once released."""
        ledger = self._ledger
        if ledger is not None:
            self._tokens += tokens
            ledger.decode_tokens += tokens

    def release(self) -> None:
        """Take it out of the books."""
        ledger = self._ledger
        if ledger is None:
            return
        self._ledger = None
        ledger.decode_legs -= 1
        ledger.decode_tokens -= self._tokens


class PendingTransferEntry:
    """KV blocks that wait to be fetched."""

    __slots__ = ("_ledger",)

    def __init__(self, ledger: Ledger) -> None:
        self._ledger: Ledger | None = ledger
        ledger.pending_transfers += 1

    def release(self) -> None:
        """Take it out of the books."""
        ledger = self._ledger
        if ledger is not None:
            self._ledger = None
            ledger.pending_transfers -= 1
