"""One cause, one problem: what only follows from another finding is named below it, and that comes first."""

from collections.abc import Collection, Iterable
from dataclasses import replace

from fulcrum_cli.doctor.findings import Finding, Standing
from fulcrum_cli.doctor.services import bad_conditions, impossible_floors
from fulcrum_core.api import conditions as words
from fulcrum_core.api.pdservice import PDService

_PROBLEM = Standing.PROBLEM
Title = tuple[str, str]
"""The service that a finding is about, and the finding's name."""

_OPERATOR = ("operator's pods", "operator", "leader")
"""Each of these is why the next one is bad."""
_AUTOSCALER = ("autoscaler's pods", "autoscaler")
_ALIKE = tuple(zip(_OPERATOR, _AUTOSCALER, strict=False))
"""Where the same is to be done for both parts, one of them is told."""
_MADE_BY_OPERATOR = (
    *("status", "conditions", "progress", "instances", "floors", "targets", "pods", "pairs"),
    *("router", "router's lease", "endpoints", "router's rights"),
)
"""Bad of a service that no operator has ever looked at."""
_OF_SERVICE = ("images", "nodes", "model", "instances")
_NOT_SERVING = {
    *(words.TOO_FEW_INSTANCES, words.ROUTER_STARTING, words.IMAGE_PULL_FAILED, words.UNSCHEDULABLE),
    *(words.ENGINE_DOES_NOT_START, words.INSTANCES_FAILED, words.INSTANCE_LOST, words.NODE_LOST),
}
"""Reasons of conditions that only say that instances do not serve."""
_OF_ROUTER = ("router", "router's lease", "endpoints")


def folded(
    findings: Iterable[Finding], services: Iterable[PDService], *, routers_lack_image: Collection[str] = ()
) -> tuple[Finding, ...]:
    """The findings, causes first, each with the names of those that follow from it.

    `routers_lack_image` names the services whose routers' images do not come.
    """
    found, services = tuple(findings), tuple(services)
    for service in reversed(services):
        name = service.metadata.name
        routers = _OF_ROUTER if name in routers_lack_image else ()
        follows = {(name, each) for each in (*_symptoms(service), *routers)}
        found = _below_first(found, [(name, each) for each in _OF_SERVICE], follows)
        if not service.status.observed_generation:
            made = {(name, each) for each in _MADE_BY_OPERATOR}
            found = _below_first(found, [(name, "status")], made)
    found = _below_first(found, _installed(_AUTOSCALER), {("", "autoscaler")})
    return _below_first(found, _installed(_OPERATOR), _of_operator(found, services))


def _installed(names: Iterable[str]) -> list[Title]:
    return [("", name) for name in names]


def _symptoms(service: PDService) -> list[str]:
    """What is bad of a service because its instances do not serve."""
    symptoms = ["targets", "progress"]
    if {condition.reason for condition in bad_conditions(service)} <= _NOT_SERVING:
        symptoms.append("conditions")
    if impossible_floors(service) is None:
        symptoms.append("floors")
    return symptoms


def _of_operator(findings: Iterable[Finding], services: Iterable[PDService]) -> set[Title]:
    """What is bad because no operator works, among it the autoscaler where both lack the same thing."""
    follows = set(_installed(_OPERATOR))
    for service in services:
        made = ("status",) if service.status.observed_generation else _MADE_BY_OPERATOR
        follows |= {(service.metadata.name, each) for each in made}
    bad = {each.name: each.advice for each in findings if not each.about and each.standing is _PROBLEM}
    if any(one in bad and bad[one] == bad.get(other) for one, other in _ALIKE):
        follows |= set(_installed(_AUTOSCALER))
    return follows


def _below_first(
    findings: tuple[Finding, ...], causes: Iterable[Title], follows: Collection[Title]
) -> tuple[Finding, ...]:
    """The first of the causes that is a problem at the head, without what follows from it."""
    bad = {(each.about, each.name): each for each in findings if each.standing is _PROBLEM}
    cause = next((bad[title] for title in causes if title in bad), None)
    if cause is None:
        return findings
    below = [
        each
        for each in findings
        if each is not cause and (each.about, each.name) in follows and each.standing is not Standing.OK
    ]
    explains = (*(each.title for each in below), *(title for each in below for title in each.explains))
    rest = (each for each in findings if each is not cause and each not in below)
    return (replace(cause, explains=(*cause.explains, *explains)), *rest)
