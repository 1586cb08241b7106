"""The router's state port: what the autoscaler and the operator pull, behind a token."""

import math
import time
from collections.abc import Awaitable, Callable

from aiohttp import web

from fulcrum_core.state import InstanceState, PairState, RouterState, TierState
from fulcrum_router.control.auth import Callers, NotAllowed
from fulcrum_router.counters import Outcome, TierBooks
from fulcrum_router.fleet.instances import Instance
from fulcrum_router.policy import Pair, PairKey, Proof
from fulcrum_router.router import Router

MAX_POLL_S = 60.0
_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def picture(router: Router, *, now_s: float) -> RouterState:
    """One consistent picture of the router."""
    wanted = router.flips.last
    return RouterState(
        service=router.settings.service if router.settings else "",
        generation=router.epoch.generation,
        acknowledged_at_s=router.epoch.at_s,
        at_s=now_s,
        since_s=router.since_s,
        instances=tuple(_instance(instance) for instance in router.fleet.all),
        flip_wanted=wanted.role if wanted else None,
        flip_wanted_seq=router.flips.seq,
        prediction_error=router.prediction_error.value,
        local_prefills=router.books.local_prefills,
        tiers=tuple(_tier(name, books) for name, books in sorted(router.books.tiers.items())),
        pairs=tuple(_pair(key, pair, time.monotonic()) for key, pair in router.pairs.told()),
    )


def _instance(instance: Instance) -> InstanceState:
    ledger = instance.ledger
    return InstanceState(
        name=instance.name,
        role=instance.role,
        serving=instance.serving,
        prefill_queued_s=ledger.prefill_s,
        prefill_tokens=ledger.prefill_tokens,
        decode_tokens=ledger.decode_tokens,
        decode_requests=ledger.decode_requests,
        legs=ledger.legs,
        open_handoffs=ledger.open_handoffs,
        itl_s=instance.itl_s,
        kv_usage=instance.kv_usage,
        missed_probes=instance.missed_probes,
        engine_requests=None if instance.health.ejected else instance.engine_requests,
        engine_read_s=instance.engine_read_s,
    )


def _pair(key: PairKey, pair: Pair, now_s: float) -> PairState:
    return PairState(
        prefill=key.prefill,
        decode=key.decode,
        proven=pair.counts[Proof.PROVEN],
        recomputed=pair.counts[Proof.RECOMPUTED],
        unknown=pair.counts[Proof.UNKNOWN],
        last_proven_s=None if pair.last_proven_s is None else now_s - pair.last_proven_s,
        handshake_s=pair.handshake_s,
        seconds_per_1k_tokens=pair.seconds_per_1k_tokens,
        last_reason=pair.reason,
    )


def _tier(name: str, books: TierBooks) -> TierState:
    return TierState(
        name=name,
        offered=books.offered,
        ok=books.ended[Outcome.OK],
        failed=books.ended[Outcome.FAILED],
        broken=books.ended[Outcome.BROKEN],
        cancelled=books.ended[Outcome.CANCELLED],
        slo_met=books.slo_met,
    )


def make_app(router: Router, callers: Callers) -> web.Application:
    """The application of the state port. A standby has nothing to tell: 503, and come back by another way."""

    @web.middleware
    async def authenticate(request: web.Request, handler: _Handler) -> web.StreamResponse:
        scheme, _, token = request.headers.get("Authorization", "").partition(" ")
        try:
            await callers.check(token if scheme.lower() == "bearer" else "")
        except NotAllowed as error:
            return web.json_response({"error": str(error)}, status=401)
        if router.active:
            answer = await handler(request)
            if router.active:
                return answer
        standby = web.json_response({"error": "not active"}, status=503)
        standby.force_close()  # the next connection finds the active one
        return standby

    async def state(request: web.Request) -> web.Response:
        generation = int(_number(request, "min_generation", 0))
        if generation > router.epoch.generation:
            await router.epoch.reached(generation, _number(request, "timeout_s", 5.0))
        body = picture(router, now_s=time.time()).model_dump_json()
        return web.Response(text=body, content_type="application/json")

    async def flip_wanted(request: web.Request) -> web.Response:
        after, timeout_s = int(_number(request, "after", 0)), _number(request, "timeout_s", 10.0)
        wanted = await router.flips.after(after, timeout_s)
        if wanted is None:
            return web.Response(status=204)
        return web.Response(text=wanted.model_dump_json(), content_type="application/json")

    app = web.Application(middlewares=[authenticate])
    app.add_routes([web.get("/state", state), web.get("/flip-wanted", flip_wanted)])
    return app


def _number(request: web.Request, name: str, default: float) -> float:
    """A query parameter ≥ 0; times are capped so that nobody holds a poll for ever."""
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
