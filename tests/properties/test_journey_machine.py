"""Many journeys over a fleet in which anything may happen at any time, in any order.

The machine is the interpreter: it carries out every action, keeps the legs in flight, and lets them end in
any way. It holds what a client and an operator may rely on: no request is answered twice, no leg is left
behind, retries stay within their limits, and nothing is sent to an instance that does not serve or has failed
the request before.
"""

import math
from dataclasses import dataclass, field, replace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from fulcrum_core.values import Role
from fulcrum_router.policy import TransferPairs
from fulcrum_router.policy.dispatch import FlipProposalRules
from fulcrum_router.policy.faults.failures import Failure
from fulcrum_router.policy.faults.retry_budget import SHARE, WINDOW_S, RetryBudget
from fulcrum_router.policy.instance_record import InstanceRecord
from fulcrum_router.policy.journey import (
    MAX_ATTEMPTS,
    Action,
    Journey,
    JourneyContext,
    LocalPrefillReason,
    State,
    StopReason,
    TransferProtocol,
)
from fulcrum_router.policy.journey.machine import MAX_SUSPICIONS
from fulcrum_router.policy.waiting.waiting_room import WaitingRoom
from tests.unit.router.builders import IDENTITY, OTHER_MODEL, SLO, FakeFleet, instance, work

PUSH = TransferProtocol(name="push", decode_chosen_first=True, params_in_response=False, leased=False)
ROOM = TransferProtocol(
    name="room", decode_chosen_first=True, legs_at_once=True, params_in_response=False, leased=False
)
IDENTITIES = {
    "pull": IDENTITY,
    "push": replace(IDENTITY, connector="Push"),
    "room": replace(IDENTITY, connector="Room"),
    "other": OTHER_MODEL,
}
ROLES = [Role.PREFILL, Role.PREFILL, Role.DECODE, Role.DECODE, Role.BOTH]
FAILURES = [*Failure, *[Failure.CLOSED] * 8, *[Failure.STATUS] * 4]
DEATHS = frozenset({Failure.CLOSED, Failure.EJECTED, Failure.REFUSED, Failure.UNREACHABLE})
STATUSES = [0, 500, 503]
"""Causes of failures, those that end in a query of death or in retries more often."""
MULTIPLE_CHOICES = LocalPrefillReason.MULTIPLE_CHOICES
RETRY_FLOOR = 1
LIMIT = 10**12
"""Tokens a minute: no request is refused."""
ANSWERS = frozenset({Action.FAIL, Action.BREAK, Action.END})
CHARGED = frozenset(
    {
        Failure.STATUS,
        Failure.TIMEOUT,
        Failure.ABORTED,
        Failure.MALFORMED,
        Failure.TOO_LARGE,
        Failure.NO_KV_TRANSFER_PARAMS,
    }
)


@dataclass
class Client:
    """One request as its client and its engines see it."""

    journey: Journey[InstanceRecord]
    needs_prefill_leg: bool = True
    prefill_leg: InstanceRecord | None = None
    decode_leg: InstanceRecord | None = None
    waits_for_flip: bool = False
    answers: int = 0
    left: bool = False
    first_byte: bool = False
    has_part: bool = False
    """The client has a part of the response; `first_byte`: of what its last decode leg sent."""
    failed_prefill: set[str] = field(default_factory=set)
    failed_decode: set[str] = field(default_factory=set)
    prefill_legs: int = 0
    decode_legs: int = 0
    deaths: int = 0

    @property
    def live(self) -> bool:
        return not self.answers and not self.left


class Journeys(RuleBasedStateMachine):
    """Requests, engines and time."""

    @initialize(
        roles=st.lists(st.sampled_from(ROLES), min_size=1, max_size=6),
        kind=st.sampled_from(sorted(IDENTITIES)),
        odd_kind=st.sampled_from(sorted(IDENTITIES)),
        flips=st.booleans(),
        waits=st.booleans(),
        deflects=st.booleans(),
        ahead_s=st.sampled_from([math.inf, 0.001, 1.0]),
        places=st.sampled_from([1, 1_000]),
    )
    def start(
        self,
        roles: list[Role],
        kind: str,
        odd_kind: str,
        ahead_s: float,
        places: int,
        *,
        flips: bool,
        waits: bool,
        deflects: bool,
    ) -> None:
        kinds = [kind] * (len(roles) - 1) + [odd_kind]
        instances = [
            instance(f"i{n}", role=role, identity=IDENTITIES[own])
            for n, (role, own) in enumerate(zip(roles, kinds, strict=True))
        ]
        self.fleet = FakeFleet(instances)
        self.context: JourneyContext[InstanceRecord] = JourneyContext(
            self.fleet, TransferPairs(), protocols={"Push": PUSH, "Room": ROOM}
        )
        self.context.flip_rules = FlipProposalRules(enabled=flips)
        self.context.flip_waits.enabled = waits
        self.context.deflects = deflects
        self.context.retry_budget = RetryBudget(floor=RETRY_FLOOR)
        self.context.waiting_room = WaitingRoom(prefill_ahead_s=ahead_s, max_requests=places)
        self.context.rate_limits.set_limits({"free": LIMIT})
        self.clients: list[Client] = []
        self.now_s = 1_000.0
        self.begun_s: list[int] = []
        self.retried_s: list[int] = []

    # --- the interpreter -----------------------------------------------------------------------------

    def act(self, client: Client, action: Action) -> None:
        """Carry out an action, and those that follow from it at once."""
        journey = client.journey
        while True:
            assert client.live or action is Action.END, f"{action} after the answer"
            if action in (Action.SEND_PREFILL, Action.SEND_BOTH):
                self.send_prefill(client)
            if action in (Action.SEND_DECODE, Action.SEND_BOTH):
                self.send_decode(client)
            client.waits_for_flip = action is Action.ASK_FOR_FLIP
            if action is Action.ABORT_LEGS:
                client.prefill_leg = client.decode_leg = None
                action = journey.proceed(self.now_s)
                continue
            if action is Action.ASK_FOR_FLIP and journey.wait_until_s <= self.now_s:
                action = journey.flip_wait_ended(self.now_s)
                continue
            if action in ANSWERS and not client.left:
                client.answers += 1
                assert (action is Action.BREAK) <= client.has_part
                assert (action is Action.FAIL) <= (not client.has_part)
            return

    def send_prefill(self, client: Client) -> None:
        target = client.journey.prefill_instance
        assert target is not None
        assert client.prefill_leg is None, "two prefill legs at once"
        assert target.serving, "sent to an instance that does not serve"
        assert target.name not in client.failed_prefill, "sent to an instance that failed the request"
        client.prefill_leg = target
        client.prefill_legs += 1

    def send_decode(self, client: Client) -> None:
        target = client.journey.decode_instance
        assert target is not None
        assert client.decode_leg is None, "two decode legs at once"
        assert target.serving, "sent to an instance that does not serve"
        assert target.name not in client.failed_decode, "sent to an instance that failed the request"
        client.decode_leg = target
        client.decode_legs += 1

    def pick(self, data: st.DataObject, of: list[Client]) -> Client:
        return of[data.draw(st.integers(0, len(of) - 1), label="client")]

    def count_retry(self) -> None:
        """A leg was sent again after a failure that the retry budget is charged with."""
        self.retried_s.append(int(self.now_s))
        since_s = int(self.now_s) - WINDOW_S
        retries = sum(at_s > since_s for at_s in self.retried_s)
        assert retries <= RETRY_FLOOR + SHARE * sum(at_s > since_s for at_s in self.begun_s)

    # --- events --------------------------------------------------------------------------------------

    @rule(
        tokens=st.integers(1, 8_000),
        reason=st.sampled_from([None, None, MULTIPLE_CHOICES]),
        is_streamed=st.booleans(),
    )
    def a_request_arrives(self, tokens: int, reason: LocalPrefillReason | None, *, is_streamed: bool) -> None:
        timed_work = work(tokens, tier="free", is_streamed=is_streamed)._replace(
            deadline_s=self.now_s + SLO.ttft_s
        )
        client = Client(
            Journey(self.context, timed_work, local_prefill_reason=reason), needs_prefill_leg=reason is None
        )
        client.journey.on_moved = lambda action: self.act(client, action)
        self.clients.append(client)
        self.begun_s.append(int(self.now_s))
        self.act(client, client.journey.begin(self.now_s))

    @property
    def prefilling(self) -> list[Client]:
        return [c for c in self.clients if c.prefill_leg is not None]

    @property
    def decoding(self) -> list[Client]:
        return [c for c in self.clients if c.decode_leg is not None]

    @precondition(lambda self: self.prefilling)
    @rule(data=st.data(), has_params=st.booleans(), old_s=st.sampled_from([0.0, 0.0, 20.0]))
    def a_prefill_leg_is_answered(self, data: st.DataObject, old_s: float, *, has_params: bool) -> None:
        client = self.pick(data, self.prefilling)
        client.prefill_leg = None
        action = client.journey.prefill_responded(
            self.now_s, lease_from_s=self.now_s - old_s, has_params=has_params, tokens=7
        )
        self.act(client, action)

    @precondition(lambda self: self.prefilling)
    @rule(
        data=st.data(),
        failure=st.sampled_from([f for f in FAILURES if f is not Failure.LEASE_EXPIRED]),
        status=st.sampled_from(STATUSES),
    )
    def a_prefill_leg_fails(self, data: st.DataObject, failure: Failure, status: int) -> None:
        client = self.pick(data, self.prefilling)
        assert client.prefill_leg is not None
        client.failed_prefill.add(client.prefill_leg.name)
        status = status if failure is Failure.STATUS else 0
        both_legs = client.first_byte and client.decode_leg is not None
        client.deaths += not both_legs and (failure in DEATHS or status == 500)
        client.prefill_leg = None
        before = client.prefill_legs
        self.act(client, client.journey.prefill_failed(self.now_s, failure, status=status))
        if failure in CHARGED and status != 500 and client.prefill_legs > before:
            self.count_retry()

    @precondition(lambda self: self.prefilling)
    @rule(data=st.data())
    def an_engine_rejects_the_request(self, data: st.DataObject) -> None:
        client = self.pick(data, [c for c in self.prefilling if c.decode_leg is None] or self.prefilling)
        if client.decode_leg is None:
            client.prefill_leg = None
            self.act(client, client.journey.prefill_rejected(self.now_s))

    @precondition(lambda self: self.decoding)
    @rule(data=st.data())
    def the_first_byte_comes(self, data: st.DataObject) -> None:
        client = self.pick(data, self.decoding)
        client.first_byte = client.has_part = True
        client.journey.first_byte(self.now_s)

    @precondition(lambda self: self.decoding)
    @rule(data=st.data())
    def a_decode_leg_ends(self, data: st.DataObject) -> None:
        client = self.pick(data, self.decoding)
        client.first_byte = client.has_part = True
        client.journey.first_byte(self.now_s)
        client.decode_leg = None
        self.act(client, client.journey.decode_ended(self.now_s))

    @precondition(lambda self: self.decoding)
    @rule(
        data=st.data(),
        failure=st.sampled_from(FAILURES),
        status=st.sampled_from(STATUSES),
        started=st.booleans(),
        delivered_tokens=st.sampled_from([None, 3]),
    )
    def a_decode_leg_fails(
        self,
        data: st.DataObject,
        failure: Failure,
        status: int,
        delivered_tokens: int | None,
        *,
        started: bool,
    ) -> None:
        client = self.pick(data, self.decoding)
        status, started = status if failure is Failure.STATUS else 0, started or client.first_byte
        assert client.decode_leg is not None
        if failure is not Failure.LEASE_EXPIRED:
            client.failed_decode.add(client.decode_leg.name)
        client.deaths += started and (failure in DEATHS or status == 500)
        client.decode_leg, client.first_byte = None, False
        before = client.decode_legs
        action = client.journey.decode_failed(
            self.now_s, failure, status=status, started=started, delivered_tokens=delivered_tokens
        )
        self.act(client, action)
        assert client.decode_legs <= before + 1
        if started and failure in CHARGED and status != 500 and client.live:
            self.count_retry()

    @precondition(lambda self: any(c.live for c in self.clients))
    @rule(data=st.data())
    def a_client_leaves(self, data: st.DataObject) -> None:
        client = self.pick(data, [c for c in self.clients if c.live])
        client.left = True
        action = client.journey.client_left(self.now_s)
        assert (action is Action.ABORT_LEGS) == bool(client.prefill_leg or client.decode_leg)
        client.prefill_leg = client.decode_leg = None
        client.waits_for_flip = False
        assert client.journey.proceed(self.now_s) is Action.END

    @rule(data=st.data(), serving=st.booleans(), role=st.sampled_from(Role))
    def the_fleet_changes(self, data: st.DataObject, role: Role, *, serving: bool) -> None:
        if self.fleet.instances:
            changed = data.draw(st.sampled_from(self.fleet.instances), label="instance")
            changed.serving, changed.role = serving, role
        for client in [c for c in self.clients if c.waits_for_flip and c.live]:
            self.act(client, client.journey.flip_done(self.now_s))
        self.context.waiting_room.reconsider(self.now_s)

    @rule(passed_s=st.sampled_from([0.01, 0.1, 1.0, 12.0]))
    def time_passes(self, passed_s: float) -> None:
        self.now_s += passed_s
        for client in [c for c in self.clients if c.waits_for_flip and c.live]:
            if self.now_s >= client.journey.wait_until_s:
                self.act(client, client.journey.flip_wait_ended(self.now_s))
        self.context.waiting_room.reconsider(self.now_s)

    # --- what holds ----------------------------------------------------------------------------------

    @invariant()
    def no_request_is_answered_twice(self) -> None:
        assert all(client.answers <= 1 for client in self.clients)

    @invariant()
    def a_request_that_ended_has_no_leg_and_a_live_one_has_something_to_wait_for(self) -> None:
        for client in self.clients:
            legs = (client.prefill_leg is not None, client.decode_leg is not None)
            assert legs == (client.journey.prefill_open, client.journey.decode_open)
            assert client.live == (client.journey.state is not State.DONE)
            waits = client.waits_for_flip or client.journey.state is State.WAITING
            assert client.live == (any(legs) or waits), "a request hangs, or left a leg behind"

    @invariant()
    def a_request_waits_only_while_its_prefill_instances_have_work(self) -> None:
        waiting = [c for c in self.clients if c.journey.state is State.WAITING]
        if not hasattr(self, "fleet"):
            return
        assert len(self.context.waiting_room) == len(waiting)
        eligible = {i.name for i in self.fleet.candidates.prefill}
        sheds = {name for name, until_s in self.context.shed_until_s.items() if until_s > self.now_s}
        idle = {i.name for i in self.fleet.candidates.prefill if not i.ledger.prefill_queued_s} - sheds
        decode = {i.name for i in self.fleet.candidates.decode}  # they can compute prompts themselves
        # One with no instance left may stand behind others, and fails at its turn.
        choices = [(eligible - c.failed_prefill) | (decode - c.failed_decode) for c in waiting]
        assert any(choices) or not choices, "nothing to wait for"
        for client in [c for c in waiting if c.needs_prefill_leg]:
            assert not idle - client.failed_prefill, "an idle instance could take the request"

    @invariant()
    def attempts_and_retries_stay_within_their_limits(self) -> None:
        for client in self.clients:
            assert client.deaths <= MAX_SUSPICIONS
            assert len(client.failed_prefill) <= MAX_ATTEMPTS
            if not client.has_part:
                assert client.decode_legs <= MAX_ATTEMPTS * MAX_ATTEMPTS
                assert len(client.failed_decode) <= MAX_ATTEMPTS
            if client.deaths == MAX_SUSPICIONS and not client.left:
                assert client.journey.state is State.DONE
                assert client.has_part or client.journey.stop_reason is StopReason.QUERY_OF_DEATH

    @invariant()
    def the_ledger_counts_the_legs_in_flight(self) -> None:
        for view in self.fleet.instances if hasattr(self, "fleet") else ():
            prefills = sum(c.prefill_leg is view for c in self.clients)
            assert view.ledger.prefill_legs == prefills

    @invariant()
    def a_tenant_is_charged_for_requests_in_flight_only_and_never_gets_more_back(self) -> None:
        if hasattr(self, "fleet"):
            room = self.context.waiting_room
            live = sum(client.live for client in self.clients)
            assert len(room.open_charges) <= live
            assert room.find_counters(0, "free")[""] >= -1e-6
            assert live or not room.open_charges

    def teardown(self) -> None:
        if not hasattr(self, "fleet"):
            return
        for client in self.clients:
            client.journey.client_left(self.now_s)
        for view in self.fleet.instances:
            ledger = view.ledger
            assert (
                ledger.prefill_queued_s,
                ledger.prefill_tokens,
                ledger.legs,
                ledger.decode_tokens,
                ledger.reserved_tokens,
                ledger.local_prefills,
                ledger.pending_transfers,
                ledger.awaited_first_tokens,
            ) == (0.0, 0, 0, 0, 0, 0, 0, {})


TestJourneys = Journeys.TestCase
TestJourneys.settings = settings(max_examples=120, stateful_step_count=50)
