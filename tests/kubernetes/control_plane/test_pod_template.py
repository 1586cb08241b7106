"""Templates are merged as a real API server merges a strategic merge patch of a pod."""

import json
from typing import Any

import pytest

from fulcrum_operator.manifests.pod_template import apply_template
from tools.kubernetes.cluster import Cluster

BASE = {
    "metadata": {"labels": {"app": "chat"}},
    "spec": {
        "nodeSelector": {"kind": "gpu", "zone": "a"},
        "tolerations": [{"key": "gpu", "operator": "Exists"}],
        "imagePullSecrets": [{"name": "ours"}],
        "topologySpreadConstraints": [
            {"topologyKey": "host", "maxSkew": 1, "whenUnsatisfiable": "ScheduleAnyway"}
        ],
        "containers": [
            {
                "name": "engine",
                "image": "localhost/engine:1",
                "command": ["a", "b"],
                "env": [{"name": "A", "value": "1"}, {"name": "B", "value": "2"}],
                "ports": [{"name": "http", "containerPort": 8000, "protocol": "TCP"}],
                "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}],
                "resources": {"limits": {"memory": "1Gi"}},
            }
        ],
        "volumes": [{"name": "tmp", "emptyDir": {}}],
    },
}
ENGINE = {"name": "engine"}
PATCHES: dict[str, dict[str, Any]] = {
    "scheduling": {
        "priorityClassName": "high",
        "runtimeClassName": "nvidia",
        "nodeSelector": {"zone": "b"},
        "tolerations": [{"key": "other"}],
        "topologySpreadConstraints": [
            {"topologyKey": "zone", "maxSkew": 1, "whenUnsatisfiable": "DoNotSchedule"}
        ],
    },
    "a null": {"nodeSelector": None},
    "another constraint for a key": {"topologySpreadConstraints": [{"topologyKey": "host", "maxSkew": 2}]},
    "pull secrets": {"imagePullSecrets": [{"name": "theirs"}]},
    "a map is replaced": {"nodeSelector": {"$patch": "replace", "only": "this"}},
    "a map is deleted": {"nodeSelector": {"$patch": "delete"}},
    "a list is replaced": {"imagePullSecrets": [{"$patch": "replace"}, {"name": "theirs"}]},
    "an item is deleted": {"containers": [{**ENGINE, "env": [{"$patch": "delete", "name": "A"}]}]},
    "variables": {
        "containers": [{**ENGINE, "env": [{"name": "C", "value": "3"}, {"name": "A", "value": "4"}]}]
    },
    "a command": {"containers": [{**ENGINE, "command": ["c"]}]},
    "a list is replaced by other items": {
        "containers": [{**ENGINE, "$patch": "replace"}, {"name": "other", "image": "localhost/engine:2"}]
    },
    "devices": {"containers": [{**ENGINE, "resources": {"limits": {"rdma/hca": "1"}}}]},
    "shared memory": {
        "volumes": [{"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "8Gi"}}],
        "containers": [{**ENGINE, "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}]}],
    },
    "another source of a volume": {
        "volumes": [{"name": "tmp", "hostPath": {"path": "/x"}, "$retainKeys": ["name", "hostPath"]}]
    },
    "init containers and sidecars": {
        "initContainers": [{"name": "download", "image": "localhost/download:1"}],
        "containers": [{"name": "sidecar", "image": "localhost/sidecar:1"}],
    },
    "affinity": {
        "affinity": {
            "nodeAffinity": {
                "requiredDuringSchedulingIgnoredDuringExecution": {
                    "nodeSelectorTerms": [{"matchExpressions": [{"key": "a", "operator": "Exists"}]}]
                }
            }
        }
    },
}


def dry_run(cluster: Cluster, method: str, path: str, body: dict[str, Any], content_type: str) -> Any:
    status, response = cluster.request(
        method, f"{path}?dryRun=All", json.dumps(body).encode(), content_type=content_type
    )
    assert status in (200, 201), response
    return json.loads(response)["template"]


@pytest.mark.parametrize("name", PATCHES)
def test_a_template_is_merged_as_the_api_server_does(
    control_plane: Cluster, namespace: str, name: str
) -> None:
    path = f"/api/v1/namespaces/{namespace}/podtemplates"
    head = {"apiVersion": "v1", "kind": "PodTemplate"}
    status, said = control_plane.request(
        "POST", path, json.dumps({**head, "metadata": {"name": "base"}, "template": BASE}).encode()
    )
    assert status == 201, said
    patch = {"spec": PATCHES[name]}
    theirs = dry_run(
        control_plane, "PATCH", f"{path}/base", {"template": patch}, "application/strategic-merge-patch+json"
    )
    merged = {**head, "metadata": {"name": "merged"}, "template": apply_template(BASE, patch)}
    ours = dry_run(control_plane, "POST", path, merged, "application/json")
    assert without_order(ours) == without_order(theirs)


WITH_MERGE = {
    "in a map": {"nodeSelector": {"$patch": "merge", "zone": "b"}},
    "in an item": {"containers": [{**ENGINE, "$patch": "merge", "command": ["c"]}]},
}
WITHOUT_MERGE = {
    "in a map": {"nodeSelector": {"zone": "b"}},
    "in an item": {"containers": [{**ENGINE, "command": ["c"]}]},
}


@pytest.mark.parametrize("name", WITH_MERGE)
def test_the_directive_merge_changes_nothing_where_the_api_server_refuses_it(
    control_plane: Cluster, namespace: str, name: str
) -> None:
    """Kustomize knows the directive; see decision 0065."""
    path = f"/api/v1/namespaces/{namespace}/podtemplates"
    base = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "base"}, "template": BASE}
    status, said = control_plane.request("POST", path, json.dumps(base).encode())
    assert status == 201, said
    patch = json.dumps({"template": {"spec": WITH_MERGE[name]}}).encode()
    status, _ = control_plane.request(
        "PATCH", f"{path}/base?dryRun=All", patch, content_type="application/strategic-merge-patch+json"
    )
    ours, plain = (apply_template(BASE, {"spec": each[name]}) for each in (WITH_MERGE, WITHOUT_MERGE))
    assert (status >= 400, ours) == (True, plain)


def without_order(value: Any) -> Any:
    """The value with sorted lists of objects."""
    if isinstance(value, dict):
        return {key: without_order(part) for key, part in value.items()}
    if isinstance(value, list):
        return sorted((without_order(item) for item in value), key=json.dumps)
    return value
