"""Divide the time of one request over its parts, and name the part by which it missed its objectives.

    arrival ─ waiting ─ prefill leg: queue, prefill ─ decode leg: transfer, queue ─ first byte ─ decode ─ end

The router sees when a leg is sent and when it ends. Within a leg it goes by the prefill ledger (for how long
the prompt was the oldest one), by the expected duration of the KV transfer, and by what the decode engine
says that requests wait for; the rest is the queue.

The data path notes the times in `RequestTimes` and divides them at the end, for metrics and spans. Nothing is
decided from the result.
"""

from enum import StrEnum

from fulcrum_core.values import Slo


class LatencyPart(StrEnum):
    """Where the time of a request goes, in the order of its journey."""

    ADMISSION = "admission"
    """Time in the router until it refused the request."""
    WAITING = "waiting"
    """Time in the router until the first leg is sent: in the waiting room, or waiting for a flip."""
    RETRIES = "retries"
    """Time in legs that failed, and between legs."""
    PREFILL_QUEUE = "prefill_queue"
    """Time in the engine that computes the prompt, behind the prompts of other requests."""
    PREFILL = "prefill"
    TRANSFER = "transfer"
    """Time until decode has the KV: that expected of the pair, or more while the engine reports fetches."""
    DECODE_QUEUE = "decode_queue"
    """The rest of the time until the first token: the queue of the decode instance, and its first step."""
    DECODE = "decode"
    """Time from the first token to the last one."""
    SLOW_CLIENT = "slow_client"
    """Time after the first token in which the client reads too slowly."""

    __hash__ = str.__hash__  # counted on the data path: an enum's own hash is a Python call


PARTS = tuple(LatencyPart)
CAUSES_OF_MISS = PARTS[:-1]
"""A slow client causes no miss."""
_DECODE = PARTS.index(LatencyPart.DECODE)
_FORGOTTEN_PER_SAMPLE = 0.5
"""Weight that older samples lose with each new one: what waits in an engine changes within seconds."""

_NONE_WAITED = 0.05
"""What is left of a single waiting request after five samples without any."""


class WaitCauses:
    """What requests wait for in a decode engine, by the engine's own samples: KV, or a place."""

    __slots__ = ("_fetching", "_queued")

    def __init__(self) -> None:
        self._fetching = self._queued = 0.0

    def record(self, *, fetching: float, queued: float) -> None:
        """Record a sample: requests whose KV is being fetched, and requests that wait for a place."""
        self._fetching = self._fetching * _FORGOTTEN_PER_SAMPLE + fetching
        self._queued = self._queued * _FORGOTTEN_PER_SAMPLE + queued

    @property
    def fetching_share(self) -> float:
        """Share of the recent waiting requests that fetch KV; 0: none waited in the last seconds."""
        waiting = self._fetching + self._queued
        return self._fetching / waiting if waiting > _NONE_WAITED else 0.0


class RequestTimes:
    """When the legs of one request were sent and ended, in seconds of the caller's clock; 0: not yet."""

    __slots__ = (
        "arrival_s",
        "compute_s",
        "decode_sent_s",
        "fetching_share",
        "first_leg_s",
        "is_local",
        "prefill_ended_s",
        "prefill_sent_s",
        "transfer_s",
    )

    def __init__(self, arrival_s: float) -> None:
        self.arrival_s = arrival_s
        self.first_leg_s = self.prefill_sent_s = self.prefill_ended_s = self.decode_sent_s = 0.0
        """Times of the first leg, of the last prefill leg (sent, ended), and of the last decode leg."""
        self.compute_s: float | None = None
        """Time for which the prompt was computed; None: the whole prefill leg."""
        self.transfer_s = 0.0
        """Expected duration of the KV transfer of the decode leg."""
        self.is_local = False
        """Whether the decode leg computes the prompt."""
        self.fetching_share = 0.0
        """Share of the time beyond the expected transfer that is transfer, too; see `WaitCauses`."""

    def send_prefill(self, now_s: float) -> None:
        """Record that a prefill leg is sent."""
        self.first_leg_s = self.first_leg_s or now_s
        self.prefill_sent_s, self.prefill_ended_s = now_s, 0.0

    def end_prefill(self, now_s: float, *, responded: bool, compute_s: float | None) -> None:
        """Record that the prefill leg ended; without a response its time is that of a retry."""
        self.prefill_ended_s, self.compute_s = now_s, compute_s
        if not responded:
            self.prefill_sent_s = now_s

    def send_decode(self, now_s: float, *, transfer_s: float, local_compute_s: float | None) -> None:
        """Record that a decode leg is sent.

        Args:
            now_s: Time of the event.
            transfer_s: Expected duration of its KV transfer; 0: none.
            local_compute_s: Expected time to compute the prompt in this leg; None: it is computed.
        """
        self.first_leg_s = self.first_leg_s or now_s
        self.decode_sent_s, self.transfer_s = now_s, transfer_s
        self.is_local = local_compute_s is not None
        if local_compute_s is not None:
            self.prefill_sent_s = self.prefill_ended_s = 0.0
            self.compute_s = local_compute_s

    def divide(
        self,
        end_s: float,
        *,
        first_byte_s: float | None,
        unread_s: float = 0.0,
        streamed: bool = True,
        refused: bool = False,
    ) -> tuple[float, ...]:
        """Divide the time from the arrival to `end_s` over `PARTS`: seconds that sum to the whole.

        Args:
            end_s: When the request ended, however it did.
            first_byte_s: When the client got its first byte; None: never.
            unread_s: For how long after that the client did not read.
            streamed: Whether the first byte came with the first token. In a whole response it comes last:
                what is not expected before the first token counts as decode.
            refused: Whether the router refused the request: what it waited is admission.
        """
        # A time that was not reached lies at the next one that was, so that the part between them is 0.
        # Comparisons, not `min`: they take half the time, and each request comes here.
        if first_byte_s is None or first_byte_s > end_s:
            first_byte_s = end_s
        first_leg_s, decode_sent_s = self.first_leg_s, self.decode_sent_s
        if not first_leg_s or first_leg_s > first_byte_s:
            first_leg_s = first_byte_s
        if not decode_sent_s or decode_sent_s > first_byte_s:
            decode_sent_s = first_byte_s
        sent_s, ended_s = self.prefill_sent_s, self.prefill_ended_s
        if not sent_s:
            sent_s = ended_s = first_leg_s if self.decode_sent_s else decode_sent_s
        if not ended_s or ended_s > decode_sent_s:
            ended_s = decode_sent_s
        sent_s = sent_s if sent_s < ended_s else ended_s
        leg_s, decode_leg_s = ended_s - sent_s, first_byte_s - decode_sent_s
        queue_s = decode_s = transfer_s = 0.0
        if self.is_local:
            prefill_s = min(decode_leg_s, self.compute_s or 0.0)
            queue_s, rest_s = (decode_leg_s - prefill_s, 0.0) if streamed else (0.0, decode_leg_s - prefill_s)
        else:
            # The computation was within the leg: the rest of the leg was the engine's queue.
            compute_s = self.compute_s
            prefill_s = leg_s if compute_s is None or compute_s > leg_s else compute_s
            queue_s = leg_s - prefill_s
            transfer_s = min(decode_leg_s, self.transfer_s)
            transfer_s += (decode_leg_s - transfer_s) * self.fetching_share
            rest_s = decode_leg_s - transfer_s
        if not streamed:
            decode_s, rest_s = rest_s, 0.0
        after_s = end_s - first_byte_s
        unread_s = min(max(0.0, unread_s), after_s)
        waiting_s, retries_s = (
            first_leg_s - self.arrival_s,
            (sent_s - first_leg_s) + (decode_sent_s - ended_s),
        )
        admission_s, waiting_s = (waiting_s, 0.0) if refused else (0.0, waiting_s)
        decode_s = decode_s + after_s - unread_s
        return admission_s, waiting_s, retries_s, queue_s, prefill_s, transfer_s, rest_s, decode_s, unread_s


def find_cause_of_miss(parts: tuple[float, ...], slo: Slo, *, tokens: int | None) -> LatencyPart:
    """Name the part by which a request missed its objectives.

    That is decode if its time for each of `tokens` exceeds the TPOT objective by a larger factor than the
    time before the first token exceeds the TTFT objective, else the longest part before the first token.
    None: the number of tokens is not known.
    """
    before, decode_s = parts[:_DECODE], parts[_DECODE]
    before_s = sum(before)
    if tokens is None:
        by_decode = before_s <= slo.ttft_s and decode_s > 0
    else:  # the two ratios, multiplied out: an objective may be 0
        by_decode = decode_s * slo.ttft_s > before_s * max(1, tokens - 1) * slo.tpot_s
    return LatencyPart.DECODE if by_decode else PARTS[max(range(_DECODE), key=before.__getitem__)]
