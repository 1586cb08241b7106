"""The documentation names what the code has, and each command in it is run by a test or says why not."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.documented_commands import EXECUTED_PAGES, list_command_blocks
from tests.paths import ROOT
from tools.reference.conditions import list_reasons
from tools.reference.metrics import list_families

DOCS = ROOT / "docs"
REASONS = list_reasons()


def list_sections(page: Path) -> list[str]:
    return re.findall(r"^## (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)


@pytest.mark.parametrize("condition", REASONS)
def test_each_reason_of_a_condition_has_a_section_in_its_runbook(condition: str) -> None:
    sections = list_sections(DOCS / "runbooks" / f"{condition}.md")
    assert sorted(sections) == sorted(reason.value for reason in REASONS[condition])


@pytest.mark.parametrize("condition", REASONS)
def test_each_reason_of_a_condition_says_what_it_means(condition: str) -> None:
    assert [reason.value for reason in REASONS[condition] if not reason.meaning] == []


def test_each_alert_has_a_section_in_the_runbook_of_alerts() -> None:
    rules = yaml.safe_load((ROOT / "helm/fulcrum/rules/fulcrum.yaml").read_text(encoding="utf-8"))
    alerts = [rule for group in rules["groups"] for rule in group["rules"] if "alert" in rule]
    assert [alert["annotations"]["runbook_url"] for alert in alerts] == [
        f"docs/runbooks/Alerts.md#{section.lower()}" for section in list_sections(DOCS / "runbooks/Alerts.md")
    ]


def test_each_alert_says_a_command_or_a_query_that_shows_the_cause() -> None:
    text = (DOCS / "runbooks/Alerts.md").read_text(encoding="utf-8")
    sections = dict(section.split("\n", 1) for section in text.split("\n## ")[1:])
    shown = r"^    \S|`kubectl \S+ "  # a line of code, or a command inside a sentence
    assert [name for name, body in sections.items() if not re.search(shown, body, re.MULTILINE)] == []


def test_rules_name_families_that_exist() -> None:
    rules = (ROOT / "helm/fulcrum/rules/fulcrum.yaml").read_text(encoding="utf-8")
    named = set(re.findall(r"fulcrum_(?:router|operator|autoscaler)_\w+", rules))
    assert sorted(named - {family.name for found in list_families().values() for family in found}) == []


def has_field(schema: Mapping[str, Any], path: Sequence[str]) -> bool:
    """Whether an OpenAPI schema has a field of this path; a free mapping or object has any."""
    for name in path:
        schema = schema.get("items", schema)
        if schema.get("additionalProperties") or schema.get("x-kubernetes-preserve-unknown-fields"):
            return True
        schema = schema.get("properties", {}).get(name)
        if schema is None:
            return False
    return True


def test_pages_name_fields_that_the_crds_have() -> None:
    bodies = [yaml.safe_load(path.read_text(encoding="utf-8")) for path in (ROOT / "crds").glob("*.yaml")]
    schemas = [body["spec"]["versions"][0]["schema"]["openAPIV3Schema"] for body in bodies]
    pages = [page for page in DOCS.rglob("*.md") if page.parent.name not in {"decisions", "reference"}]
    named = {
        path
        for page in pages
        for path in re.findall(r"`((?:spec|status)(?:\.\w+)+)", page.read_text("utf-8"))
    }
    assert named
    unknown = [path for path in named if not any(has_field(schema, path.split(".")) for schema in schemas)]
    assert sorted(unknown) == []


def test_operator_writes_no_event_with_a_reason_that_is_not_listed() -> None:
    source = (ROOT / "operator/fulcrum_operator/controller/events.py").read_text(encoding="utf-8")
    assert re.findall(r"""["'][A-Z][a-z]+[A-Z]\w*["']""", source) == []


def test_each_page_with_command_blocks_is_executed() -> None:
    pages = [path for path in sorted(DOCS.rglob("*.md")) if "```sh" in path.read_text(encoding="utf-8")]
    executable = (page for page in pages if any(b.note is None for b in list_command_blocks(page)))
    assert [str(page.relative_to(DOCS)) for page in executable] == sorted(EXECUTED_PAGES)


def test_each_command_block_that_is_not_executed_says_why() -> None:
    blocks = [block for page in EXECUTED_PAGES for block in list_command_blocks(DOCS / page)]
    assert [block.commands for block in blocks if block.note is not None and len(block.note) < 10] == []
