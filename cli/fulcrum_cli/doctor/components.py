"""Do the programs run that make services work: operator, autoscaler, and who leads?"""

from collections.abc import Sequence
from dataclasses import replace

from fulcrum_cli.doctor import pod_checks
from fulcrum_cli.doctor.facts import Body
from fulcrum_cli.doctor.findings import Finding, Severity, ok, problem, warning
from fulcrum_cli.terminal.ages import format_age
from fulcrum_core.api.meta import format_duration, parse_time
from fulcrum_core.formatting import format_count


def check_deployment(
    component: str, found: Sequence[Body] | None, *, advice_absent: str, service: str = ""
) -> Finding:
    """Whether a part's Deployment is there and all of it is ready; None: nobody could look."""
    if found is None:
        advice = "ask somebody who may list Deployments in its namespace to run this"
        return warning(component, "not looked at: you may not list Deployments", advice, service=service)
    if not found:
        return problem(
            component, f"no Deployment of the {component} is there", advice_absent, service=service
        )
    readiness = [_describe_readiness(body) for body in found]
    bad = [text for ready, text in readiness if not ready]
    if any(ready is None for ready, _ in readiness):
        return problem(component, "; ".join(bad), _advise_describe(found[0]), service=service)
    if bad:
        return warning(component, "; ".join(bad), _advise_describe(found[0]), service=service)
    return ok(component, "; ".join(text for _, text in readiness), service=service)


def check_pods(component: str, pods: Sequence[Body], nodes: Sequence[Body] | None) -> Finding:
    """Whether a part's pods have their image and a node, and stay up: the first of these that is wrong."""
    checks = (
        pod_checks.check_images(pods, image_setting="the chart's image"),
        pod_checks.check_nodes(pods, nodes),
        pod_checks.check_restarts(pods),
    )
    found = next((check for check in checks if check.severity is not Severity.OK), None)
    if found is None:
        return ok(f"{component}'s pods", f"no pod of {len(pods)} lacks its image or a node")
    return replace(found, name=f"{component}'s pods")


def _describe_readiness(body: Body) -> tuple[bool | None, str]:
    """Whether all replicas are ready (None: not one), and that in words."""
    meta, status = body["metadata"], body.get("status", {})
    wanted, ready = body["spec"].get("replicas", 1), status.get("readyReplicas", 0)
    text = (
        f"Deployment {meta['namespace']}/{meta['name']}: {ready} of {format_count(wanted, 'replica')} ready"
    )
    if ready >= wanted > 0:
        return True, text
    failing = [
        condition.get("message", condition["type"])
        for condition in status.get("conditions", ())
        if (condition["type"], condition["status"]) in _FAILING_CONDITIONS
    ]
    return (False if ready else None), f"{text}{': ' if failing else ''}{'; '.join(failing)}"


_FAILING_CONDITIONS = {("ReplicaFailure", "True"), ("Progressing", "False")}


def _advise_describe(body: Body) -> str:
    meta = body["metadata"]
    return f"kubectl -n {meta['namespace']} describe deployment {meta['name']}; then the log of its pods"


def check_lease(name: str, lease: Body | None, *, now_s: float, advice: str, service: str = "") -> Finding:
    """Whether somebody holds a Lease and renews it."""
    if lease is None:
        return problem(name, "its Lease is not there", advice, service=service)
    spec, meta = lease.get("spec", {}), lease["metadata"]
    lease_name, holder = f"Lease {meta['namespace']}/{meta['name']}", spec.get("holderIdentity")
    if not holder or not spec.get("renewTime"):
        return problem(name, f"nobody holds {lease_name}", advice, service=service)
    since_renewal_s = max(0.0, now_s - parse_time(spec["renewTime"]))
    lease_duration_s = float(spec.get("leaseDurationSeconds", 15))
    if since_renewal_s > lease_duration_s:
        ago, after = format_age(since_renewal_s), format_duration(lease_duration_s)
        observed = f"{lease_name} of {holder} was last renewed {ago} ago and ran out after {after}"
        return problem(name, observed, advice, service=service)
    return ok(name, f"{holder} holds {lease_name}", service=service)
