"""All checks that apply to a picture, in the order in which somebody would look: what stands below first."""

from collections.abc import Iterator

from fulcrum_cli.doctor import placement, programs, rights, routing, schemas, services, transfer
from fulcrum_cli.doctor.causes import folded
from fulcrum_cli.doctor.facts import Bodies, ClusterFacts, Facts, LocalFacts
from fulcrum_cli.doctor.findings import Finding, ok, warning
from fulcrum_cli.doctor.rights import SEE_SERVICES
from fulcrum_core.api.crds import crd
from fulcrum_core.api.pdservice import PDService
from fulcrum_core.api.registry import KINDS

_INSTALL = "helm install the chart: it holds operator and autoscaler"


def examine(facts: Facts) -> tuple[Finding, ...]:
    """Every check's answer."""
    findings: list[Finding] = []
    if facts.cluster is not None:
        findings += _installation(facts, facts.cluster)
    unseen = facts.cluster is not None and SEE_SERVICES in rights.refused(facts.cluster.person)
    if not facts.services and not unseen:
        findings.append(ok("services", f"there is no PDService in namespace {facts.namespace}"))
    for service in facts.services:
        findings += _service(facts, service)
        if facts.cluster is not None:
            findings += _in_cluster(facts, facts.cluster, service)
        if facts.local is not None:
            findings += _in_run(facts.local, service)
    lacking = () if facts.cluster is None else tuple(_routers_without_image(facts.cluster))
    return folded(findings, facts.services, routers_lack_image=lacking)


def _routers_without_image(cluster: ClusterFacts) -> Iterator[str]:
    for name, pods in (cluster.router_pods or {}).items():
        if any(placement.pull_failures(pod) for pod in pods):
            yield name


def _installation(facts: Facts, cluster: ClusterFacts) -> Iterator[Finding]:
    if cluster.kinds is None:
        advice = "ask somebody who may read CustomResourceDefinitions to run this"
        yield warning(schemas.NAME, "not looked at: you may not read CustomResourceDefinitions", advice)
    else:
        yield schemas.check_kinds(cluster.kinds, {f"{kind.plural}.fulcrum.dev": crd(kind) for kind in KINDS})
    yield rights.check_person(cluster.person, namespace=facts.namespace)
    yield from _program("operator", cluster.operator, cluster)
    if cluster.operator:
        yield _leader(facts, cluster)
    yield from _program("autoscaler", cluster.autoscaler, cluster)
    for account in cluster.accounts:
        if not account.service:
            yield rights.check_account(account.part, account.account, account.answers)


def _program(part: str, found: Bodies | None, cluster: ClusterFacts) -> Iterator[Finding]:
    pods = cluster.program_pods.get(part)
    if pods:
        yield programs.check_pods(part, pods, cluster.nodes)
    elif found and pods is None:
        advice = f"ask somebody who may list pods where the {part} is to run this"
        yield warning(f"{part}'s pods", "not looked at: you may not list pods there", advice)
    yield programs.check_deployment(part, found, advice_absent=_INSTALL)


def _leader(facts: Facts, cluster: ClusterFacts) -> Finding:
    if not cluster.leases_seen:
        advice = "ask somebody who may read Leases in the operator's namespace to run this"
        return warning("leader", "not looked at: you may not read the operator's Lease", advice)
    advice = "no operator leads: see the log of its pods, and its right to write the Lease"
    return programs.check_lease("leader", cluster.leader, now_s=facts.now_s, advice=advice)


def _service(facts: Facts, service: PDService) -> Iterator[Finding]:
    name = service.metadata.name
    instances, assignment = facts.of(name), facts.assignments.get(name)
    yield services.check_status_is_current(service, now_s=facts.now_s)
    yield services.check_conditions(service)
    yield services.check_progress(service, now_s=facts.now_s)
    yield services.check_instances(name, instances)
    yield services.check_floors(service, instances, assignment)
    yield services.check_tiers(service, facts.tiers)
    yield services.check_model(service)
    yield services.check_pairs(name, instances, assignment)
    yield routing.check_somewhere(name, instances)


def _in_cluster(facts: Facts, cluster: ClusterFacts, service: PDService) -> Iterator[Finding]:
    name = service.metadata.name
    if cluster.engine_pods is None or cluster.router_pods is None:
        advice = f"ask somebody who may list pods in namespace {facts.namespace} to run this"
        yield warning("pods", "not looked at: you may not list pods", advice, about=name)
    else:
        pods = [*cluster.engine_pods.get(name, ()), *cluster.router_pods.get(name, ())]
        yield from _pods(pods, cluster, name)
    yield from _router(facts, cluster, name)
    for account in cluster.accounts:
        if account.service == name:
            yield rights.check_account(account.part, account.account, account.answers, about=name)


def _pods(pods: Bodies, cluster: ClusterFacts, name: str) -> Iterator[Finding]:
    if not pods:
        yield ok("pods", "there is none", about=name)
        return
    yield placement.check_nodes(pods, cluster.nodes, about=name)
    yield placement.check_images(pods, about=name)
    yield placement.check_restarts(pods, about=name)


def _router(facts: Facts, cluster: ClusterFacts, name: str) -> Iterator[Finding]:
    made = "the operator makes it: see what is said of the operator"
    found = None if cluster.routers is None else cluster.routers.get(name, ())
    yield programs.check_deployment("router", found, advice_absent=made, about=name)
    if cluster.router_leases is None or cluster.slices is None:
        advice = f"ask somebody who may read Leases and EndpointSlices in namespace {facts.namespace}"
        yield warning("endpoints", "not looked at: you may not read them", advice, about=name)
        return
    advice = "no router is active: see the log of its pods, and its right to write the Lease"
    lease = cluster.router_leases.get(name)
    yield programs.check_lease("router's lease", lease, now_s=facts.now_s, advice=advice, about=name)
    router_pods = (cluster.router_pods or {}).get(name, ())
    yield routing.check_endpoints(name, cluster.slices.get(name), router_pods)


def _in_run(local: LocalFacts, service: PDService) -> Iterator[Finding]:
    name = service.metadata.name
    yield routing.check_router_answers(name, local.state)
    if (found := transfer.check_transfer(name, local.state)) is not None:
        yield found
    yield routing.check_autoscaler_answers(name, local.autoscaler_refusal)
