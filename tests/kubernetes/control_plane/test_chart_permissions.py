"""The chart's roles on a real API server: none is granted twice, and no component has one that is forbidden.

That each permission is used is tested with the scenarios on nodes.
"""

import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from fulcrum_core.api import PDService
from fulcrum_operator.manifests.children import service_children
from fulcrum_operator.manifests.names import InstallationSettings, ServiceAccount
from tests.kubernetes.nodes.permissions import Permission, expand_rules
from tests.paths import ROOT
from tools.kubernetes.cluster import Cluster
from tools.kubernetes.waiting import wait_for

REVIEWS = "/apis/authorization.k8s.io/v1/subjectaccessreviews"
RBAC = "/apis/rbac.authorization.k8s.io/v1"
FORBIDDEN = [
    ("", "secrets", "get"),
    ("", "secrets", "list"),
    ("", "configmaps", "get"),
    ("", "nodes", "get"),
    ("", "nodes", "patch"),
    ("", "pods/exec", "create"),
    ("", "pods/eviction", "create"),
    ("", "serviceaccounts/token", "create"),
    ("apps", "deployments/scale", "patch"),
    ("fulcrum.dev", "pdservices", "create"),
    ("fulcrum.dev", "pdservices", "delete"),
    ("fulcrum.dev", "pdservices", "patch"),
    ("rbac.authorization.k8s.io", "clusterroles", "bind"),
    ("rbac.authorization.k8s.io", "roles", "bind"),
    ("rbac.authorization.k8s.io", "roles", "escalate"),
    ("*", "*", "*"),
]
"""Permissions that no component may have."""


def rendered(namespace: str) -> list[dict[str, Any]]:
    """Render the chart's RBAC objects for a release in a namespace."""
    request = {
        "values": {"crds": {"enabled": False}, "image": {"repository": "registry.example/fulcrum"}},
        "namespace": namespace,
        "release": f"{namespace}-fulcrum",
    }
    program = [sys.executable, "-m", "tests.helm.renderer_program", str(ROOT / "helm" / "fulcrum")]
    rendering = subprocess.run(
        program, input=json.dumps(request), capture_output=True, text=True, check=True, cwd=ROOT
    )
    text = json.loads(rendering.stdout)["files"]["fulcrum/templates/rbac.yaml"]
    return [document for document in yaml.safe_load_all(text) if document]


class Release:
    """The roles of a release on the cluster, named after the test's namespace."""

    def __init__(self, cluster: Cluster, namespace: str) -> None:
        self.cluster, self.namespace, self.name = cluster, namespace, f"{namespace}-fulcrum"
        self.made = rendered(namespace)

    def rules(self, component: str) -> list[dict[str, Any]]:
        """The chart's rules for a component."""
        (role,) = (
            made
            for made in self.made
            if made["kind"] == "ClusterRole" and made["metadata"]["name"] == f"{self.name}-{component}"
        )
        found: list[dict[str, Any]] = role["rules"]
        return found

    def set_rules(self, component: str, rules: list[dict[str, Any]]) -> None:
        """Replace the rules of a component."""
        path = f"{RBAC}/clusterroles/{self.name}-{component}"
        body = json.dumps({"rules": rules}).encode()
        status, said = self.cluster.request("PATCH", path, body, content_type="application/merge-patch+json")
        assert status == 200, said

    def account(self, component: str) -> ServiceAccount:
        """User name of a component's ServiceAccount."""
        return ServiceAccount(self.namespace, f"{self.name}-{component}")

    def may(self, component: str, permission: Permission, *, name: str = "") -> bool:
        """Whether the component has a permission in the test's namespace."""
        group, resource, verb = permission
        resource, _, subresource = resource.partition("/")
        asked = {"namespace": self.namespace, "group": group, "resource": resource, "verb": verb}
        asked |= {key: value for key, value in (("subresource", subresource), ("name", name)) if value}
        return review(self.cluster, self.account(component).subject, asked)


def review(cluster: Cluster, subject: str, asked: dict[str, str]) -> bool:
    """Whether a user has a permission, by a SubjectAccessReview."""
    body = {"apiVersion": "authorization.k8s.io/v1", "kind": "SubjectAccessReview"}
    spec = {"user": subject, "groups": ["system:serviceaccounts"], "resourceAttributes": asked}
    status, answer = cluster.request("POST", REVIEWS, json.dumps({**body, "spec": spec}).encode())
    assert status == 201, answer
    return bool(json.loads(answer)["status"]["allowed"])


@pytest.fixture
def release(control_plane: Cluster, namespace: str) -> Iterator[Release]:
    """The release with the chart's roles and bindings."""
    release = Release(control_plane, namespace)
    text = yaml.safe_dump_all(release.made)
    control_plane.kubectl("apply", "-f", "-", stdin=text)
    wait_for(lambda: release.may("operator", ("", "pods", "create")), "the roles to hold", timeout_s=10)
    yield release
    control_plane.kubectl("delete", "--ignore-not-found", "-f", "-", stdin=text)


@pytest.mark.parametrize("component", ["operator", "autoscaler"])
def test_no_two_rules_grant_the_same_permission(release: Release, component: str) -> None:
    """No permission comes from two rules, or from the permissions of every account."""
    rules = release.rules(component)
    for number, rule in enumerate(rules):
        permissions = sorted(expand_rules([rule]))
        release.set_rules(component, rules[:number] + rules[number + 1 :])
        left = permissions
        wait_for(
            lambda left=left: not any(release.may(component, permission) for permission in left),  # type: ignore[misc]
            f"{rule} to be missed",
            timeout_s=10,
        )
    release.set_rules(component, rules)


@pytest.mark.parametrize("component", ["operator", "autoscaler"])
def test_no_component_has_a_forbidden_permission(release: Release, component: str) -> None:
    assert [permission for permission in FORBIDDEN if release.may(component, permission)] == []


def children(release: Release) -> list[dict[str, Any]]:
    """The children that the operator creates for a service."""
    settings = InstallationSettings(
        image="i", operator=release.account("operator"), autoscaler=release.account("autoscaler")
    )
    meta = {"name": "chat", "namespace": release.namespace, "uid": "u"}
    chat = PDService.model_validate({"metadata": meta, "kind": "PDService", "spec": {"model": "m"}})
    return list(service_children(chat, settings, min_available=2))


def router_role(release: Release) -> str:
    """The Role that the operator creates for a router."""
    (role,) = (child for child in children(release) if child["kind"] == "Role")
    del role["metadata"]["ownerReferences"]
    return json.dumps(role)


def test_the_operator_may_own_children_where_owners_are_protected(
    control_plane: Cluster, namespace: str, release: Release
) -> None:
    """It creates them with an owner, and makes itself the owner of those that a deletion orphaned."""
    as_operator = f"--as={release.account('operator').subject}", f"--namespace={namespace}"
    assignment = {
        "apiVersion": "fulcrum.dev/v1alpha1",
        "kind": "PDAssignment",
        "metadata": {"name": "chat"},
        "spec": {"service": "chat", "roles": {}, "floors": {"prefill": 1, "decode": 1}},
    }
    made = [*children(release), assignment]
    owners, refused = made[0]["metadata"]["ownerReferences"], []
    for child in made:
        child["metadata"]["ownerReferences"] = owners
        control_plane.kubectl("create", *as_operator, "--dry-run=server", "-f", "-", stdin=json.dumps(child))
        del child["metadata"]["ownerReferences"]
        control_plane.kubectl("create", f"--namespace={namespace}", "-f", "-", stdin=json.dumps(child))
        patch = json.dumps({"metadata": {"ownerReferences": owners}})
        where = f"{child['kind'].lower()}/{child['metadata']['name']}"
        try:
            control_plane.kubectl(
                "patch", *as_operator, where, "--dry-run=server", "--type=merge", f"--patch={patch}"
            )
        except RuntimeError as error:
            refused.append(f"{where}: {error}")
    assert refused == []


def make_role(release: Release) -> None:
    """Create a router's Role as the operator; raises RuntimeError with the refusal."""
    subject = release.account("operator").subject
    release.cluster.kubectl(
        "create", f"--as={subject}", "--dry-run=server", "-f", "-", stdin=router_role(release)
    )


def test_the_operator_can_create_a_routers_role(release: Release) -> None:
    make_role(release)


@pytest.mark.parametrize("resource", ["leases", "endpointslices", "pdassignments", "pods"])
def test_the_operator_cannot_grant_a_right_that_it_lacks(release: Release, resource: str) -> None:
    rules = release.rules("operator")
    release.set_rules("operator", [rule for rule in rules if resource not in rule["resources"]])
    held = release.account("operator")

    def is_refused() -> bool:
        try:
            make_role(release)
        except RuntimeError as error:
            return "attempting to grant RBAC permissions not currently held" in str(error)
        return False

    wait_for(is_refused, f"{held.name} to be refused", timeout_s=10)


def test_a_router_can_change_only_its_own_lease_and_endpoints(release: Release) -> None:
    body = json.loads(router_role(release))
    subject = ServiceAccount(release.namespace, "chat-router").subject
    bound = {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "RoleBinding",
        "metadata": {"name": "chat-router", "namespace": release.namespace},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "chat-router"},
        "subjects": [{"kind": "ServiceAccount", "name": "chat-router", "namespace": release.namespace}],
    }
    release.cluster.kubectl("apply", "-f", "-", stdin=f"{json.dumps(body)}\n---\n{json.dumps(bound)}")

    def may(group: str, resource: str, name: str) -> bool:
        asked = {"namespace": release.namespace, "group": group, "resource": resource, "verb": "patch"}
        return review(release.cluster, subject, asked | {"name": name})

    own = "coordination.k8s.io", "leases", "chat-router"
    wait_for(lambda: may(*own), "the router's role to hold", timeout_s=10)
    found = {
        (group, resource, name): may(group, resource, name)
        for group, resource in (own[:2], ("discovery.k8s.io", "endpointslices"))
        for name in ("chat-router", "other-router")
    }
    assert [place for place, allowed in found.items() if allowed] == [
        ("coordination.k8s.io", "leases", "chat-router"),
        ("discovery.k8s.io", "endpointslices", "chat-router"),
    ]
    assert not review(
        release.cluster, subject, {"namespace": release.namespace, "resource": "secrets", "verb": "get"}
    )
