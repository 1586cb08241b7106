"""The condition TiersAccepted: the QoSTiers that the service names exist, and each request belongs to one.

It is False if a tier is missing, if two tiers match the same tenant or API key, if the reserves of the tiers
sum to more than 1, if a trusted proxy is not a valid network, or if API keys have no effect. The API keys are
in a Secret that the operator may not read: the router reports their problems. Without a report, the problems
that the condition had before are kept. `service` of this folder calls it.
"""

import math
from collections.abc import Iterable, Iterator

from fulcrum_core.api import Condition, PDService, QoSTier, conditions
from fulcrum_core.formatting import format_count
from fulcrum_core.networks import parse_network
from fulcrum_core.router_state import RouterState
from fulcrum_operator.plan.status.condition import true_or_false

_OPEN = "; any client may name tenant and tier, since spec.router.auth is not set"


def tiers_accepted(service: PDService, tiers: Iterable[QoSTier], router: RouterState | None) -> Condition:
    """The condition, with the first kind of problem that is found.

    `tiers` are those of the service's namespace, `router` is the router's report if there is one.
    """
    named, known = service.spec.qos_tiers, {tier.metadata.name: tier for tier in tiers}
    for reason, problems in (
        (conditions.TIER_NOT_FOUND, _find_missing(service, known)),
        (conditions.TENANT_MATCHED_TWICE, _find_matched_twice([known[n] for n in named if n in known])),
        (conditions.RESERVES_TOO_LARGE, _find_large_reserves([known[n] for n in named if n in known])),
        (conditions.INVALID_ACCESS, _find_access_problems(service, router)),
    ):
        message = "; ".join(problems)
        if message:
            return true_or_false(
                service, conditions.TIERS_ACCEPTED, holds=False, reason=reason, message=message
            )
    message = format_count(len(named), "tier") if named else "the built-in tier"
    if named and service.spec.router.auth is None:
        message += _OPEN
    return true_or_false(
        service, conditions.TIERS_ACCEPTED, holds=True, reason=conditions.TIERS_FOUND, message=message
    )


def _find_missing(service: PDService, known: Iterable[str]) -> Iterator[str]:
    missing = [name for name in service.spec.qos_tiers if name not in known]
    if missing:
        yield f"no QoSTier named {', '.join(missing)} in namespace {service.metadata.namespace}"


def _find_matched_twice(tiers: Iterable[QoSTier]) -> Iterator[str]:
    owners: dict[tuple[str, str], str] = {}
    for tier in tiers:
        match = tier.spec.match
        for subject in (
            *(("tenant", name) for name in match.tenants),
            *(("key", name) for name in match.keys),
        ):
            first = owners.setdefault(subject, tier.metadata.name)
            if first != tier.metadata.name:
                kind, name = subject
                pair = f"tiers {first} and {tier.metadata.name}"
                yield f"{pair} both match the {kind} {name}: tier {first} is used"


def _find_large_reserves(tiers: Iterable[QoSTier]) -> Iterator[str]:
    reserves = {tier.metadata.name: tier.spec.reserved_fraction for tier in tiers}
    total = math.fsum(reserves.values())
    if total > 1.0:
        parts = ", ".join(f"{name} {fraction:g}" for name, fraction in reserves.items() if fraction)
        yield (
            f"the tiers reserve {total:g} together ({parts}), more than 1: "
            "the router divides each reservedFraction by this sum"
        )


def _find_access_problems(service: PDService, router: RouterState | None) -> Iterator[str]:
    auth = service.spec.router.auth
    if auth is None:
        return
    for text in auth.trusted_proxies:
        if parse_network(text) is None:
            yield f"trustedProxies: {text} is not a network such as 10.0.0.0/8"
    if router is not None:
        yield from router.access_problems
    elif auth.api_keys is not None:  # no report now: keep the last problems
        before = (c for c in service.status.conditions if c.reason == conditions.INVALID_ACCESS)
        yield from (condition.message for condition in before)
