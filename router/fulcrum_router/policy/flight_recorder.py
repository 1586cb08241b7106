"""The flight recorder: the requests of the last hour in numbers, without any text, to replay them later.

`fulcrum regret` reads them from `/requests` of the metrics port, replays them in the simulator, and compares
policies, splits and numbers of instances. The exchange records each completion that engines worked for, or
would have, also refused and cancelled ones: a client over its rate limit, or one whose requests engines
reject, must not overwrite those of others. Passed-through requests are not recorded.

A record takes `RECORD_BYTES`. The oldest record is overwritten when all `CAPACITY` are used, so that much
traffic shortens the time that is kept and not the memory of the router.
"""

import struct
from collections.abc import Iterator
from typing import NamedTuple

CAPACITY = 131_072
"""Requests kept at most: 4 MB. An hour of 36 requests a second."""
KEPT_S = 3_600.0
"""Time that is kept, in seconds."""
_RECORD = struct.Struct("<dIIffBBH")
RECORD_BYTES = _RECORD.size
_TOKENS_MAX = 2**32 - 1
_UNKNOWN_S = -1.0


class RequestRecord(NamedTuple):
    """One request that ended."""

    arrival_s: float
    """Arrival in Unix seconds."""
    prompt_tokens: int
    output_tokens: int
    """Of all choices together; 0: not known."""
    ttft_s: float | None
    """Seconds from the arrival to the first byte for the client; None: none, or a whole response."""
    duration_s: float
    """Seconds from the arrival to the end."""
    tier: int
    """Number of the tier in `FlightRecorder.tiers`."""
    outcome: int
    """Number of the outcome in `RequestOutcome`."""
    tenant: int
    """A number for the tenant, another one in each router process. Two tenants may share one."""


class FlightRecorder:
    """The last requests, in the order in which they ended."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        self._capacity = capacity
        self._records = bytearray(b"\xff" * (capacity * RECORD_BYTES))  # not zeros: all memory is taken now
        self._next, self._count = 0, 0
        self.tiers: list[str] = []
        """Names of the tiers by number; 255 tiers at most, more share the last number."""
        self._tier_numbers: dict[str, int] = {}

    def add(
        self,
        *,
        arrival_s: float,
        prompt_tokens: int,
        output_tokens: int,
        ttft_s: float | None,
        duration_s: float,
        tier: str,
        outcome: int,
        tenant: str,
    ) -> None:
        """Record one request; see `RequestRecord`."""
        tier_number, next_one = self._tier_numbers.get(tier), self._next
        _RECORD.pack_into(
            self._records,
            next_one * RECORD_BYTES,
            arrival_s,
            _clamp(prompt_tokens),
            _clamp(output_tokens),
            _UNKNOWN_S if ttft_s is None else ttft_s,
            duration_s,
            self._number_tier(tier) if tier_number is None else tier_number,
            outcome,
            hash(tenant) & 0xFFFF,  # no list of tenants that could grow
        )
        self._next = (next_one + 1) % self._capacity
        if self._count < self._capacity:
            self._count += 1

    def read(self, now_s: float, *, slice_records: int) -> Iterator[list[RequestRecord]]:
        """The requests that arrived within the last hour before `now_s`, the first to end first.

        They come in slices: each reads `slice_records` records, whatever is left of them. Requests that are
        recorded while the caller iterates may replace the oldest ones.
        """
        first = self._next - self._count
        for start in range(first, first + self._count, slice_records):
            end = min(start + slice_records, first + self._count)
            records = (self._read_one(position % self._capacity) for position in range(start, end))
            yield [record for record in records if record.arrival_s >= now_s - KEPT_S]

    def _read_one(self, position: int) -> RequestRecord:
        arrival_s, prompt, output, ttft_s, duration_s, tier, outcome, tenant = _RECORD.unpack_from(
            self._records, position * RECORD_BYTES
        )
        known_ttft_s = None if ttft_s < 0 else ttft_s
        return RequestRecord(arrival_s, prompt, output, known_ttft_s, duration_s, tier, outcome, tenant)

    def _number_tier(self, name: str) -> int:
        """The number of a tier that has none yet."""
        if len(self.tiers) == 255:
            return 254
        number = self._tier_numbers[name] = len(self.tiers)
        self.tiers.append(name)
        return number


def _clamp(tokens: float) -> int:
    """A count that fits into a record: an engine may have sent any number, and NaN counts as 0."""
    if type(tokens) is int and 0 <= tokens <= _TOKENS_MAX:  # the usual case, without three calls
        return tokens
    return int(min(_TOKENS_MAX, max(0, tokens)))
