"""State of one router that all its parts share: fleet, settings, counters, KV transfer pairs.

The data path reads the state at every request; `observe` and `control` update it. What a leg's end says about
its instance is recorded here, too, and may eject the instance. The state opens no sockets: see `server`.
"""

import itertools
import math
import os
import time

import structlog

from fulcrum_core.values import AutoscalingMode, FlipPolicy, Role
from fulcrum_router.access.api_keys import ApiKeys
from fulcrum_router.access.callers import CallerRules
from fulcrum_router.counters import PREFILL, Counters
from fulcrum_router.fleet.flip_requests import AppliedAssignment, FlipRequests
from fulcrum_router.fleet.instances import Fleet, Instance
from fulcrum_router.http1.failures import Failure, LegFailed
from fulcrum_router.http1.inline_task import Turns
from fulcrum_router.http1.limits import KEPT_SHARE, KeptBytes, make_request_memory
from fulcrum_router.policy import FlipProposal, FlipProposalRules, TokensPerByte, TransferPairs, TtftErrors
from fulcrum_router.policy.faults.blame import Blame, find_blame, is_rejection, is_sickness
from fulcrum_router.policy.flight_recorder import FlightRecorder
from fulcrum_router.policy.journey import JourneyContext
from fulcrum_router.policy.predictions.learned_models import (
    PoolModels,
    collect_models,
    have_changed,
    parse_models,
)
from fulcrum_router.settings import ServiceSettings
from fulcrum_router.tracing.access_log import AccessLog
from fulcrum_router.tracing.request_trace import RequestTracer

log = structlog.get_logger()

_GONE = frozenset({Failure.REFUSED, Failure.UNREACHABLE})
"""Failures of which one ejects an instance: there is no engine at the address."""


class Router:
    """State of the router of one service."""

    def __init__(self, settings: ServiceSettings | None = None, *, api_keys: ApiKeys | None = None) -> None:
        self.since_s = time.time()
        """Unix time since which the ledgers hold all requests of the service."""
        self.settings = settings
        """None until the PDService was read: the router is not ready before."""
        self.fleet = Fleet()
        self.counters = Counters()
        self.flight_recorder = FlightRecorder()
        self.callers = CallerRules(api_keys or ApiKeys(), self.counters)
        self.request_memory = make_request_memory()
        self.kept_streams = KeptBytes(int(KEPT_SHARE * self.request_memory.max_bytes))
        self.long_turns = Turns()
        """For steps that take long and may be due at once, as those of large bodies, or of the streams of an
        engine that died.
        """
        self.tokens_per_byte = TokensPerByte()
        self.ttft_errors = TtftErrors()
        self.pairs = TransferPairs()
        self.learned_models: dict[str, PoolModels] = {}
        """Models by pool, as the router before handed them over, or as they were last stored for the next."""
        self.applied_assignment = AppliedAssignment()
        self.flip_requests = FlipRequests()
        self.journeys: JourneyContext[Instance] = JourneyContext(self.fleet, self.pairs)
        self.access_log = AccessLog()
        self.tracer: RequestTracer | None = None
        """None: no request is traced."""
        self.active = True
        """Whether traffic is directed to this router. A standby also serves the requests that it gets."""
        self.leaving = False
        """Whether each response closes its client connection, so that the client reconnects to a successor.
        Set near the end of a handover: the slice names a successor, or the time is up.
        """
        self.stopping = False
        """Whether the router is shutting down."""
        self.received_after_s = self._last_tick_s = time.monotonic()
        """Lower bound for the arrival of bytes that are read now, on the monotonic clock."""
        self._id_prefix = os.urandom(6).hex().encode()
        self._ids = itertools.count()

    def configure(self, settings: ServiceSettings, *, last_prefill_to_decode_s: float | None) -> None:
        """Use these settings from now on.

        Args:
            settings: Settings of the service.
            last_prefill_to_decode_s: Unix time of the last flip from prefill to decode; None: none.
        """
        self.settings = settings
        self.access_log.share = settings.access_log
        self.counters.tenants.name_at_most(settings.named_tenants)
        self.journeys.waiting_room.prefill_ahead_s = settings.prefill_ahead_s
        self.journeys.deflects = settings.deflects
        self.journeys.set_prefix_aware(settings.prefix_aware)
        tiers = (settings.default_tier, *settings.tiers.values())
        priorities = {-tier.engine_priority for tier in tiers}
        self.journeys.decode_share.set_tiers(priorities, tpot_s=min(tier.slo.tpot_s for tier in tiers))
        waits_in_engines = settings.prefill_ahead_s == math.inf
        self.journeys.admission.limit_waits(
            priorities if waits_in_engines else (), ttft_s=min(tier.slo.ttft_s for tier in tiers)
        )
        self.journeys.tier_reserve.set_reserves({tier.name: tier.reserve for tier in tiers})
        self.journeys.waiting_room.set_weights({tier.name: tier.weight for tier in tiers})
        self.journeys.admission.mode = settings.admission
        self.journeys.rate_limits.set_limits(
            {tier.name: tier.tokens_per_minute for tier in tiers if tier.tokens_per_minute is not None}
        )
        self.journeys.admission.tiers = {tier.name: tier.admission for tier in tiers}
        mode, arrow = settings.autoscaling_mode, settings.flip_policy is FlipPolicy.ARROW
        self.journeys.flip_waits.enabled = mode is AutoscalingMode.AUTO and arrow
        self.journeys.flip_rules = FlipProposalRules(
            enabled=mode is not AutoscalingMode.OFF and arrow,
            max_decode_load=settings.max_decode_load,
            to_decode_cooldown_until_s=-math.inf
            if last_prefill_to_decode_s is None
            else last_prefill_to_decode_s
            + settings.prefill_to_decode_cooldown_s
            + (time.monotonic() - time.time()),
        )

    def find_models(self, pool: str) -> PoolModels:
        """Find what was learned of the instances of a pool, by this router or the one before."""
        return collect_models(self.fleet.instances, self.learned_models).get(pool, PoolModels())

    def adopt_models(self, text: str) -> None:
        """Adopt what the router before has learned, for all instances that this one has not measured."""
        self.learned_models = parse_models(text)
        for instance in self.fleet.instances:
            prefill, decode = self.learned_models.get(instance.pool, PoolModels())
            prefills, steps = instance.samples
            instance.start_from(None if prefills else prefill, None if steps else decode)

    def collect_models(self) -> dict[str, PoolModels] | None:
        """Return the learned models for a successor; None if `learned_models` still describes them."""
        models = collect_models(self.fleet.instances, self.learned_models)
        return models if have_changed(self.learned_models, models) else None

    def tick(self, now_s: float) -> None:
        """Let requests leave the waiting room, and advance `received_after_s` to the time of the last call.

        Called about ten times a second. After a pause of the process, bytes that arrived during the pause are
        read before the second call. So the time of the call before the last may be too early, but never too
        late.
        """
        self.received_after_s, self._last_tick_s = self._last_tick_s, now_s
        self.journeys.waiting_room.tick(now_s)

    def become_active(self) -> None:
        """Record that traffic is directed here from now on; requests of the previous router are unknown."""
        self.active = True
        self.since_s = time.time()
        self.counters.takeovers += 1

    @property
    def ready(self) -> bool:
        """Whether the router has settings and a serving instance, and is not shutting down."""
        return (
            not self.stopping and self.settings is not None and any(i.serving for i in self.fleet.instances)
        )

    def make_request_id(self) -> bytes:
        """Make an id that is unique across routers and restarts."""
        return b"%b%x" % (self._id_prefix, next(self._ids))

    def request_flip(self, proposal: FlipProposal) -> None:
        """Publish a flip request."""
        self.counters.flip_requests[proposal.role] += 1
        self.flip_requests.submit(proposal.role, proposal.reason)

    def record_leg_success(self, instance: Instance, phase: str) -> None:
        """Count a leg that got its response; a success ends a series of failures."""
        self.counters.legs[phase, "ok"] += 1
        health = instance.health
        health.answered += 1
        if health.failures or health.error_share or health.rejections:
            readmitted = health.record_success()
            instance.update_error_share()
            if readmitted:
                instance.update_serving()

    def record_rejection(self, instance: Instance, phase: str) -> None:
        """Count a leg that the engine rejected with 4xx as answered; it ends no series of failures."""
        self.counters.legs[phase, "ok"] += 1
        instance.health.answered += 1
        instance.health.rejections += 1

    def doubts_rejection(self, instance: Instance) -> bool:
        """Whether to ask another engine about a request that this one rejects."""
        candidates = self.fleet.candidates
        peers = candidates.prefill if instance.role is Role.PREFILL else candidates.decode
        return len(peers) > 1 and instance.health.doubts_rejection(time.monotonic())

    def record_leg_failure(self, instance: Instance, phase: str, failed: LegFailed) -> None:
        """Count a failed leg, and eject the instance if it is gone or has failed too often."""
        failure, health = failed.failure, instance.health
        blame = find_blame(failure, status=failed.status, probes_answered=instance.answers_probes)
        self.counters.legs[phase, failure] += 1
        self.counters.leg_failures[phase, blame] += 1
        if phase == PREFILL:
            instance.discard_prefill_samples()
        if is_sickness(failure, blame):
            self._record_sickness(instance, failure)
        elif blame is Blame.LOAD:
            health.record_error()
        instance.update_error_share()

    def record_unexplained_failure(self, instance: Instance, phase: str, failed: LegFailed) -> None:
        """Count a failed leg of which engine or request may be the cause: dispatch prefers others for now.

        After a 4xx dispatch does not: most are the client's.
        """
        self.counters.legs[phase, failed.failure] += 1
        if phase == PREFILL:
            instance.discard_prefill_samples()
        if is_rejection(failed.failure, failed.status):
            return
        instance.health.record_error()
        instance.update_error_share()

    def record_client_failure(self, instance: Instance, phase: str, failed: LegFailed) -> None:
        """Count a failed leg that is the request's fault, whatever other engines answer."""
        self.counters.legs[phase, failed.failure] += 1
        self.counters.leg_failures[phase, Blame.CLIENT] += 1
        if phase == PREFILL:
            instance.discard_prefill_samples()

    def blame_engine(self, instance: Instance, phase: str, failed: LegFailed) -> None:
        """Count a failure as the engine's: another engine has answered the same request."""
        self.counters.leg_failures[phase, Blame.ENGINE] += 1
        self._record_sickness(instance, failed.failure)
        instance.update_error_share()

    def _record_sickness(self, instance: Instance, failure: Failure) -> None:
        health, now_s, unresponsive = instance.health, time.monotonic(), failure is Failure.UNREACHABLE
        closed = failure is Failure.CLOSED
        too_many = health.record_failure(now_s=now_s, unresponsive=unresponsive, closed=closed)
        if failure in _GONE:
            if health.eject(now_s=now_s, judged=False, unresponsive=unresponsive):
                self.record_ejection(instance, failure)
                if failure is Failure.REFUSED:
                    self.record_death(instance)
        elif too_many and self.fleet.eject_by_judgement(instance, failure, now_s=now_s):
            self.record_ejection(instance, failure)

    def record_death(self, instance: Instance) -> None:
        """The engine of an instance has died since its last answered probe: it has lost KV and connections.

        The death is counted unless legs have shown it.
        """
        self._forget_engine_state(instance)
        if instance.answered_at_s is not None:
            self.journeys.engine_deaths.record_found(
                instance.name, since_s=instance.answered_at_s, now_s=time.monotonic()
            )

    def rotate_cache_salt(self, instance: Instance, cache_salt: str | None) -> None:
        """Stop using the prefix cache that an instance filled under `cache_salt`: it may hold wrong KV.

        No effect if that salt is not the current one: the cache was replaced before.
        """
        if instance.cache_salt != cache_salt:
            return
        instance.cache_salt = make_cache_salt()
        instance.incoming_transfers.clear()
        self.journeys.forget_prefixes(instance.name)
        self.counters.cache_salt_rotations += 1
        log.warning("cache salt rotated after a late KV transfer", instance=instance.name)

    def record_ejection(self, instance: Instance, reason: str) -> None:
        """Count an ejection, take the instance out of dispatch, and reset what its pairs have measured."""
        instance.update_serving()
        self._forget_engine_state(instance)
        self.counters.ejections[reason] += 1
        log.warning("instance ejected", instance=instance.name, reason=reason)

    def _forget_engine_state(self, instance: Instance) -> None:
        """Forget what an engine process knew: handshakes of KV transfers, and its prefix cache."""
        self.pairs.invalidate(instance.name)
        self.journeys.forget_prefixes(instance.name)


def make_cache_salt() -> str:
    """Make a cache salt that no engine has used: its prefix cache is empty under this salt."""
    return os.urandom(6).hex()
