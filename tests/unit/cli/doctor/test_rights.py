"""Doctor asks for what the chart, or the operator for its routers, grants: nothing else, nothing left out."""

import re
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import yaml

from fulcrum_cli.doctor.rights import AUTOSCALER, OPERATOR, Answer, Need, check_account, router_needs
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


def granted(rule: dict[str, Any], need: Need) -> bool:
    resource = f"{need.resource}/{need.subresource}" if need.subresource else need.resource
    return (
        need.group in rule["apiGroups"]
        and resource in rule["resources"]
        and need.verb in rule["verbs"]
        and (not rule.get("resourceNames") or need.name in rule["resourceNames"])
    )


def cases() -> Iterator[Any]:
    both = ("ClusterRole", "Role")
    yield pytest.param(OPERATOR, rules("chart-defaults.yaml", both, "operator"), id="operator")
    yield pytest.param(AUTOSCALER, rules("chart-defaults.yaml", both, "autoscaler"), id="autoscaler")
    yield pytest.param(router_needs("chat"), rules("children.yaml", both, "chat-router"), id="router")


@pytest.mark.parametrize(("needs", "rules"), list(cases()))
def test_what_a_part_is_asked_for_it_was_granted(
    needs: tuple[Need, ...], rules: list[dict[str, Any]]
) -> None:
    assert rules
    assert [str(need) for need in needs if not any(granted(rule, need) for rule in rules)] == []


CATCHES_UP = {"get"}
"""Rights that the operator needs after a conflict only; whoever has the others has them, too."""


@pytest.mark.parametrize(("needs", "rules"), list(cases()))
def test_no_right_that_was_granted_goes_unasked(needs: tuple[Need, ...], rules: list[dict[str, Any]]) -> None:
    asked = {(n.group, f"{n.resource}/{n.subresource}".rstrip("/"), n.verb) for n in needs}
    all_granted = {
        (group, resource, verb)
        for rule in rules
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }
    assert {right for right in all_granted - asked if right[2] not in CATCHES_UP} == set()


def test_an_account_that_was_bound_to_nothing_is_told_of_in_one_line() -> None:
    found = check_account("operator", "f/operator", [Answer(need, False) for need in OPERATOR])
    assert len(found.seen) < 400
    assert found.seen.endswith(f"and {len(OPERATOR) - 8} more")
