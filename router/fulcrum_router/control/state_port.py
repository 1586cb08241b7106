"""The state port: operator and autoscaler read the router's state and flip requests here, with a token.

Both paths are long polls. `/state?min_generation=N` waits until the router dispatches by generation N of the
PDAssignment, and responds with the present state if it does not within `timeout_s`. `/flip-requests?after=N`
waits for a flip request after number N, and responds with the newest for each role, or 204 if there is none.
`server` opens the port; the readers use `fulcrum_cluster.router_client`. Nothing can be changed here.
"""

import math
import time
from collections.abc import Awaitable, Callable

from aiohttp import web

from fulcrum_core.router_state import InstanceState, PairState, RouterState, TenantState, TierState
from fulcrum_core.values import AdmissionMode, Role
from fulcrum_router.control.auth import Authenticator, Unauthorized
from fulcrum_router.counters import RequestOutcome, TierCounters
from fulcrum_router.fleet.instances import Instance
from fulcrum_router.policy import PairKey, TransferOutcome, TransferPair
from fulcrum_router.policy.predictions.learned_models import collect_models, compute_suitability
from fulcrum_router.policy.tiers.admission import Admission, AdmissionDecision, TierDecisions
from fulcrum_router.policy.tiers.tenant_counts import TenantCounts
from fulcrum_router.router import Router

MAX_POLL_S = 60.0
"""Longest time that a long poll may wait, in seconds."""
_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def build_router_state(router: Router, *, now_s: float) -> RouterState:
    """Build a consistent snapshot of the router; `now_s` is its Unix time."""
    flip_request, monotonic_s = router.flip_requests.last, time.monotonic()
    reserves = {
        tier: (kept, lent) for tier, kept, lent in router.journeys.tier_reserve.list_fractions(monotonic_s)
    }
    models = collect_models(router.fleet.instances, router.learned_models)
    suits_prefill = {pool: compute_suitability(found) for pool, found in models.items()}
    return RouterState(
        service=router.settings.service if router.settings else "",
        generation=router.applied_assignment.generation,
        acknowledged_at_s=router.applied_assignment.applied_at_s,
        at_s=now_s,
        ledger_since_s=router.since_s,
        instances=tuple(
            _build_instance_state(router, instance, suits_prefill.get(instance.pool))
            for instance in router.fleet.instances
        ),
        flip_request_role=flip_request.role if flip_request else None,
        flip_request_seq=router.flip_requests.seq,
        prediction_error=router.ttft_errors.prefill_leg.value,
        local_prefills=router.counters.unexpected_local_prefills,
        tiers=tuple(
            _build_tier_state(name, counters, router.journeys.admission, reserves.get(name, (0.0, 0.0)))
            for name, counters in sorted(router.counters.tiers.items())
        ),
        tenants=_build_tenant_states(router.counters.tenants, monotonic_s),
        access_problems=_list_access_problems(router),
        demand=router.journeys.demand.snapshot(),
        pairs=tuple(_build_pair_state(key, pair, monotonic_s) for key, pair in router.pairs.list_reported()),
    )


def _list_access_problems(router: Router) -> tuple[str, ...]:
    settings = router.settings
    if settings is None or settings.access is None or not settings.access.requires_key:
        return ()
    return router.callers.api_keys.list_problems()


def _build_instance_state(router: Router, instance: Instance, suits_prefill: float | None) -> InstanceState:
    ledger, waiting_s = instance.ledger, router.journeys.waiting_share_s(instance)
    return InstanceState(
        name=instance.name,
        role=instance.role,
        serving=instance.serving,
        prefill_queued_s=ledger.remaining_s(time.monotonic()) + waiting_s,
        prefill_tokens=ledger.prefill_tokens,
        decode_tokens=ledger.decode_tokens,
        decode_legs=ledger.decode_legs,
        legs=ledger.legs,
        pending_transfers=ledger.pending_transfers,
        itl_s=instance.itl_s,
        kv_usage=instance.kv_usage,
        missed_probes=instance.missed_probes,
        engine_requests=None if instance.health.ejected else instance.engine_requests,
        engine_read_at_s=instance.engine_read_at_s,
        reserved_tokens=ledger.reserved_tokens,
        max_seqs=instance.max_seqs_shown,
        decode_is_full=router.journeys.waiting_room.waits_for_decode and instance.role is Role.DECODE,
        kv_capacity_tokens=instance.kv_capacity_tokens,
        itl_intercept_s=instance.decode_model.intercept,
        itl_slope_s=instance.decode_model.slope,
        suits_prefill=suits_prefill,
        on_cpu=instance.on_cpu,
    )


def _build_pair_state(key: PairKey, pair: TransferPair, now_s: float) -> PairState:
    return PairState(
        prefill=key.prefill,
        decode=key.decode,
        verified=pair.counts[TransferOutcome.VERIFIED],
        recomputed=pair.counts[TransferOutcome.RECOMPUTED],
        unknown=pair.counts[TransferOutcome.UNKNOWN],
        verified_age_s=None if pair.last_verified_at_s is None else now_s - pair.last_verified_at_s,
        handshake_s=pair.handshake_s,
        transfer_s_per_1k_tokens=pair.transfer_s_per_1k_tokens,
        last_reason=pair.reason,
    )


def _build_tenant_states(tenants: TenantCounts, now_s: float) -> tuple[TenantState, ...]:
    counts: dict[str, dict[str, int]] = {}
    for tenant, result, count in tenants.list_counts(now_s):
        counts.setdefault(tenant, {})[result.value] = count
    return tuple(TenantState(name=name, **by_result) for name, by_result in counts.items())


def _build_tier_state(
    name: str, counters: TierCounters, admission: Admission, reserve: tuple[float, float]
) -> TierState:
    waits = sum(counters.waiting.counts)
    enforced = admission.counts.get((AdmissionMode.ENFORCE, name)) or TierDecisions()
    advised = admission.counts.get((AdmissionMode.ADVISE, name)) or TierDecisions()
    return TierState(
        name=name,
        offered=counters.offered,
        ok=counters.requests_by_outcome[RequestOutcome.OK],
        failed=counters.requests_by_outcome[RequestOutcome.FAILED],
        refused=counters.requests_by_outcome[RequestOutcome.REFUSED],
        limited=counters.requests_by_outcome[RequestOutcome.LIMITED],
        broken=counters.requests_by_outcome[RequestOutcome.BROKEN],
        cancelled=counters.requests_by_outcome[RequestOutcome.CANCELLED],
        left_late=counters.requests_by_outcome[RequestOutcome.LEFT_LATE],
        slo_met=counters.slo_met,
        queued=enforced.decisions[AdmissionDecision.QUEUE],
        degraded=enforced.decisions[AdmissionDecision.DEGRADE],
        refusals={reason: count for reason, count in enforced.refusals.items() if count},
        advised_refusals={reason: count for reason, count in advised.refusals.items() if count},
        misses={part: count for part, count in counters.misses_by_part.items() if count},
        wait_mean_s=counters.waiting.sum / waits if waits else None,
        reserve_kept=reserve[0],
        reserve_lent=reserve[1],
    )


def make_app(router: Router, authenticator: Authenticator) -> web.Application:
    """Make the application of the state port.

    A standby router responds 503 and closes the connection: a new connection reaches the active router.
    """

    @web.middleware
    async def authenticate(request: web.Request, handler: _Handler) -> web.StreamResponse:
        scheme, _, token = request.headers.get("Authorization", "").partition(" ")
        try:
            await authenticator.authenticate(token if scheme.lower() == "bearer" else "")
        except Unauthorized as error:
            return web.json_response({"error": str(error)}, status=401)
        if router.active:
            response = await handler(request)
            if router.active:
                return response
        standby = web.json_response({"error": "this router is not the active one"}, status=503)
        standby.force_close()
        return standby

    async def get_state(request: web.Request) -> web.Response:
        generation = int(_read_number(request, "min_generation", 0))
        if generation > router.applied_assignment.generation:
            await router.applied_assignment.wait_until_reached(
                generation, _read_number(request, "timeout_s", 5.0)
            )
        body = build_router_state(router, now_s=time.time()).model_dump_json()
        return web.Response(text=body, content_type="application/json")

    async def get_flip_request(request: web.Request) -> web.Response:
        after, timeout_s = int(_read_number(request, "after", 0)), _read_number(request, "timeout_s", 10.0)
        flip_request = await router.flip_requests.wait_after(after, timeout_s)
        if flip_request is None:
            return web.Response(status=204)
        return web.Response(text=flip_request.model_dump_json(), content_type="application/json")

    app = web.Application(middlewares=[authenticate])
    app.add_routes([web.get("/state", get_state), web.get("/flip-requests", get_flip_request)])
    return app


def _read_number(request: web.Request, name: str, default: float) -> float:
    """Read a query parameter ≥ 0. Time-outs are capped, so that no poll stays open for ever."""
    text = request.query.get(name)
    if text is None:
        return default
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise web.HTTPBadRequest(
            text=f'{{"error": "{name} is not a number of 0 or more"}}', content_type="application/json"
        )
    return min(value, MAX_POLL_S) if name == "timeout_s" else value
