"""TiersAccepted: missing tiers, tenants of two tiers, and access that cannot work."""

from typing import Any

import pytest

from fulcrum_core.api import PDService, QoSTier
from fulcrum_core.router_state import RouterState
from fulcrum_operator.plan.status.tiers_accepted import tiers_accepted
from tests.unit.core.router_states import router_state
from tests.unit.operator.builders import service

KEYS = {"apiKeys": {"secretName": "keys"}}


def tier(name: str, **match: Any) -> QoSTier:
    return QoSTier.model_validate({"metadata": {"name": name}, "spec": {"match": match}})


def reserving(name: str, fraction: float) -> QoSTier:
    return QoSTier.model_validate({"metadata": {"name": name}, "spec": {"reservedFraction": fraction}})


def judge(subject: PDService, *tiers: QoSTier, router: RouterState | None = None) -> tuple[str, str, str]:
    found = tiers_accepted(subject, tiers, router)
    return found.status, found.reason, found.message


def named(*names: str, auth: dict[str, Any] | None = None) -> PDService:
    return service(qosTiers=list(names), router={"auth": auth} if auth else {})


@pytest.mark.parametrize(
    ("subject", "tiers", "expected"),
    [
        pytest.param(named(), (), ("True", "TiersFound", "the built-in tier"), id="none is named"),
        pytest.param(
            named("gold"),
            (tier("gold"),),
            (
                "True",
                "TiersFound",
                "1 tier; any client may name tenant and tier, since spec.router.auth is not set",
            ),
            id="missing authentication is reported",
        ),
        pytest.param(named("gold", auth=KEYS), (tier("gold"),), ("True", "TiersFound", "1 tier"), id="keys"),
        pytest.param(
            named("gold", "free"),
            (tier("free"),),
            ("False", "TierNotFound", "no QoSTier named gold in namespace default"),
            id="a tier that does not exist",
        ),
        pytest.param(
            named("gold", "free"),
            (tier("free", tenants=["a"], keys=["a/x"]), tier("gold", tenants=["a", "b"], keys=["a/x"])),
            (
                "False",
                "TenantMatchedTwice",
                "tiers gold and free both match the tenant a: tier gold is used; "
                "tiers gold and free both match the key a/x: tier gold is used",
            ),
            id="a tenant and a key of two tiers",
        ),
        pytest.param(
            named("gold", auth=KEYS),
            (tier("gold", tenants=["a"]), tier("other", tenants=["a"])),
            ("True", "TiersFound", "1 tier"),
            id="tiers of other services do not count",
        ),
        pytest.param(
            named("gold", "silver", "free", auth=KEYS),
            (reserving("gold", 0.7), reserving("silver", 0.4), reserving("free", 0.0)),
            (
                "False",
                "ReservesTooLarge",
                "the tiers reserve 1.1 together (gold 0.7, silver 0.4), more than 1: "
                "the router divides each reservedFraction by this sum",
            ),
            id="reserves above 1",
        ),
        pytest.param(
            named("gold", "silver", auth=KEYS),
            (reserving("gold", 0.6), reserving("silver", 0.4), reserving("other", 0.5)),
            ("True", "TiersFound", "2 tiers"),
            id="reserves of 1",
        ),
        pytest.param(
            named("gold", auth={"trustedProxies": ["10.0.0.0/8", "10.0.0.1/8", "999.0.0.0/8"]}),
            (tier("gold"),),
            (
                "False",
                "InvalidAccess",
                "trustedProxies: 10.0.0.1/8 is not a network such as 10.0.0.0/8; "
                "trustedProxies: 999.0.0.0/8 is not a network such as 10.0.0.0/8",
            ),
            id="no networks",
        ),
    ],
)
def test_contradictions_are_named_with_what_happens_next(
    subject: PDService, tiers: tuple[QoSTier, ...], expected: tuple[str, str, str]
) -> None:
    assert judge(subject, *tiers) == expected


def test_problems_of_keys_are_told_as_the_router_reports_them_until_it_reports_again() -> None:
    subject, problem = named(auth=KEYS), ("tenants a and b have the same key: it is refused",)
    bad = tiers_accepted(subject, (), router_state(access_problems=problem))
    known = subject.model_copy(update={"status": subject.status.model_copy(update={"conditions": (bad,)})})
    reported = ("False", "InvalidAccess", *problem)
    assert [judge(known), judge(known, router=router_state())] == [
        reported,
        ("True", "TiersFound", "the built-in tier"),
    ]
