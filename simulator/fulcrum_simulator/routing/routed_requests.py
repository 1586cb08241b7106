"""Requests whose route is chosen on arrival, both instances together, as published systems do it.

Nothing of the shipped journey is used: a request waits in the engines only, and ends when one of its engines
fails. The prefill instance computes the prompt and the decode instance reads its KV.
`fleet.published_dispatch` has the choices; `SimulatedRouter` starts the requests.
"""

from collections.abc import Callable
from typing import Protocol

from fulcrum_core.values import Slo
from fulcrum_router.policy.faults.failures import Failure
from fulcrum_router.policy.ledger import DecodeEntry, PrefillEntry, Reservation
from fulcrum_router.policy.predictions.learning import LearningInstance
from fulcrum_simulator.engine import (
    EngineRequest,
    Finished,
    FinishReason,
    KvExportRequest,
    KvTransfer,
    NoKvTransfer,
    OutputToken,
)
from fulcrum_simulator.routing.journeys import LegOwner, Outcome, RoutingPort, SimulatedLeg, SimulatedRequest


class RouteDispatch(Protocol):
    """Chooses the two instances of a request."""

    def choose(
        self, tokens: int, slo: Slo, now_s: float, /
    ) -> tuple[LearningInstance, LearningInstance] | None:
        """Choose the instances that compute the prompt and decode; None: a role has no serving instance."""

    def request_ended(self, decode: LearningInstance, now_s: float, /) -> None:
        """A request whose decode instance this is has ended, and is out of the ledgers."""


class RoutedRequests:
    """Starts the requests; in place of `SimulatedJourneys`."""

    def __init__(self, dispatch: RouteDispatch, port: RoutingPort[LearningInstance]) -> None:
        self.dispatch, self.port = dispatch, port

    def start(
        self,
        request: SimulatedRequest,
        slo: Slo,
        *,
        on_token: Callable[[OutputToken], None],
        on_end: Callable[[Outcome], None],
    ) -> None:
        """Serve a request that arrives now; `on_end` is called once, at once or later."""
        route = self.dispatch.choose(request.prompt_tokens, slo, self.port.now_s())
        if route is None:
            on_end(Outcome.FAILED)
        else:
            _RoutedRun(self, request, route, on_token, on_end).send_prefill()


class _RoutedRun(LegOwner):
    """One request in progress."""

    __slots__ = (
        "_decode",
        "_decode_entry",
        "_on_end",
        "_on_token",
        "_prefill",
        "_prefill_entry",
        "_request",
        "_requests",
        "_reservation",
    )

    def __init__(
        self,
        requests: RoutedRequests,
        request: SimulatedRequest,
        route: tuple[LearningInstance, LearningInstance],
        on_token: Callable[[OutputToken], None],
        on_end: Callable[[Outcome], None],
    ) -> None:
        self._requests, self._request, self._on_token, self._on_end = requests, request, on_token, on_end
        self._prefill, self._decode = route
        self._prefill_entry: PrefillEntry | None = None
        self._reservation: Reservation | None = None
        """Counts the prompt as decode work until its decode leg is sent."""
        self._decode_entry: DecodeEntry | None = None

    def find_decode_entry(self) -> DecodeEntry | None:
        """See `LegOwner`."""
        return self._decode_entry

    def send_prefill(self) -> None:
        """Send the prefill leg."""
        tokens, instance = self._request.prompt_tokens, self._prefill
        predicted_s = instance.prefill_model.ttft_s(tokens)
        now_s = self._requests.port.now_s()
        self._reservation = self._decode.ledger.reserve(tokens=tokens)
        self._prefill_entry = instance.ledger.add_prefill(tokens=tokens, predicted_s=predicted_s, now_s=now_s)
        self._send(KvExportRequest(), is_prefill=True)

    def _send_decode(self, transfer: KvTransfer) -> None:
        self._release_reservation()
        self._decode_entry = self._decode.ledger.add_decode(tokens=self._request.prompt_tokens)
        self._send(transfer, is_prefill=False)

    def _send(self, transfer: KvTransfer, *, is_prefill: bool) -> None:
        request, port = self._request, self._requests.port
        sent = EngineRequest(
            id=f"{request.id}-{'prefill' if is_prefill else 'decode'}",
            arrival_s=port.now_s(),
            prompt_tokens=request.prompt_tokens,
            max_tokens=1 if is_prefill else request.output_tokens,
            digest=request.digest,
            block_hashes=request.block_hashes,
            kv_transfer=transfer,
        )
        leg = SimulatedLeg(self, sent, is_prefill=is_prefill)
        if not port.open(leg, self._prefill if is_prefill else self._decode):
            leg.on_failure(Failure.REFUSED)

    def on_token(self, leg: SimulatedLeg, token: OutputToken) -> None:
        """See `LegOwner`. If the lease on the KV had expired, the decode instance computes the prompt."""
        port, entry = self._requests.port, self._decode_entry
        leg.last_token_s = port.now_s()
        if leg.is_prefill or entry is None:
            return
        if leg.lease_expired:
            leg.ended = True
            port.abort(leg, self._decode)
            entry.release()
            self._send_decode(NoKvTransfer())
            return
        entry.add_tokens(1)
        self._on_token(token)

    def on_end(self, leg: SimulatedLeg, end: Finished) -> None:
        """See `LegOwner`."""
        port, now_s = self._requests.port, self._requests.port.now_s()
        if leg.is_prefill and end.export is not None:
            port.record_leg(leg, self._prefill, None)
            computed_for_s = self._release_prefill(now_s)
            port.learn_prefill(
                leg, self._prefill, cached_tokens=end.cached_tokens, computed_for_s=computed_for_s
            )
            self._send_decode(port.build_import(self._prefill, end.export))
        elif end.reason is FinishReason.LENGTH and not leg.is_prefill:
            port.record_leg(leg, self._decode, None)
            self._end(Outcome.OK)
        else:
            self.on_failure(leg, Failure.ABORTED)

    def on_failure(self, leg: SimulatedLeg, failure: Failure) -> None:
        """See `LegOwner`."""
        self._requests.port.record_leg(leg, self._prefill if leg.is_prefill else self._decode, failure)
        entry = self._decode_entry
        self._end(Outcome.BROKEN if entry is not None and entry.output_tokens else Outcome.FAILED)

    def _release_prefill(self, now_s: float) -> float | None:
        entry, self._prefill_entry = self._prefill_entry, None
        return None if entry is None else entry.release(now_s)

    def _release_reservation(self) -> None:
        reservation, self._reservation = self._reservation, None
        if reservation is not None:
            reservation.release()

    def _end(self, outcome: Outcome) -> None:
        now_s = self._requests.port.now_s()
        self._release_prefill(now_s)
        self._release_reservation()
        if self._decode_entry is not None:
            self._decode_entry.release()
        self._requests.dispatch.request_ended(self._decode, now_s)
        self._on_end(outcome)
