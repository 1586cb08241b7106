"""What all journeys of one router share, and the decisions that need more than one request.

Shared are the instances and their transfer pairs, the waiting room, admission, rate limits, reserves, the
retry budget, the demand, and what failed lately. `Router.configure` (and the simulated router) sets what
follows from the PDService and its tiers: limits, modes and flip rules. Journeys read that, and read and write
the rest. The router and the simulated router have one each.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Generic, Protocol

from fulcrum_core.values import AdmissionMode, OverloadAction, Role
from fulcrum_router.policy.candidates import Candidates, V
from fulcrum_router.policy.demand import CountedWork, Demand
from fulcrum_router.policy.dispatch import NO_FLIP_PROPOSALS
from fulcrum_router.policy.faults.engine_deaths import EngineDeaths
from fulcrum_router.policy.faults.retry_budget import RetryBudget
from fulcrum_router.policy.journey.protocols import PROTOCOLS, TransferProtocol
from fulcrum_router.policy.kv_pairs.pairs import TransferPairs
from fulcrum_router.policy.overflow import PromptCounts
from fulcrum_router.policy.predictions.prompt_limit import ASSUMED_CONTEXT_TOKENS
from fulcrum_router.policy.prefix_index import PrefixIndex
from fulcrum_router.policy.starts import EngineStarts
from fulcrum_router.policy.tiers.admission import (
    ADMITTED,
    NO_RESERVE_VIEW,
    UNKNOWN_FORECAST,
    Admission,
    Admitted,
    Forecast,
    Refusal,
    ReserveView,
    TierAdmission,
    delay_return,
    judge_request,
    predict_admission,
    refuse_over_limit,
    refuse_waiting,
)
from fulcrum_router.policy.tiers.decode_share import DecodeShare
from fulcrum_router.policy.tiers.rate_limits import RateLimits
from fulcrum_router.policy.tiers.tier_reserve import TierReserve
from fulcrum_router.policy.tiers.token_account import TokenAccount, Tokens
from fulcrum_router.policy.waiting.waiting_room import WaitingRoom
from fulcrum_router.policy.work import Work

FLIP_WAIT_S = 0.05
"""Seconds that a request waits for the flip that it asked for."""
FLIP_WAIT_BACKOFF_S = 1.0
"""Seconds after a wait without a flip in which no request waits for the same role."""
LENT_MARGIN = 2.0
"""How much longer than expected an answer may be that counts as one that ends in time."""
RECLAIM_SHARE = 0.8
"""Share of `reclaimWithin` in which answers are expected to end that make room for a reserve that is lent to
longer ones. The rest is for wrong predictions, and for steps that take longer once the tier is back."""
SHED_BACKOFF_S = 0.5
"""Seconds in which an instance that has shed a request gets none of those that wait."""
INSTANCES_ASKED = 64
"""Largest number of instances whose predictions of a prompt are averaged for the demand. Larger fleets are
sampled evenly, each request beginning with another instance."""

_ENFORCE = AdmissionMode.ENFORCE  # an attribute of an enum is slow to read


class FleetView(Protocol[V]):
    """The instances of the service."""

    @property
    def candidates(self) -> Candidates[V]:
        """The instances that can take work now."""

    def __getitem__(self, name: str) -> V:
        """The instance with this name."""


class FlipWaits:
    """Whether a request may wait for the flip that it asked for; times are seconds of the caller's clock."""

    __slots__ = ("_until_s", "enabled")

    def __init__(self) -> None:
        self.enabled = False
        """Whether the autoscaler acts on flip requests (mode Auto)."""
        self._until_s: dict[Role, float] = {}

    def wait_until_s(self, role: Role, now_s: float) -> float:
        """Return until when a request that asks for a flip to `role` waits; `now_s` if it must not wait."""
        if not self.enabled or now_s < self._until_s.get(role, -math.inf):
            return now_s
        return now_s + FLIP_WAIT_S

    def record_timeout(self, role: Role, now_s: float) -> None:
        """Record a wait that ended without a new assignment: others need not wait for a second."""
        self._until_s[role] = now_s + FLIP_WAIT_BACKOFF_S


class JourneyContext(Generic[V]):
    """Shared state of the journeys of one router."""

    __slots__ = (
        "_requests_counted",
        "admission",
        "decode_share",
        "deflects",
        "demand",
        "engine_deaths",
        "fleet",
        "flip_rules",
        "flip_waits",
        "pairs",
        "prefix_index",
        "prompts",
        "protocols",
        "rate_limits",
        "retry_budget",
        "shed_until_s",
        "starts",
        "tier_reserve",
        "waiting_room",
    )

    def __init__(
        self,
        fleet: FleetView[V],
        pairs: TransferPairs,
        *,
        protocols: Mapping[str, TransferProtocol] = PROTOCOLS,
    ) -> None:
        self.fleet, self.pairs, self.protocols = fleet, pairs, protocols
        self.admission = Admission()
        self.demand = Demand()
        self.flip_rules = NO_FLIP_PROPOSALS
        self.flip_waits = FlipWaits()
        self.prompts = PromptCounts()
        self.rate_limits = RateLimits()
        self.retry_budget = RetryBudget()
        self.waiting_room = WaitingRoom()
        self.engine_deaths = EngineDeaths()
        self.decode_share = DecodeShare()
        self.deflects = False
        """Whether decode instances compute prompts in their spare time; see `deflection`."""
        self.prefix_index: PrefixIndex | None = None
        """What the instances have in their prefix caches; None: dispatch does not ask."""
        self.starts = EngineStarts()
        """The engines that start: admission counts on them."""
        self.tier_reserve = TierReserve()
        self._requests_counted = 0
        """Requests so far; `_record_demand` derives from it which instances of a large fleet it samples."""
        self.shed_until_s: dict[str, float] = {}
        """Time until which an instance that has shed a request gets none of those that wait. An engine that
        sheds has no work, so that it would be the least loaded one.
        """

    def set_prefix_aware(self, prefix_aware: bool) -> None:  # the only argument
        """Begin or end to count what instances have in their prefix caches."""
        if not prefix_aware:
            self.prefix_index = None
        elif self.prefix_index is None:
            self.prefix_index = PrefixIndex()

    def forget_prefixes(self, name: str) -> None:
        """The engine of this instance has lost its prefix cache, or must not use it any more."""
        if self.prefix_index is not None:
            self.prefix_index.forget(name)

    def record_admitted(self, work: Work, now_s: float) -> CountedWork | None:
        """Count a request that is served in the demand, for the retry budget and for the reserve of its tier.

        A refused request does not count: a flood that is refused must not move the instances that others
        need, allow more retries, or keep a reserve from being lent. Returns what it adds to the demand.
        """
        self.retry_budget.record_request(now_s)
        self.tier_reserve.record_arrival(work.tier, work.arrival_s)
        self.decode_share.record_arrival(work.priority, work.arrival_s)
        return self._record_demand(work)

    def _record_demand(self, work: Work) -> CountedWork | None:
        """Count a request in the demand.

        A prompt that takes longer than S_T counts as the part of it that takes S_T: it would miss the
        objective with any split, and a single body of 8 MB would bend the forecast for all others. A request
        that is hopeless does not count: a flood that cannot be served must not move the instances that the
        others need.
        """
        candidates = self.fleet.candidates
        eligible = candidates.prefill or candidates.decode
        every = max(1, -(-len(eligible) // INSTANCES_ASKED))
        self._requests_counted += 1
        asked = eligible[self._requests_counted % every :: every]
        tokens, computed, prefill_s = work.prompt_tokens, work.least_computed, 0.0
        for instance in asked:
            prefill_s += instance.prefill_model.ttft_s(computed) / len(asked)
        if prefill_s > work.slo.ttft_s:
            tokens, prefill_s = int(tokens * work.slo.ttft_s / prefill_s), work.slo.ttft_s
        if self.waiting_room.members and self.is_hopeless(work, own_s=prefill_s, eligible=len(eligible)):
            return None
        return self.demand.record(tenant=work.tenant, prompt_tokens=tokens, prefill_s=prefill_s)

    def open_account(self, work: Work, *, limits_output: bool) -> TokenAccount:
        """Open the account of a request, with the output that is expected of it.

        `limits_output`: whether its output limit is that of the whole response.
        """
        limit = work.output_limit or ASSUMED_CONTEXT_TOKENS
        output_tokens = min(self.demand.lengths.predict(work.tenant, work.prompt_tokens), limit)
        taken = Tokens(work.prompt_tokens, work.choices * output_tokens)
        most = limit if limits_output else ASSUMED_CONTEXT_TOKENS
        return TokenAccount(taken, work.choices * most)

    def take_tokens(self, work: Work, tokens: float, now_s: float) -> Refusal | None:
        """Take the tokens of a request from the rate limit of its tenant, or none, and refuse the request."""
        buckets = self.rate_limits.by_tier[work.tier]
        wait_s = buckets.take(work.tenant, tokens, now_s)
        if not wait_s:
            return None
        self.admission.record_limited(work.tier)
        return refuse_over_limit(wait_s, tokens_per_minute=buckets.tokens_per_minute)

    def give_back_tokens(self, work: Work, tokens: float, now_s: float) -> None:
        """Correct the rate limit by tokens that a request took and did not use; less than 0: take more."""
        buckets = self.rate_limits.by_tier.get(work.tier)
        if buckets is not None:
            buckets.give_back(work.tenant, tokens, now_s)

    def judge(
        self, work: Work, now_s: float, *, can_limit_output: bool = True
    ) -> tuple[Refusal | Admitted, float]:
        """Decide whether and how a request is served, and count it; in mode Advise every one is.

        Returns its forecast TTFT, too; 0: unknown.

        Without an instance there is nothing to predict by: the request fails as it would without admission.
        """
        admission = self.admission
        tier = admission.find_tier(work.tier)
        if not can_limit_output and tier.action is OverloadAction.DEGRADE:
            tier = tier._replace(action=OverloadAction.REJECT, max_output_tokens=0)
        forecast = self._predict_admission(work, now_s, tier)
        if forecast is None:
            return ADMITTED, 0.0
        max_wait_s = admission.max_wait_s.get(work.priority, math.inf)
        corrected = forecast.correct(admission.errors.factor)
        outcome = judge_request(corrected, work, tier, max_wait_s=max_wait_s)
        admission.record(work.tier, outcome)
        if admission.mode is not _ENFORCE:
            return ADMITTED, forecast.ttft_s
        if type(outcome) is Refusal:
            outcome = self._queue_return(outcome, forecast, now_s)
        return outcome, forecast.ttft_s

    def _queue_return(self, refusal: Refusal, forecast: Forecast, now_s: float) -> Refusal:
        """Ask a refused request to come back after those that were refused before."""
        instances = len(self.fleet.candidates.prefill)
        wait_s = self.admission.returns.join(forecast.alone_s, now_s, instances=instances)
        return delay_return(refusal, wait_s)

    def refuse_waiting(self, work: Work, now_s: float) -> Refusal:
        """Refuse a request that has waited in the room for too long, and count it."""
        self.admission.record_given_up(work.tier)
        newcomer = work._replace(deadline_s=now_s + work.slo.ttft_s)
        forecast = self._predict_admission(newcomer, now_s, self.admission.find_tier(work.tier))
        forecast = forecast or UNKNOWN_FORECAST
        return self._queue_return(refuse_waiting(forecast, newcomer), forecast, now_s)

    def _predict_admission(self, work: Work, now_s: float, tier: TierAdmission) -> Forecast | None:
        candidates, room, lengths = self.fleet.candidates, self.waiting_room, self.demand.lengths
        eligible = candidates.prefill or candidates.decode
        if not eligible:
            return None
        waits = tier.action is OverloadAction.QUEUE
        highest = self.decode_share.highest
        output_tokens = min(
            lengths.predict(work.tenant, work.prompt_tokens),
            work.output_limit or math.inf,
            tier.max_output_tokens or math.inf,
        )
        leaves_room = highest is not None and work.priority < highest
        reserve = NO_RESERVE_VIEW
        if room.prefill_ahead_s < math.inf and not self.tier_reserve.is_empty:
            reserve = self._view_reserve(work, output_tokens, now_s, leaves_room=leaves_room)
            eligible = self.tier_reserve.list_left(
                eligible, work.tier, tokens=work.prompt_tokens, now_s=now_s
            )
        return predict_admission(
            eligible,
            candidates.decode,
            work,
            now_s=now_s,
            backlog_s=self._find_backlog_s(work, eligible, with_late=waits) if room.members else 0.0,
            output_tokens=output_tokens,
            mean_output_tokens=lengths.mean_served,
            output_tokens_in_decode=lengths.mean_in_decode,
            delays=self.pairs.prefill_delays,
            leaves_room=leaves_room,
            reserve=reserve,
            coming=self.starts.list_coming(now_s),
        )

    def _find_backlog_s(self, work: Work, eligible: Sequence[V], *, with_late: bool) -> float:
        """Prefill work that waits and goes before a request, in seconds; `with_late`: late ones, too."""
        if with_late or not eligible:
            return self.waiting_room.find_backlog_s(work.priority, with_late=with_late)
        own_s = self.fleet.candidates.predict_prefill_s(work.least_computed)
        return self.waiting_room.find_backlog_before_s(work.priority, work.tenant, work.tier, own_s)

    def _view_reserve(
        self, work: Work, output_tokens: float, now_s: float, *, leaves_room: bool
    ) -> ReserveView:
        return ReserveView(
            own_instances=self.tier_reserve.count_own(work.tier, len(self.fleet.candidates.prefill)),
            own_backlog_s=self.waiting_room.find_tier_backlog_s(work.priority, work.tier),
            kept_decode=self.find_kept_decode(work, output_tokens, now_s) if leaves_room else 0.0,
        )

    def find_kept_decode(self, work: Work, output_tokens: float, now_s: float) -> float:
        """The share of the KV cache that other tiers keep from a request with this expected output."""
        reserve, decode = self.tier_reserve, self.fleet.candidates.decode
        if reserve.is_empty or not decode:
            return 0.0
        if not reserve.lends(work.tier, now_s):  # then the time of the answer does not matter
            return reserve.find_kept_fraction(work.tier, now_s)
        step_s = math.fsum(i.decode_model.itl_s(i.ledger.decode_tokens) for i in decode) / len(decode)
        capacity = sum(i.kv_capacity_tokens or 0 for i in decode)
        own, longest = work.context_tokens + work.choices * output_tokens, LENT_MARGIN * output_tokens
        if work.output_limit:
            longest = min(longest, work.output_limit)

        def predict_kv_in_use(after_s: float) -> float:
            after_s *= RECLAIM_SHARE
            tokens = self.waiting_room.predict_kv_in_use(after_s, step_s=step_s, now_s=now_s)
            return (own + tokens) / capacity if capacity else math.inf

        return reserve.find_kept_decode(
            work.tier, stay_s=longest * step_s, now_s=now_s, predict_kv_in_use=predict_kv_in_use
        )

    def is_hopeless(self, work: Work, *, own_s: float, eligible: int) -> bool:
        """Whether a request that joins those who wait would be late even with one prefill instance more.

        Args:
            work: The request.
            own_s: Time to compute its prompt, in seconds.
            eligible: Instances that may compute it.
        """
        room = self.waiting_room
        return bool(room.members) and (
            room.find_backlog_s(work.priority) / (eligible + 1) + own_s > work.slo.ttft_s
        )

    def list_shedding(self, now_s: float) -> tuple[str, ...]:
        """Return the names of the instances that have just shed a request, and forget earlier ones."""
        if not self.shed_until_s:
            return ()
        self.shed_until_s = {name: until_s for name, until_s in self.shed_until_s.items() if until_s > now_s}
        return tuple(self.shed_until_s)

    def waiting_share_s(self, instance: V) -> float:
        """This instance's equal share of the prefill work in the waiting room, in seconds.

        The load of an instance, as the autoscaler reads it, includes it: else a service in which many
        requests wait would look as if it had little to do. Work that cannot be done in time does not count:
        more instances would be of no use to it, and those of other phases are needed by what is served.
        """
        room, eligible = self.waiting_room, self.fleet.candidates.prefill
        if not room.members or instance not in eligible:
            return 0.0
        return room.find_useful_prefill_s(len(eligible)) / len(eligible)
