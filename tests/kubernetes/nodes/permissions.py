"""Permissions of a ServiceAccount: granted by roles, and used or refused by the API server's audit log."""

import json
from collections.abc import Iterator
from typing import Any

from tools.kubernetes.cluster import Cluster

Permission = tuple[str, str, str]
"""API group, resource with its subresource, and verb."""

_RBAC = "/apis/rbac.authorization.k8s.io/v1"
_FORBIDDEN, _CREATED = 403, 201
_TERMINATING = "because it is being terminated"
"""Part of the message of a 403 that is due to a deleted namespace and not to missing permissions."""


def expand_rules(rules: list[dict[str, Any]]) -> set[Permission]:
    """Return the permissions in RBAC rules; `resourceNames` are ignored."""
    return {
        (group, resource, verb)
        for rule in rules
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


def list_granted(cluster: Cluster, namespace: str, account: str) -> set[Permission]:
    """Return the permissions that bindings grant to the account, in any namespace."""
    subject = {"kind": "ServiceAccount", "name": account, "namespace": namespace}
    found: set[Permission] = set()
    for kind in ("clusterrolebindings", "rolebindings"):
        for binding in cluster.read(f"{_RBAC}/{kind}")["items"]:
            if subject in binding.get("subjects", []):
                found |= expand_rules(_read_role(cluster, binding).get("rules") or [])
    return found


def _read_role(cluster: Cluster, binding: dict[str, Any]) -> dict[str, Any]:
    reference = binding["roleRef"]
    where = "" if reference["kind"] == "ClusterRole" else f"/namespaces/{binding['metadata']['namespace']}"
    role: dict[str, Any] = cluster.read(f"{_RBAC}{where}/{reference['kind'].lower()}s/{reference['name']}")
    return role


def list_used(cluster: Cluster, namespace: str, account: str) -> set[Permission]:
    """Return the permissions that the account used successfully, even if the object did not exist."""
    return {
        permission
        for permission, _, code in _read_requests(cluster, namespace, account)
        if code != _FORBIDDEN
    }


def list_forbidden(cluster: Cluster, namespace: str, account: str) -> set[Permission]:
    """Return the permissions that the account needed and did not have, in any namespace.

    The last response counts: a starting API server forbids requests until its caches are filled.
    """
    last = {
        (permission, where): code for permission, where, code in _read_requests(cluster, namespace, account)
    }
    return {permission for (permission, _), code in last.items() if code == _FORBIDDEN}


def _read_requests(cluster: Cluster, namespace: str, account: str) -> Iterator[tuple[Permission, str, int]]:
    """Yield permission, namespace and HTTP status of each request of the account."""
    name = f"system:serviceaccount:{namespace}:{account}"
    for line in cluster.audit_log.read_text(encoding="utf-8").splitlines():
        event = _parse_event(line)
        target = event.get("objectRef", {})
        if event.get("user", {}).get("username") != name or "resource" not in target:
            continue
        resource = "/".join(filter(None, (target["resource"], target.get("subresource"))))
        group, where = target.get("apiGroup", ""), target.get("namespace", "")
        status = event.get("responseStatus", {})
        code = status.get("code", 0)
        if code == _FORBIDDEN and _TERMINATING in status.get("message", ""):
            continue
        yield (group, resource, event["verb"]), where, code
        if event["verb"] == "patch" and code == _CREATED:  # an apply that creates needs both permissions
            yield (group, resource, "create"), where, code


def _parse_event(line: str) -> dict[str, Any]:
    try:
        event: dict[str, Any] = json.loads(line)
    except ValueError:  # the last line may be incomplete
        return {}
    return event
