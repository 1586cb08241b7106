"""Ledger of the work that this router has in flight on one instance; dispatch reads its sums.

Every `add_…` returns an entry. Its `release()` takes the work out again, once; a second call changes nothing,
so that the sums are right whatever way a request ends.

Prefill work shrinks while it is computed. An engine computes prompts in the order of arrival, so only the
oldest one shrinks. Times are seconds of the caller's monotonic clock.

Journeys make and release the entries (`journey.record`); the data path adds the tokens of streams to them.
The simulator, which knows that the decodes of an engine get their tokens together, adds them in one call.
"""

import math
from collections import OrderedDict
from typing import Final

from fulcrum_core.latency import PrefillModel
from fulcrum_router.policy.prefill_steps import PrefillSteps

_NOT_SHARED = -1
MAX_AWAITED: Final = 64
"""Most first tokens of one instance that are looked at one by one; with more, one counts as due."""


class Ledger:
    """Work in flight on one instance."""

    __slots__ = (
        "_next_number",
        "_oldest",
        "_oldest_since_s",
        "_prefill_squares",
        "_prefills",
        "_steps",
        "awaited_first_tokens",
        "caught_up_at_s",
        "decode_legs",
        "decode_tokens",
        "deflections",
        "local_prefills",
        "pending_transfers",
        "prefill_legs",
        "prefill_queued_s",
        "prefill_tokens",
        "reservations",
        "reserved_tokens",
        "shared_legs",
        "shared_tokens",
    )

    def __init__(self) -> None:
        self.prefill_queued_s = 0.0
        """Predicted duration of the prefill work in flight in seconds, from the start of each prompt, local
        prefills included."""
        self.prefill_tokens = 0
        """Prompt tokens of the prefill work in flight, local prefills included."""
        self.prefill_legs = 0
        self.local_prefills = 0
        self.deflections = 0
        """Prompts that were deflected to the instance so far."""
        self.caught_up_at_s = -math.inf
        """When the decodes have caught up with their objective after all deflected prompts."""
        self.decode_tokens = 0
        """KV tokens of decode legs in flight: prompt and output so far."""
        self.decode_legs = 0
        """Decode legs in flight."""
        self.shared_legs = self.shared_tokens = 0
        """Decode legs that share a count of tokens now, and the tokens that were added to it so far."""
        self.awaited_first_tokens: dict[DecodeEntry, tuple[float, int]] = {}
        """Decode legs of streams whose prompt another instance computed, without a first token yet: when it
        is due at the client, and the priority of the tier."""
        self.pending_transfers = 0
        self.reservations = self.reserved_tokens = 0
        """Prompts that are computed elsewhere and will be decoded here, and their KV tokens."""
        self._prefills: OrderedDict[PrefillEntry, None] = OrderedDict()
        """Prompts in flight, in the order of arrival."""
        self._oldest: PrefillEntry | None = None
        """First of `_prefills`, which dispatch reads for every request."""
        self._oldest_since_s = 0.0
        """Time since which the oldest prefill is computed."""
        self._steps = PrefillSteps()
        self._prefill_squares = self._next_number = 0

    def remaining_s(self, now_s: float) -> float:
        """Predict the time in seconds until the prefill work in flight is done.

        An overdue prompt is expected to take as long again as it is overdue, at most its whole time: an
        engine that hangs does not look idle.
        """
        oldest = self._oldest
        if oldest is None:
            return 0.0
        predicted_s = oldest.predicted_s
        left_s = predicted_s - (now_s - self._oldest_since_s)
        if left_s < 0.0:
            left_s = min(-left_s, predicted_s)
        elif left_s > predicted_s:
            left_s = predicted_s
        waiting_s = self.prefill_queued_s - predicted_s
        return left_s + waiting_s if waiting_s > 0.0 else left_s

    @property
    def behind_oldest_s(self) -> float:
        """Predicted duration of the prefill work behind the oldest prompt, in seconds."""
        oldest = self._oldest
        return 0.0 if oldest is None else max(0.0, self.prefill_queued_s - oldest.predicted_s)

    def has_uncomputed_prompt(self, now_s: float) -> bool:
        """Whether a prompt in flight is probably not computed yet.

        All are taken to be computed after twice the time predicted for all of them, and a second, from the
        arrival of the newest one. Some answers, such as those with several choices, come as a whole at their
        end: their prompt stays in flight long after it was computed.
        """
        newest = next(reversed(self._prefills), None)
        return newest is not None and now_s <= newest.added_at_s + 2.0 * self.prefill_queued_s + 1.0

    def predict_answer_s(self, model: PrefillModel, tokens: int, now_s: float) -> float:
        """Predict the time in seconds until a prompt of `tokens` that is sent now is answered.

        Other prompts arrive meanwhile, and share the steps of the engine: see `prefill_steps`.
        """
        if self._oldest is None or not self._steps.size:
            return self.remaining_s(now_s) + model.ttft_s(tokens)
        return self._steps.predict_answer_s(
            model, tokens=tokens, in_flight=self.prefill_tokens, squares=self._prefill_squares, now_s=now_s
        )

    @property
    def legs(self) -> int:
        """All legs in flight. A local prefill is part of its decode leg and not counted again."""
        return self.prefill_legs + self.decode_legs

    def add_prefill(self, *, tokens: int, predicted_s: float, now_s: float) -> "PrefillEntry":
        """Add a prefill leg whose computation is predicted to take `predicted_s`."""
        self.prefill_legs += 1
        return self._add(PrefillEntry(self, tokens, predicted_s, local=False), now_s)

    def add_local_prefill(self, *, tokens: int, predicted_s: float, now_s: float) -> "PrefillEntry":
        """Add the prefill that the engine of a decode leg does itself, without a KV transfer."""
        self.local_prefills += 1
        return self._add(PrefillEntry(self, tokens, predicted_s, local=True), now_s)

    def deflect(self, *, recovery_s: float, now_s: float) -> None:
        """Note that a prompt is deflected here; decode needs `recovery_s` to catch up with its objective."""
        self.deflections += 1
        self.caught_up_at_s = max(now_s, self.caught_up_at_s) + recovery_s

    def give_back(self, *, recovery_s: float) -> None:
        """Note that of a deflected prompt so much is not computed."""
        self.caught_up_at_s -= recovery_s

    def _add(self, entry: "PrefillEntry", now_s: float) -> "PrefillEntry":
        entry.number, self._next_number = self._next_number, self._next_number + 1
        entry.added_at_s = now_s
        if self._oldest is None:
            self._oldest, self._oldest_since_s = entry, now_s
            self._steps.begin(entry.number, entry.tokens, now_s)
        self._prefills[entry] = None
        self._prefill_squares += entry.tokens**2
        self.prefill_queued_s += entry.predicted_s
        self.prefill_tokens += entry.tokens
        return entry

    def _remove(self, entry: "PrefillEntry", now_s: float) -> float | None:
        prefills, oldest_for_s = self._prefills, None
        del prefills[entry]
        if self._oldest is entry:
            oldest_for_s = now_s - self._oldest_since_s
            self._oldest, self._oldest_since_s = next(iter(prefills), None), now_s  # the next one starts now
        self.prefill_tokens -= entry.tokens
        self._prefill_squares -= entry.tokens**2
        if oldest_for_s is not None:
            self._steps.answer(
                entry.number,
                entry.tokens,
                now_s,
                newest=self._next_number - 1,
                left_tokens=self.prefill_tokens,
                next_tokens=0 if self._oldest is None else self._oldest.tokens,
            )
        # Adding and subtracting floats leaves a rounding error: reset the sum when nothing is in flight.
        self.prefill_queued_s = max(0.0, self.prefill_queued_s - entry.predicted_s) if prefills else 0.0
        return oldest_for_s

    def add_decode(self, *, tokens: int) -> "DecodeEntry":
        """Add a decode leg for a prompt of `tokens`."""
        return DecodeEntry(self, tokens)

    def has_first_token_due(self, now_s: float, before_s: float, *, priority: int) -> bool:
        """Whether a first token is due from now on until `before_s`, in a tier of at least this priority.

        Overdue ones do not count: nothing can be done for them.
        """
        awaited = self.awaited_first_tokens
        if len(awaited) > MAX_AWAITED:
            awaited = {entry: due for entry, due in awaited.items() if due[0] >= now_s}
            self.awaited_first_tokens = awaited
        return len(awaited) > MAX_AWAITED or any(
            now_s <= due_s < before_s and priority <= other for due_s, other in awaited.values()
        )

    def add_shared_tokens(self, tokens: int) -> None:
        """Add so many output tokens to each decode leg that shares the count (`DecodeEntry.share_count`)."""
        self.shared_tokens += tokens
        self.decode_tokens += tokens * self.shared_legs

    def reserve(self, *, tokens: int) -> "Reservation":
        """Reserve room for the decode leg of a prompt of `tokens` that another instance computes first."""
        return Reservation(self, tokens)

    def add_pending_transfer(self) -> "PendingTransferEntry":
        """Add a prompt whose KV no decode instance has fetched yet."""
        return PendingTransferEntry(self)


class PrefillEntry:
    """One prompt to be computed on the instance."""

    __slots__ = ("_ledger", "_local", "added_at_s", "number", "predicted_s", "tokens")

    def __init__(self, ledger: Ledger, tokens: int, predicted_s: float, *, local: bool) -> None:
        self._ledger: Ledger | None = ledger
        self._local = local
        self.tokens = tokens
        self.predicted_s = predicted_s
        """Predicted time to compute the prompt alone."""
        self.number = 0
        """Of the ledger's prompts, in the order of arrival."""
        self.added_at_s = 0.0

    def uncomputed_share(self, now_s: float) -> float:
        """Share of the prompt that cannot be computed yet, however little else the engine has to do."""
        taken = (now_s - self.added_at_s) / self.predicted_s if self.predicted_s else 1.0
        return max(0.0, 1.0 - taken)

    def release(self, now_s: float) -> float | None:
        """Take the entry out of the ledger, and return for how long the prompt was the oldest one.

        None: an older prompt is in flight, or the entry was released before.
        """
        ledger = self._ledger
        if ledger is None:
            return None
        self._ledger = None
        if self._local:
            ledger.local_prefills -= 1
        else:
            ledger.prefill_legs -= 1
        return ledger._remove(self, now_s)


class DecodeEntry:
    """One decode leg, with the tokens of its prompt and its output so far."""

    __slots__ = ("_ledger", "_output_tokens", "_prompt_tokens", "_shared_from")

    def __init__(self, ledger: Ledger, tokens: int) -> None:
        self._ledger: Ledger | None = ledger
        self._prompt_tokens, self._output_tokens = tokens, 0
        self._shared_from = _NOT_SHARED
        """Shared tokens of the ledger when the entry joined."""
        ledger.decode_legs += 1
        ledger.decode_tokens += tokens

    @property
    def output_tokens(self) -> int:
        """Output tokens so far."""
        ledger, since = self._ledger, self._shared_from
        if ledger is None or since == _NOT_SHARED:
            return self._output_tokens
        return self._output_tokens + ledger.shared_tokens - since

    def add_tokens(self, tokens: int) -> None:
        """Add output tokens; no effect after the release."""
        ledger = self._ledger
        if ledger is not None:
            self._output_tokens += tokens
            ledger.decode_tokens += tokens

    def share_count(self) -> None:
        """Get the tokens of `Ledger.add_shared_tokens` until `end_sharing`; no effect after the release."""
        ledger = self._ledger
        if ledger is not None and self._shared_from == _NOT_SHARED:
            self._shared_from = ledger.shared_tokens
            ledger.shared_legs += 1

    def end_sharing(self) -> None:
        """Count alone again. No effect on an entry that does not share a count."""
        ledger, since = self._ledger, self._shared_from
        if ledger is not None and since != _NOT_SHARED:
            self._output_tokens += ledger.shared_tokens - since
            self._shared_from = _NOT_SHARED
            ledger.shared_legs -= 1

    def await_first_token(self, due_s: float, priority: int) -> None:
        """Note when the first token is due at the client, and the priority of its tier."""
        if self._ledger is not None:
            self._ledger.awaited_first_tokens[self] = due_s, priority

    def note_first_token(self) -> None:
        """Note that the first token was sent. A second call has no effect."""
        if self._ledger is not None:
            self._ledger.awaited_first_tokens.pop(self, None)

    def release(self) -> None:
        """Take the entry out of the ledger. A second call has no effect."""
        ledger = self._ledger
        if ledger is None:
            return
        self.note_first_token()
        self.end_sharing()
        self._ledger = None
        ledger.decode_legs -= 1
        ledger.decode_tokens -= self._prompt_tokens + self._output_tokens


class Reservation:
    """Room for one decode leg, until its prompt is computed. It is no leg: nothing was sent yet."""

    __slots__ = ("_ledger", "_tokens")

    def __init__(self, ledger: Ledger, tokens: int) -> None:
        self._ledger: Ledger | None = ledger
        self._tokens = tokens
        ledger.reservations += 1
        ledger.reserved_tokens += tokens

    def release(self) -> None:
        """Take the reservation out of the ledger. A second call has no effect."""
        ledger = self._ledger
        if ledger is not None:
            self._ledger = None
            ledger.reservations -= 1
            ledger.reserved_tokens -= self._tokens


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
