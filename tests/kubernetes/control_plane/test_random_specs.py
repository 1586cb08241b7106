"""Random valid services are applied, changed and deleted: every error is a condition, and nothing is left.

Hypothesis makes the specs from the schema of the CRD. Each service has a namespace of its own.
"""

import json
import re
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import seed as with_seed
from pydantic import ValidationError

from fulcrum_core import errors
from fulcrum_core.api import PDService
from tests.kubernetes.clusters import temporary_namespace
from tests.kubernetes.control_plane.near_valid_documents import documents
from tests.kubernetes.control_plane.operator_process import NamespaceClient, OperatorProcess, wait_until
from tools.kubernetes.cluster import Cluster

INSTANCES_MAX = 6
"""Most instances of one service: the claim is about specs, not about numbers."""
KINDS = (
    *("pods", "pdpools", "pdinstances", "pdassignments", "apps/v1/deployments", "services"),
    *("discovery.k8s.io/v1/endpointslices", "coordination.k8s.io/v1/leases"),
    *("policy/v1/poddisruptionbudgets", "networking.k8s.io/v1/networkpolicies"),
    *("rbac.authorization.k8s.io/v1/roles", "rbac.authorization.k8s.io/v1/rolebindings"),
)
_FAILED = re.compile(r"reconcile failed.*?error=['\"]*(\w+)\(")
_OURS = {name for name, kind in vars(errors).items() if isinstance(kind, type)}

Spec = dict[str, Any]


def valid_specs(count: int, seed: int) -> list[Spec]:
    """This many random specs that the model accepts, with few instances each."""
    found: list[Spec] = []

    @with_seed(seed)
    @settings(
        max_examples=4 * count,
        database=None,
        phases=(Phase.generate,),
        suppress_health_check=list(HealthCheck),
    )
    @given(documents(PDService))
    def collect(document: Spec) -> None:
        assume(len(found) < count and document["spec"] not in found)
        try:
            pools = PDService.model_validate(document).spec.resolve_pools()
        except ValidationError:
            assume(False)
        assume(sum(pool.instances.effective_max for pool in pools) <= INSTANCES_MAX)
        found.append(document["spec"])

    collect()
    return found


@dataclass(frozen=True)
class RandomService:
    """A service in a namespace of its own, the spec that it gets first and the one after it."""

    api: NamespaceClient
    first: Spec
    second: Spec

    def create(self) -> bool:
        """Create it; whether the API server accepts the first spec."""
        head = {"apiVersion": "fulcrum.dev/v1alpha1", "kind": "PDService", "metadata": {"name": "chat"}}
        body = json.dumps({**head, "spec": self.first}).encode()
        status, answer = self.api.cluster.request("POST", self.api.path("pdservices"), body)
        assert status in (201, 422), answer
        return status == 201

    def change(self) -> bool:
        """Replace the spec; whether the API server allows the change."""
        stored = self.api.get("pdservices", "chat")
        body = json.dumps({**stored, "spec": self.second}).encode()
        path = self.api.path("pdservices", "chat")
        status, answer = self.api.cluster.request("PUT", path, body)
        assert status in (200, 409, 422), answer
        return status == 200

    def is_reconciled(self) -> bool:
        """Whether the status is of the current spec."""
        stored = self.api.get("pdservices", "chat")
        return bool(stored.get("status", {}).get("observedGeneration") == stored["metadata"]["generation"])

    def internal_error(self) -> str:
        """The message of Degraded if it is an error that the operator does not know; else empty."""
        found = self.api.condition("Degraded")["message"]
        return f"{self.first} -> {self.second}: {found}" if "internal error" in found else ""

    def is_gone(self) -> bool:
        """Whether nothing is left of the service."""
        return not any(
            True
            for kind in KINDS
            for item in self.api.list(kind)
            if any(owner["kind"].startswith("PD") for owner in item["metadata"].get("ownerReferences", ()))
        )


@pytest.fixture
def services(
    control_plane: Cluster, operator: OperatorProcess, request: pytest.FixtureRequest, seed: int
) -> Iterator[list[RandomService]]:
    assert operator.process.poll() is None
    specs = valid_specs(request.config.option.specs, seed)
    with ExitStack() as namespaces:
        names = [namespaces.enter_context(temporary_namespace(control_plane)) for _ in specs]
        pairs = zip(names, specs, [*specs[1:], specs[0]], strict=True)
        yield [RandomService(NamespaceClient(control_plane, name), one, two) for name, one, two in pairs]


@pytest.mark.timeout(600)
def test_random_services_fail_only_by_conditions_and_leave_nothing(
    services: list[RandomService], operator: OperatorProcess
) -> None:
    drawn = len(services)
    services = [service for service in services if service.create()]
    assert len(services) > drawn / 2
    for service in services:
        wait_until(service.is_reconciled, f"the status of {service.first}", timeout_s=60)
    found = [service.internal_error() for service in services]
    changed = sum(service.change() for service in services)
    for service in services:
        wait_until(service.is_reconciled, f"the status of {service.second}", timeout_s=60)
    found += [service.internal_error() for service in services]
    for service in services:
        service.api.delete("pdservices", "chat")
    for service in services:
        wait_until(service.is_gone, "everything to be deleted", timeout_s=60)
    failed = {name for name in _FAILED.findall(operator.log.read_text()) if name not in _OURS}
    assert ([message for message in found if message], failed) == ([], set())
    assert changed > len(services) / 2
