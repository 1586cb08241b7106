"""Settings of a router: what it makes of a PDService and its QoSTiers, up to the parts that decide by it."""

import math
from typing import Any

import pytest

from fulcrum_core.api import PDService, QoSTier
from fulcrum_core.values import AdmissionMode, OverloadAction, Slo
from fulcrum_router.policy.tiers.admission import TierAdmission
from fulcrum_router.policy.tiers.tier_reserve import Reserve
from fulcrum_router.router import Router
from fulcrum_router.settings import Tier, resolve_settings

PREMIUM = {
    "priority": 10,
    "slo": {"ttft": "1s", "tpot": "40ms"},
    "reservedFraction": 0.25,
    "reclaimWithin": "8s",
    "weight": 3,
    "sheddable": False,
    "rateLimit": {"tokensPerMinute": 600_000},
    "admission": {"mode": "Queue", "maxQueueTime": "7s"},
}


def service(*tiers: str, **spec: Any) -> PDService:
    body = {"model": "m", "qosTiers": list(tiers), **spec}
    return PDService.model_validate({"metadata": {"name": "chat"}, "spec": body})


def tier(name: str, **spec: Any) -> QoSTier:
    return QoSTier.model_validate({"metadata": {"name": name}, "spec": spec})


def test_each_field_of_a_tier_reaches_the_settings() -> None:
    settings = resolve_settings(service("premium"), [tier("premium", **PREMIUM)])
    admission = TierAdmission(sheddable=False, action=OverloadAction.QUEUE, max_queue_s=7.0)
    assert settings.tiers["premium"] == Tier(
        "premium", Slo(1.0, 0.04), -10, admission, 600_000, Reserve(0.25, 8.0), 3
    )


def test_objectives_of_a_tier_may_be_a_multiple_of_those_of_the_service() -> None:
    settings = resolve_settings(
        service("batch", slo={"ttft": "3s", "tpot": "100ms"}), [tier("batch", sloFactor=2)]
    )
    assert settings.tiers["batch"].slo == Slo(6.0, 0.2)


def test_tiers_that_the_service_does_not_list_and_tiers_that_do_not_exist_are_left_out() -> None:
    settings = resolve_settings(service("premium", "missing"), [tier("premium"), tier("other")])
    assert list(settings.tiers) == ["premium"]


@pytest.mark.parametrize(
    ("dispatch", "prefill_ahead_s"),
    [
        pytest.param({}, 0.5, id="Queue is the default"),
        pytest.param({"mode": "Queue", "prefillAhead": "2s"}, 2.0, id="Queue by the work ahead"),
        pytest.param({"mode": "Direct"}, math.inf, id="Direct: no request waits in the router"),
        pytest.param({"mode": "Direct", "prefillAhead": "2s"}, math.inf, id="Direct ignores prefillAhead"),
    ],
)
def test_the_dispatch_mode_decides_where_requests_wait(
    dispatch: dict[str, Any], prefill_ahead_s: float
) -> None:
    router, settings = Router(), resolve_settings(service(router={"dispatch": dispatch}), [])
    router.configure(settings, last_prefill_to_decode_s=None)
    assert (settings.prefill_ahead_s, router.journeys.waiting_room.prefill_ahead_s) == (
        prefill_ahead_s,
        prefill_ahead_s,
    )


def test_a_configured_router_decides_by_the_settings() -> None:
    router = Router()
    settings = resolve_settings(
        service("premium", "free", router={"admission": "Enforce", "dispatch": {"deflect": True}}),
        [tier("premium", **PREMIUM), tier("free")],
    )
    router.configure(settings, last_prefill_to_decode_s=None)
    journeys = router.journeys
    assert journeys.admission.mode is AdmissionMode.ENFORCE
    assert journeys.admission.tiers["premium"] == settings.tiers["premium"].admission
    assert list(journeys.tier_reserve.list_fractions(0.0)) == [("premium", 0.0, 0.25)]
    journeys.tier_reserve.record_arrival("premium", 0.0)
    assert journeys.tier_reserve.find_kept_fraction("free", 0.0) == pytest.approx(0.25)
