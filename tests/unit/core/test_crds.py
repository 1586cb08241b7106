"""The CRDs have structural schemas with descriptions, and the defaults and rules of the models."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from pydantic import BaseModel, BeforeValidator, Strict

from fulcrum_core.api import KINDS, PDAssignment, PDInstance, PDService, QoSTier, Resource
from fulcrum_core.api.crds import build_crd, main, render_crd
from fulcrum_core.api.env import KEY_ARGUMENT_MESSAGE, TOKEN_ARGUMENT_MESSAGE, TOKEN_LITERAL_MESSAGE
from fulcrum_core.api.pdservice import FLOORS_TOO_HIGH_MESSAGE, INVALID_NAME_MESSAGE
from fulcrum_core.api.qostier import (
    NO_OUTPUT_LIMIT_MESSAGE,
    NO_RESERVE_MESSAGE,
    NOT_DEGRADED_MESSAGE,
    NOT_QUEUED_MESSAGE,
    TWO_OBJECTIVES_MESSAGE,
)
from fulcrum_core.api.router import NO_CALLER_MESSAGE

JSON_SCHEMA_PROPS = {
    "type", "format", "description", "default", "enum", "nullable",
    "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf",
    "minLength", "maxLength", "pattern",
    "items", "minItems", "maxItems", "uniqueItems",
    "properties", "required", "additionalProperties", "minProperties", "maxProperties",
    "x-kubernetes-list-type", "x-kubernetes-list-map-keys", "x-kubernetes-validations",
    "x-kubernetes-preserve-unknown-fields",
}  # fmt: skip
TYPES: dict[str, type | tuple[type, ...]] = {
    "string": str,
    "integer": int,
    "number": (int, float),
    "boolean": bool,
    "array": list,
    "object": dict,
}

Node = dict[str, Any]

every_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)


def version(kind: type[Resource]) -> Node:
    (only,) = build_crd(kind)["spec"]["versions"]
    assert isinstance(only, dict)
    return only


def schema(kind: type[Resource]) -> Node:
    root = version(kind)["schema"]["openAPIV3Schema"]
    assert isinstance(root, dict)
    return root


def nodes(node: Node, path: str = "") -> Iterator[tuple[str, Node]]:
    """Yield every schema node with its path."""
    yield path, node
    for name, child in node.get("properties", {}).items():
        yield from nodes(child, f"{path}.{name}")
    for key, suffix in (("items", "[*]"), ("additionalProperties", "{*}")):
        if key in node:
            yield from nodes(node[key], path + suffix)


@every_kind
def test_schema_is_structural(kind: type[Resource]) -> None:
    unknown = {path: sorted(node.keys() - JSON_SCHEMA_PROPS) for path, node in nodes(schema(kind))}
    assert {path: keys for path, keys in unknown.items() if keys} == {}
    assert [path for path, node in nodes(schema(kind)) if node.get("type") not in TYPES] == []


@every_kind
def test_no_node_has_properties_and_additional_properties(kind: type[Resource]) -> None:
    mixed = [
        path for path, node in nodes(schema(kind)) if {"properties", "additionalProperties"} <= node.keys()
    ]
    assert mixed == []


@every_kind
def test_default_has_the_type_of_its_field(kind: type[Resource]) -> None:
    wrong = {
        path: node["default"]
        for path, node in nodes(schema(kind))
        if "default" in node and not isinstance(node["default"], TYPES[node["type"]])
    }
    assert wrong == {}


@every_kind
def test_default_matches_its_pattern_and_enum(kind: type[Resource]) -> None:
    for path, node in nodes(schema(kind)):
        if "default" in node and "pattern" in node:
            assert re.search(node["pattern"], node["default"]), path
        if "default" in node and "enum" in node:
            assert node["default"] in node["enum"], path


@pytest.mark.parametrize(
    ("kind", "spec"),
    [
        (PDService, {"model": "m"}),
        (PDService, {"model": "m", "pools": [{"name": "a", "instances": {"min": 1}}]}),
        (QoSTier, {}),
        (QoSTier, {"slo": {}}),
        (PDAssignment, {"service": "chat"}),
    ],
)
def test_schema_defaults_equal_model_defaults(kind: type[Resource], spec: dict[str, Any]) -> None:
    filled = defaulted(schema(kind)["properties"]["spec"], spec)
    stored = kind.model_validate({"kind": kind.__name__, "metadata": {"name": "x"}, "spec": spec})
    assert stored.dump()["spec"] == filled


@every_kind
def test_every_field_is_described(kind: type[Resource]) -> None:
    named = (path for path, _ in nodes(schema(kind)) if not path.endswith(("[*]", "{*}")))
    described = {path for path, node in nodes(schema(kind)) if node.get("description")}
    api_server_fields = {".apiVersion", ".kind", ".metadata"}
    assert [path for path in named if path not in described | api_server_fields] == []


@every_kind
def test_list_map_requires_its_keys(kind: type[Resource]) -> None:
    for path, node in nodes(schema(kind)):
        for key in node.get("x-kubernetes-list-map-keys", ()):
            assert node["x-kubernetes-list-type"] == "map"
            assert key in node["items"]["required"], path


@every_kind
def test_every_cel_rule_has_a_message(kind: type[Resource]) -> None:
    rules = [rule for _, node in nodes(schema(kind)) for rule in node.get("x-kubernetes-validations", ())]
    assert [rule for rule in rules if not rule["message"] or "self" not in rule["rule"]] == []


@every_kind
def test_printer_columns_show_existing_fields(kind: type[Resource]) -> None:
    known = {path for path, _ in nodes(schema(kind))} | {".metadata.creationTimestamp"}
    columns = (column["jsonPath"] for column in version(kind)["additionalPrinterColumns"])
    shown = {re.sub(r"\[\?\(@\.type==.*\)\]", "[*]", path.replace("[*]", "{*}")) for path in columns}
    assert shown - known == set()


def test_details_of_an_instance_are_wide_columns() -> None:
    columns = version(PDInstance)["additionalPrinterColumns"]
    wide = [column["name"] for column in columns if column.get("priority")]
    assert wide == ["Service", "Revision", "Endpoint", "Message"]


@every_kind
def test_age_is_the_last_column(kind: type[Resource]) -> None:
    assert version(kind)["additionalPrinterColumns"][-1] == {
        "name": "Age",
        "type": "date",
        "jsonPath": ".metadata.creationTimestamp",
    }


@every_kind
def test_crd_names_match_the_kind(kind: type[Resource]) -> None:
    manifest = build_crd(kind)
    assert manifest["metadata"]["name"] == f"{kind.plural}.fulcrum.dev"
    assert manifest["spec"]["scope"] == "Namespaced"
    assert manifest["spec"]["names"]["shortNames"] == [kind.short_name]


@every_kind
def test_kind_with_a_status_has_the_status_subresource(kind: type[Resource]) -> None:
    assert ("status" in schema(kind)["properties"]) == ("status" in version(kind).get("subresources", {}))


@every_kind
def test_crd_is_below_60_kb(kind: type[Resource]) -> None:
    assert len(render_crd(kind).encode()) < 60_000


@every_kind
def test_rendered_yaml_equals_the_built_crd(kind: type[Resource]) -> None:
    assert yaml.safe_load(render_crd(kind)) == build_crd(kind)


@pytest.mark.parametrize("arguments", [(), ("--help",), ("one", "two")])
def test_arguments_other_than_one_folder_write_nothing(
    arguments: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main([*arguments])
    assert (ended.value.code, list(tmp_path.iterdir())) == (2, [])
    assert capsys.readouterr().err == "usage: python -m fulcrum_core.api.crds DIR\n"


def test_rules_between_fields_are_in_the_schema() -> None:
    rules = {
        f"{kind.__name__}{path}": [rule["message"] for rule in node["x-kubernetes-validations"]]
        for kind in KINDS
        for path, node in nodes(schema(kind))
        if node["type"] == "object" and "x-kubernetes-validations" in node
    }
    buffer = (
        "has a bufferSize, which only the connector LMCache has: NIXL reads the engine's KV cache directly"
    )
    starts = ("PDService.spec", "PDPool.spec", "PDPool.status.lastGood", "PDInstance.spec")
    assert rules == {
        "PDService": [INVALID_NAME_MESSAGE],
        "PDService.spec": [
            "has both instances and pools: write one of them",
            FLOORS_TOO_HIGH_MESSAGE,
            FLOORS_TOO_HIGH_MESSAGE,
            "has kvCache, which needs kvTransfer.connector NIXLWithLMCache or LMCache: NIXL keeps no tiers",
        ],
        "PDService.spec.engine": [TOKEN_LITERAL_MESSAGE, TOKEN_ARGUMENT_MESSAGE, KEY_ARGUMENT_MESSAGE],
        **{f"{start}.engine.env[*]": ["has both value and valueFrom: write one of them"] for start in starts},
        **{
            f"{start}.engine.env[*].valueFrom": [
                "needs exactly one of secretKeyRef, configMapKeyRef and fieldRef"
            ]
            for start in starts
        },
        **{
            f"{start}.modelSource": [
                "has more than one of pvc, hostPath, image and downloads: write one of them"
            ]
            for start in starts
        },
        **{f"{start}.modelSource.downloads": ["needs either pvc or hostPath"] for start in starts},
        **{f"{start}.kvTransfer": [buffer] for start in starts},
        "PDService.spec.pools[*].instances": ["min is greater than max"],
        "PDService.spec.autoscaling.arrow": ["shrink is greater than expand"],
        "PDService.spec.router.auth": [NO_CALLER_MESSAGE],
        "PDService.spec.rollout": ["has maxSurge and maxUnavailable 0: nothing could be replaced"],
        "PDPool.spec.instances": ["min is greater than max"],
        "QoSTier.spec": [NO_RESERVE_MESSAGE, TWO_OBJECTIVES_MESSAGE],
        "QoSTier.spec.admission": [NO_OUTPUT_LIMIT_MESSAGE, NOT_DEGRADED_MESSAGE, NOT_QUEUED_MESSAGE],
    }


def test_metadata_has_no_description_which_api_servers_refuse() -> None:
    properties = schema(PDService)["properties"]
    assert properties["metadata"] == {"type": "object"}
    assert all(properties[name]["description"] for name in ("apiVersion", "kind"))


def test_duration_bounds_become_cel_rules_with_messages() -> None:
    arrow = dict(nodes(schema(PDService)))[".spec.autoscaling.arrow.interval"]
    assert arrow["x-kubernetes-validations"] == [
        {"rule": "duration(self) > duration('0s')", "message": "is not greater than 0s"},
        {"rule": "duration(self) <= duration('1m')", "message": "is greater than 1m"},
    ]


def defaulted(node: Node, value: Any) -> Any:
    """Return `value` with structural defaults as an API server sets them, parents before children."""
    if isinstance(value, list):
        return [defaulted(node["items"], item) for item in value]
    if not isinstance(value, dict):
        return value
    out = dict(value)
    for name, child in node.get("properties", {}).items():
        if name not in out and "default" in child:
            out[name] = child["default"]
        if name in out:
            out[name] = defaulted(child, out[name])
    return out


def _list_loose_fields(model: type[BaseModel]) -> Iterator[str]:
    """Fields of the model and of those below it that take "yes" for a boolean, or true for a number."""
    for name, field in model.model_fields.items():
        parts = (field.annotation, *get_args(field.annotation))
        strict = any(isinstance(each, Strict) for each in field.metadata)
        strict |= any(isinstance(each, Strict) for part in parts for each in get_args(part))
        strict |= any(isinstance(each, BeforeValidator) for each in field.metadata)  # a Duration
        if not strict and {bool, float} & set(parts):
            yield f"{model.__name__}.{name}"
        for part in parts:
            if isinstance(part, type) and issubclass(part, BaseModel) and part is not model:
                yield from _list_loose_fields(part)


@every_kind
def test_booleans_and_numbers_of_a_spec_are_as_strict_as_the_api_servers(kind: type[Resource]) -> None:
    spec = kind.model_fields["spec"].annotation
    assert isinstance(spec, type)
    assert list(_list_loose_fields(spec)) == []
