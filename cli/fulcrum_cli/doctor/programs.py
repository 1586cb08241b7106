"""Do the programs run that make services work: operator, autoscaler, and who leads?"""

from collections.abc import Sequence
from dataclasses import replace

from fulcrum_cli.doctor import placement
from fulcrum_cli.doctor.facts import Body
from fulcrum_cli.doctor.findings import Finding, Standing, ok, problem, warning
from fulcrum_cli.terminal.ages import format_age
from fulcrum_core.api.meta import format_duration, parse_time
from fulcrum_core.spelling import format_count


def check_deployment(
    what: str, found: Sequence[Body] | None, *, advice_absent: str, about: str = ""
) -> Finding:
    """Whether a part's Deployment is there and all of it is ready; None: nobody could look."""
    if found is None:
        advice = "ask somebody who may list Deployments in its namespace to run this"
        return warning(what, "not looked at: you may not list Deployments", advice, about=about)
    if not found:
        return problem(what, f"no Deployment of the {what} is there", advice_absent, about=about)
    said = [_standing(body) for body in found]
    bad = [words for ready, words in said if not ready]
    if any(ready is None for ready, _ in said):
        return problem(what, "; ".join(bad), _look(found[0]), about=about)
    if bad:
        return warning(what, "; ".join(bad), _look(found[0]), about=about)
    return ok(what, "; ".join(words for _, words in said), about=about)


def check_pods(what: str, pods: Sequence[Body], nodes: Sequence[Body] | None) -> Finding:
    """Whether a part's pods have their image and a node, and stay up: the first of these that is wrong."""
    checks = (
        placement.check_images(pods, said_in="the chart's image"),
        placement.check_nodes(pods, nodes),
        placement.check_restarts(pods),
    )
    found = next((check for check in checks if check.standing is not Standing.OK), None)
    if found is None:
        return ok(f"{what}'s pods", f"no pod of {len(pods)} lacks its image or a node")
    return replace(found, name=f"{what}'s pods")


def _standing(body: Body) -> tuple[bool | None, str]:
    """Whether all replicas are ready (None: not one), and that in words."""
    meta, status = body["metadata"], body.get("status", {})
    wanted, ready = body["spec"].get("replicas", 1), status.get("readyReplicas", 0)
    words = (
        f"Deployment {meta['namespace']}/{meta['name']}: {ready} of {format_count(wanted, 'replica')} ready"
    )
    if ready >= wanted > 0:
        return True, words
    failing = [
        condition.get("message", condition["type"])
        for condition in status.get("conditions", ())
        if (condition["type"], condition["status"]) in _FAILING
    ]
    return (False if ready else None), f"{words}{': ' if failing else ''}{'; '.join(failing)}"


_FAILING = {("ReplicaFailure", "True"), ("Progressing", "False")}


def _look(body: Body) -> str:
    meta = body["metadata"]
    return f"kubectl -n {meta['namespace']} describe deployment {meta['name']}; then the log of its pods"


def check_lease(what: str, lease: Body | None, *, now_s: float, advice: str, about: str = "") -> Finding:
    """Whether somebody holds a Lease and renews it."""
    if lease is None:
        return problem(what, "its Lease is not there", advice, about=about)
    spec, meta = lease.get("spec", {}), lease["metadata"]
    name, holder = f"Lease {meta['namespace']}/{meta['name']}", spec.get("holderIdentity")
    if not holder or not spec.get("renewTime"):
        return problem(what, f"nobody holds {name}", advice, about=about)
    silent_s = max(0.0, now_s - parse_time(spec["renewTime"]))
    length_s = float(spec.get("leaseDurationSeconds", 15))
    if silent_s > length_s:
        ago, after = format_age(silent_s), format_duration(length_s)
        seen = f"{name} of {holder} was last renewed {ago} ago and ran out after {after}"
        return problem(what, seen, advice, about=about)
    return ok(what, f"{holder} holds {name}", about=about)
