"""The permissions that doctor examines are those that the chart, or the operator for routers, grants."""

import re
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import yaml

from fulcrum_cli.doctor.findings import Component
from fulcrum_cli.doctor.permissions import (
    AUTOSCALER_PERMISSIONS,
    OPERATOR_PERMISSIONS,
    AccessReview,
    Permission,
    check_service_account,
    router_permissions,
)
from tests.paths import GOLDEN

ROLE = re.compile(r"^kind: (Cluster)?Role$", re.MULTILINE)


def rules(file: str, kinds: Sequence[str], part: str) -> list[dict[str, Any]]:
    """The rules of all roles of the part in a golden manifest."""
    texts = [
        text
        for text in re.split(r"^---.*$", (GOLDEN / "manifests" / file).read_text(), flags=re.MULTILINE)
        if ROLE.search(text)
    ]
    items = [yaml.safe_load(text) for text in texts]
    found = [item for item in items if item["kind"] in kinds and part in item["metadata"]["name"]]
    return [rule for item in found for rule in item["rules"]]


def granted(rule: dict[str, Any], permission: Permission) -> bool:
    resource = (
        f"{permission.resource}/{permission.subresource}" if permission.subresource else permission.resource
    )
    return (
        permission.group in rule["apiGroups"]
        and resource in rule["resources"]
        and permission.verb in rule["verbs"]
        and (not rule.get("resourceNames") or permission.name in rule["resourceNames"])
    )


def cases() -> Iterator[Any]:
    both = ("ClusterRole", "Role")
    yield pytest.param(OPERATOR_PERMISSIONS, rules("chart-defaults.yaml", both, "operator"), id="operator")
    yield pytest.param(
        AUTOSCALER_PERMISSIONS, rules("chart-defaults.yaml", both, "autoscaler"), id="autoscaler"
    )
    yield pytest.param(router_permissions("chat"), rules("children.yaml", both, "chat-router"), id="router")


@pytest.mark.parametrize(("permissions", "rules"), list(cases()))
def test_every_permission_examined_is_granted_by_the_chart(
    permissions: tuple[Permission, ...], rules: list[dict[str, Any]]
) -> None:
    assert rules
    assert [
        str(permission) for permission in permissions if not any(granted(rule, permission) for rule in rules)
    ] == []


VERBS_NOT_EXAMINED = {"get"}
"""Needed after a conflict only, and always granted together with the other verbs."""
OPTIONAL = {("", "nodes", "list"), ("", "nodes", "watch")}
"""An operator of one namespace works without: it then notices a drain by the eviction alone."""


@pytest.mark.parametrize(("permissions", "rules"), list(cases()))
def test_every_granted_permission_is_examined(
    permissions: tuple[Permission, ...], rules: list[dict[str, Any]]
) -> None:
    examined = {(n.group, f"{n.resource}/{n.subresource}".rstrip("/"), n.verb) for n in permissions}
    all_granted = {
        (group, resource, verb)
        for rule in rules
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }
    not_examined = all_granted - examined - OPTIONAL
    assert {each for each in not_examined if each[2] not in VERBS_NOT_EXAMINED} == set()


def test_many_missing_permissions_are_summarised() -> None:
    found = check_service_account(
        Component.OPERATOR,
        "f/operator",
        [AccessReview(permission, False) for permission in OPERATOR_PERMISSIONS],
    )
    assert len(found.observed) < 400
    assert found.observed.endswith(f"and {len(OPERATOR_PERMISSIONS) - 8} more")
