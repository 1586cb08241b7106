"""Runs all checks that apply to the facts, from the CRDs up to the services, and groups them by cause.

The command `doctor` calls it after `gather`. It reads nothing itself; the checks are in the other modules of
this package.
"""

from collections.abc import Iterator

from fulcrum_cli.doctor import (
    components,
    crd_schemas,
    kv_transfer,
    permissions,
    pod_checks,
    routing,
    services,
)
from fulcrum_cli.doctor.causes import group_by_cause
from fulcrum_cli.doctor.facts import Bodies, ClusterFacts, DoctorFacts, LocalFacts
from fulcrum_cli.doctor.findings import CheckId, Component, Finding, ok, warning
from fulcrum_cli.doctor.permissions import LIST_SERVICES
from fulcrum_core.api.crds import build_crd
from fulcrum_core.api.pdservice import PDService
from fulcrum_core.api.registry import KINDS

_INSTALL = "helm install the chart, which contains operator and autoscaler"


def examine(facts: DoctorFacts) -> tuple[Finding, ...]:
    """Return the findings of all checks, causes first."""
    findings: list[Finding] = []
    if facts.cluster is not None:
        findings += _check_installation(facts, facts.cluster)
    services_unreadable = facts.cluster is not None and LIST_SERVICES in permissions.denied_permissions(
        facts.cluster.user_access
    )
    if not facts.services and not services_unreadable:
        findings.append(ok(CheckId.SERVICES, f"no PDService in namespace {facts.namespace}"))
    for service in facts.services:
        findings += _check_service(facts, service)
        if facts.cluster is not None:
            findings += _check_in_cluster(facts, facts.cluster, service)
        if facts.local is not None:
            findings += _check_in_local_run(facts.local, service)
    routers_without_image = () if facts.cluster is None else tuple(_find_routers_without_image(facts.cluster))
    return group_by_cause(findings, facts.services, routers_without_image=routers_without_image)


def _find_routers_without_image(cluster: ClusterFacts) -> Iterator[str]:
    for name, pods in (cluster.router_pods or {}).items():
        if any(pod_checks.image_pull_failures(pod) for pod in pods):
            yield name


def _check_installation(facts: DoctorFacts, cluster: ClusterFacts) -> Iterator[Finding]:
    if cluster.crds is None:
        advice = "run this as a user with permission to read CustomResourceDefinitions"
        yield warning(CheckId.CRDS, "skipped: no permission to read CustomResourceDefinitions", advice)
    else:
        yield crd_schemas.check_crds(
            cluster.crds, {f"{kind.plural}.fulcrum.dev": build_crd(kind) for kind in KINDS}
        )
    yield permissions.check_user_permissions(cluster.user_access, namespace=facts.namespace)
    yield from _check_component(Component.OPERATOR, cluster.operator_deployments, cluster)
    if cluster.operator_deployments:
        yield _check_leader(facts, cluster)
    yield from _check_component(Component.AUTOSCALER, cluster.autoscaler_deployments, cluster)
    for account in cluster.service_accounts:
        if not account.service:
            yield permissions.check_service_account(
                account.component, account.account, account.access_reviews
            )


def _check_component(component: Component, found: Bodies | None, cluster: ClusterFacts) -> Iterator[Finding]:
    pods = cluster.component_pods.get(component)
    if pods:
        yield components.check_pods(component, pods, cluster.nodes)
    elif found and pods is None:
        advice = f"run this as a user with permission to list pods in the {component}'s namespace"
        yield warning(component.pods_check, "skipped: no permission to list pods there", advice)
    yield components.check_deployment(component, found, advice_absent=_INSTALL)


def _check_leader(facts: DoctorFacts, cluster: ClusterFacts) -> Finding:
    if not cluster.leases_readable:
        advice = "run this as a user with permission to read Leases in the operator's namespace"
        return warning(CheckId.LEADER, "skipped: no permission to read the operator's Lease", advice)
    advice = "no operator is leader: see the log of its pods, and its permission to write the Lease"
    return components.check_lease(CheckId.LEADER, cluster.operator_lease, now_s=facts.now_s, advice=advice)


def _check_service(facts: DoctorFacts, service: PDService) -> Iterator[Finding]:
    name = service.metadata.name
    instances, assignment = facts.instances_of(name), facts.assignments.get(name)
    yield services.check_status_is_current(service, now_s=facts.now_s)
    yield services.check_conditions(service)
    yield services.check_progress(service, now_s=facts.now_s)
    yield services.check_instances(name, instances)
    yield services.check_floors(service, instances, assignment)
    yield services.check_tiers(service, facts.tiers)
    yield services.check_model(service)
    yield services.check_pairs(name, instances, assignment)
    yield routing.check_serving_instances(name, instances)


def _check_in_cluster(facts: DoctorFacts, cluster: ClusterFacts, service: PDService) -> Iterator[Finding]:
    name = service.metadata.name
    if cluster.engine_pods is None or cluster.router_pods is None:
        advice = f"run this as a user with permission to list pods in namespace {facts.namespace}"
        yield warning(CheckId.PODS, "skipped: no permission to list pods", advice, service=name)
    else:
        pods = [*cluster.engine_pods.get(name, ()), *cluster.router_pods.get(name, ())]
        yield from _check_pods(pods, cluster, name)
    yield from _check_router(facts, cluster, name)
    for account in cluster.service_accounts:
        if account.service == name:
            yield permissions.check_service_account(
                account.component, account.account, account.access_reviews, service=name
            )


def _check_pods(pods: Bodies, cluster: ClusterFacts, name: str) -> Iterator[Finding]:
    if not pods:
        yield ok(CheckId.PODS, "there are none", service=name)
        return
    yield pod_checks.check_nodes(pods, cluster.nodes, service=name)
    yield pod_checks.check_images(pods, service=name)
    yield pod_checks.check_restarts(pods, service=name)


def _check_router(facts: DoctorFacts, cluster: ClusterFacts, name: str) -> Iterator[Finding]:
    advice_absent = "the operator creates it: see the findings of the operator"
    found = None if cluster.router_deployments is None else cluster.router_deployments.get(name, ())
    yield components.check_deployment(Component.ROUTER, found, advice_absent=advice_absent, service=name)
    if cluster.router_leases is None or cluster.endpoint_slices is None:
        advice = (
            "run this as a user with permission to read Leases and EndpointSlices "
            f"in namespace {facts.namespace}"
        )
        yield warning(
            CheckId.ENDPOINTS, "skipped: no permission to read Lease or EndpointSlice", advice, service=name
        )
        return
    advice = "no router is active: see the log of its pods, and its permission to write the Lease"
    lease = cluster.router_leases.get(name)
    yield components.check_lease(CheckId.ROUTER_LEASE, lease, now_s=facts.now_s, advice=advice, service=name)
    router_pods = (cluster.router_pods or {}).get(name, ())
    yield routing.check_endpoints(name, cluster.endpoint_slices.get(name), router_pods)


def _check_in_local_run(local: LocalFacts, service: PDService) -> Iterator[Finding]:
    name = service.metadata.name
    yield routing.check_router_responds(name, local.state)
    if (found := kv_transfer.check_transfer(name, local.state)) is not None:
        yield found
    yield routing.check_autoscaler_responds(name, local.autoscaler_error)
