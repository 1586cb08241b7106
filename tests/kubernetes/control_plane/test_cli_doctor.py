"""`fulcrum doctor` on a real API server: no finding in a healthy cluster, one for each fault."""

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
import yaml

from fulcrum_core.api.meta import format_time
from tests.kubernetes.clusters import CRDS
from tests.kubernetes.control_plane.cli_service import CommandLine, Service, create_objects
from tools.kubernetes.cluster import Cluster
from tools.kubernetes.waiting import wait_for

ROLES = {"chat-0": "Prefill", "chat-1": "Decode"}
RBAC = "rbac.authorization.k8s.io"
PART_OF_LABELS = {"app.kubernetes.io/part-of": "fulcrum"}
ROUTER_OBJECT_LABELS = {
    **PART_OF_LABELS,
    "app.kubernetes.io/name": "fulcrum-router",
    "fulcrum.dev/service": "chat",
}
"""Labels of what the operator creates for the router of `chat`."""


@pytest.fixture
def fulcrum(control_plane: Cluster, namespace: str, tmp_path: Path) -> CommandLine:
    return CommandLine(control_plane.kubeconfig, tmp_path, namespace)


@pytest.fixture
def chat(control_plane: Cluster, namespace: str) -> Service:
    """Create a service with its cluster objects, as if operator, autoscaler and router ran."""
    service = Service(control_plane, namespace, roles=ROLES)
    ready = {"type": "Ready", "status": "True", "reason": "InstancesServing", "message": "2 of 2 serve"}
    service.set_status(conditions=[ready], ready="2/2", observedGeneration=1)
    parts = ("fulcrum-operator", "fulcrum-autoscaler", "chat-router")
    create_objects(control_plane, namespace, [
        *(deployment(name) for name in parts),
        *({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": name}} for name in parts),
        role("everything", {"apiGroups": ["*"], "resources": ["*"], "verbs": ["*"]}),
        *(binding(name) for name in parts),
        lease("fulcrum-operator"), lease("chat-router", ROUTER_OBJECT_LABELS),
        endpoint_slice("10.88.0.9"),
    ])  # fmt: skip
    for name in parts:
        make_ready(control_plane, namespace, name)
    return service


def labels_of(name: str) -> dict[str, str]:
    part = name.rpartition("-")[2]
    of_router = {"fulcrum.dev/router": "chat"} if part == "router" else {"app.kubernetes.io/component": part}
    return {**PART_OF_LABELS, **of_router}


def deployment(name: str) -> dict[str, Any]:
    labels = labels_of(name)
    pod = {
        "serviceAccountName": name,
        "schedulerName": "none",  # a pod on a node that is unknown would be deleted after a minute
        "containers": [{"name": "c", "image": "localhost/fulcrum:1"}],
    }
    spec = {
        "replicas": 1,
        "selector": {"matchLabels": labels},
        "template": {"metadata": {"labels": labels}, "spec": pod},
    }
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {
            "name": name,
            "labels": ROUTER_OBJECT_LABELS if name == "chat-router" else labels,
        },
        "spec": spec,
    }


def role(name: str, *rules: dict[str, Any]) -> dict[str, Any]:
    return {"apiVersion": f"{RBAC}/v1", "kind": "Role", "metadata": {"name": name}, "rules": list(rules)}


def binding(account: str, *, role: str = "everything") -> dict[str, Any]:
    return {
        "apiVersion": f"{RBAC}/v1",
        "kind": "RoleBinding",
        "metadata": {"name": account},
        "roleRef": {"apiGroup": RBAC, "kind": "Role", "name": role},
        "subjects": [{"kind": "ServiceAccount", "name": account}],
    }


def lease(name: str, labels: Mapping[str, str] = PART_OF_LABELS, *, age_s: float = 0.0) -> dict[str, Any]:
    renewed = format_time(time.time() - age_s)
    spec = {"holderIdentity": f"{name}-x", "leaseDurationSeconds": 600, "renewTime": renewed}
    metadata = {"name": name, "labels": labels}
    return {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": metadata, "spec": spec}


def endpoint_slice(*addresses: str) -> dict[str, Any]:
    endpoints = [{"addresses": [address], "conditions": {"ready": True}} for address in addresses]
    return {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "addressType": "IPv4",
        "metadata": {
            "name": "chat-router",
            "labels": {**ROUTER_OBJECT_LABELS, "kubernetes.io/service-name": "chat"},
        },
        "endpoints": endpoints,
        "ports": [{"name": "http", "port": 8000}],
    }


def make_ready(cluster: Cluster, namespace: str, name: str) -> None:
    """Write the status of the Deployment's pod that a kubelet would write."""
    selector = quote(",".join(f"{key}={value}" for key, value in labels_of(name).items()))
    pods = f"/api/v1/namespaces/{namespace}/pods?labelSelector={selector}"
    wait_for(lambda: bool(cluster.read(pods)["items"]), f"the pod of {name}", timeout_s=20)
    pod = cluster.read(pods)["items"][0]["metadata"]["name"]
    conditions = [{"type": kind, "status": "True"} for kind in ("PodScheduled", "Ready", "ContainersReady")]
    status = {
        "phase": "Running",
        "podIP": "10.88.0.9",
        "podIPs": [{"ip": "10.88.0.9"}],
        "conditions": conditions,
    }
    where = ("-n", namespace, "patch", "pod", pod, "--subresource=status", "--type=merge", "-p")
    cluster.kubectl(*where, json.dumps({"status": status}))
    path = f"/apis/apps/v1/namespaces/{namespace}/deployments/{name}"
    wait_for(
        lambda: cluster.read(path)["status"].get("readyReplicas") == 1, f"{name} to be ready", timeout_s=20
    )


def findings_not_ok(fulcrum: CommandLine) -> dict[str, tuple[str, str]]:
    """Return severity and observation of the findings that are not ok, by check."""
    done = fulcrum("doctor", "-o", "json")
    assert done.stderr == ""
    report = json.loads(done.stdout)
    found = {
        check["check"]: (check["severity"], check["observed"])
        for check in report["checks"]
        if check["severity"] != "ok"
    }
    problems = [name for name, (severity, _) in found.items() if severity == "problem"]
    assert done.returncode == (1 if problems else 0)
    assert all(check["advice"] for check in report["checks"] if check["severity"] != "ok")
    return found


def consequences(fulcrum: CommandLine) -> set[str]:
    """Return the titles of all consequences."""
    checks = json.loads(fulcrum("doctor", "-o", "json").stdout)["checks"]
    return {title for check in checks for title in check.get("consequences", ())}


def test_a_healthy_cluster_has_no_finding_and_every_fault_has_one(
    control_plane: Cluster, fulcrum: CommandLine, chat: Service
) -> None:
    namespace = fulcrum.namespace
    assert findings_not_ok(fulcrum) == {}

    chat.set_instance_status("chat-1", role="Decode", phase="Failed", message="its engine ended: exit code 1")
    assert findings_not_ok(fulcrum) == {"instances": ("problem", "chat-1: its engine ended: exit code 1")}
    assert consequences(fulcrum) == {"chat: floors"}
    other = {"model": "m", "engine": "sim:2", "kvDtype": "float16", "blockSize": 16, "tensorParallel": 1}
    chat.set_instance_status("chat-1", role="Decode", identity=other, message="")
    assert findings_not_ok(fulcrum)["pairs"][0] == "problem"
    assert "engine differs: prefill has sim:1, decode has sim:2" in findings_not_ok(fulcrum)["pairs"][1]
    chat.set_instance_status("chat-1", role="Decode", message="")

    control_plane.kubectl("-n", namespace, "delete", "rolebinding", "chat-router")
    create_objects(control_plane, namespace, [endpoint_slice(), lease("fulcrum-operator", age_s=700)])
    found = findings_not_ok(fulcrum)
    assert sorted(found) == ["endpoints", "leader", "router's permissions"]
    assert found["endpoints"][1] == "EndpointSlice chat-router is empty: the Service chat has no endpoint"
    assert found["router's permissions"][1].startswith(
        f"ServiceAccount {namespace}/chat-router has no permission to list pdservices"
    )
    assert "expired after 10m" in found["leader"][1]


def test_an_unschedulable_pod_is_reported_with_the_schedulers_message(
    control_plane: Cluster, fulcrum: CommandLine, chat: Service
) -> None:
    assert chat
    labels = {**PART_OF_LABELS, "fulcrum.dev/service": "chat"}
    containers = [{"name": "engine", "image": "x", "resources": {"requests": {"cpu": "2"}}}]
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "chat-0", "labels": labels}}
    create_objects(control_plane, fulcrum.namespace, [{**pod, "spec": {"containers": containers}}])
    path = f"/api/v1/namespaces/{fulcrum.namespace}/pods/chat-0"
    wait_for(
        lambda: "conditions" in control_plane.read(path)["status"], "the scheduler's message", timeout_s=20
    )
    assert findings_not_ok(fulcrum) == {
        "nodes": ("problem", "no node fits chat-0: no nodes available to schedule pods")
    }


def test_a_cluster_without_operator_lists_what_is_missing(
    fulcrum: CommandLine, control_plane: Cluster
) -> None:
    create_objects(control_plane, fulcrum.namespace, [
        {"apiVersion": "fulcrum.dev/v1alpha1", "kind": "PDService", "metadata": {"name": "chat"},
         "spec": {"model": "m", "qosTiers": ["gold"]}},
    ])  # fmt: skip
    # Another test's namespace may still be ending, with its operator.
    wait_for(lambda: "operator" in findings_not_ok(fulcrum), "no operator to be found", timeout_s=30)
    found = findings_not_ok(fulcrum)
    assert found["tiers"] == ("problem", "QoSTier not found: gold")
    report = consequences(fulcrum) | {f"chat: {name}" for name in found}
    assert report >= {"chat: instances", "chat: status", "chat: endpoints"}


def test_with_few_permissions_doctor_warns_about_what_it_could_not_read(
    control_plane: Cluster, namespace: str, tmp_path: Path
) -> None:
    create_objects(control_plane, namespace, [
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "guest"}},
        role("look", {"apiGroups": ["fulcrum.dev"], "resources": ["*"], "verbs": ["list"]}),
        binding("guest", role="look"),
    ])  # fmt: skip
    token = control_plane.kubectl("-n", namespace, "create", "token", "guest").strip()
    document = json.loads(Path(control_plane.kubeconfig).read_text())
    document["users"][0]["user"] = {"token": token}
    file = tmp_path / "config"
    file.write_text(json.dumps(document))
    guest = CommandLine(file, tmp_path, namespace)
    found = findings_not_ok(guest)
    assert {name: severity for name, (severity, _) in found.items()} == {
        "CRDs": "warning", "your permissions": "warning", "operator": "warning", "autoscaler": "warning",
    }  # fmt: skip
    assert found["your permissions"][1] == (
        f"in namespace {namespace} you have no permission to "
        "patch pdassignments.fulcrum.dev, get services/proxy"
    )
    assert guest("status").stdout.startswith("no PDService\n")
    refused = guest("flip", "chat-0", "--to", "decode")
    assert (refused.returncode, refused.stdout) == (2, "")


def test_missing_and_outdated_crds_are_reported(bare_cluster: Cluster, tmp_path: Path) -> None:
    fulcrum = CommandLine(bare_cluster.kubeconfig, tmp_path, "default")
    status = fulcrum("status")
    assert (status.returncode, status.stdout) == (2, "")
    assert "has no Fulcrum: the CustomResourceDefinition pdservices.fulcrum.dev is missing" in status.stderr
    assert findings_not_ok(fulcrum)["CRDs"] == (
        "problem",
        "missing: pdassignments.fulcrum.dev, pdinstances.fulcrum.dev, pdpools.fulcrum.dev, "
        "pdservices.fulcrum.dev, qostiers.fulcrum.dev",
    )
    bodies = [yaml.safe_load(path.read_text()) for path in sorted(CRDS.glob("*.yaml"))]
    services = next(body for body in bodies if body["metadata"]["name"] == "pdservices.fulcrum.dev")
    del services["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"][
        "drain"
    ]
    create_objects(bare_cluster, "default", bodies)
    bare_cluster.kubectl("wait", "--for=condition=Established", "--timeout=30s", "-f", str(CRDS))
    assert findings_not_ok(fulcrum)["CRDs"] == (
        "problem",
        "older than this program: pdservices.fulcrum.dev has no spec.drain",
    )
    bare_cluster.kubectl("apply", "--server-side", "--force-conflicts", "-f", str(CRDS))
    assert "CRDs" not in findings_not_ok(fulcrum)
