"""Manual edits of applied fields are found in `managedFields`."""

import json
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest

from fulcrum_operator.controller.field_ownership import FIELD_MANAGER, owned_fields, owns_all_fields

WANTED = {
    "apiVersion": "apps/v1",
    "kind": "Deployment",
    "metadata": {
        "name": "chat-router",
        "namespace": "default",
        "labels": {"a/b": "c"},
        "ownerReferences": [{"kind": "PDService", "name": "chat", "uid": "u", "controller": True}],
    },
    "spec": {
        "replicas": 2,
        "containers": [
            {
                "name": "router",
                "args": ["--port", "8000"],
                "ports": [{"containerPort": 8000}, {"containerPort": 9091}],
                "resources": {},
            }
        ],
        "volumes": [{"name": "tmp", "emptyDir": {}}],
        "finalizers": ["x"],
    },
}
FIELDS: dict[str, Any] = {
    "f:metadata": {"f:labels": {"f:a/b": {}}, "f:ownerReferences": {'k:{"uid":"u"}': {}}},
    "f:spec": {
        "f:replicas": {},
        "f:containers": {
            'k:{"name":"router"}': {
                ".": {},
                "f:name": {},
                "f:args": {},
                "f:ports": {
                    f'k:{{"containerPort":{port},"protocol":"TCP"}}': {".": {}, "f:containerPort": {}}
                    for port in (8000, 9091)
                },
                "f:resources": {},
            }
        },
        "f:volumes": {'k:{"name":"tmp"}': {".": {}, "f:name": {}, "f:emptyDir": {}}},
        "f:finalizers": {'v:"x"': {}},
    },
}


def body(fields: Any, **entry: Any) -> dict[str, Any]:
    ours = {"manager": FIELD_MANAGER, "operation": "Apply", "fieldsV1": fields, **entry}
    others = {"manager": "kubectl-edit", "operation": "Update", "fieldsV1": {"f:spec": {"f:paused": {}}}}
    return {"metadata": {"managedFields": [others, ours]}}


def test_an_object_nobody_edited_is_owned_completely() -> None:
    owned = owned_fields(body(FIELDS))
    assert owned is not None
    assert owns_all_fields(owned, WANTED)


def test_without_managed_fields_ownership_is_unknown() -> None:
    assert owned_fields({"metadata": {}}) is None


def test_an_object_made_by_another_manager_is_not_owned() -> None:
    owned = owned_fields(body(FIELDS, operation="Update"))
    assert (owned, owns_all_fields("{}", WANTED)) == ("{}", False)


@pytest.mark.parametrize(
    "remove",
    [
        pytest.param(lambda f: f["f:spec"].pop("f:replicas"), id="a number was changed"),
        pytest.param(lambda f: f["f:metadata"].pop("f:labels"), id="the labels were removed"),
        pytest.param(lambda f: f["f:metadata"].pop("f:ownerReferences"), id="the owner was removed"),
        pytest.param(lambda f: f.pop("f:metadata"), id="all metadata was changed"),
        pytest.param(lambda f: f["f:spec"].pop("f:volumes"), id="a list was removed"),
        pytest.param(
            lambda f: f["f:spec"].update({"f:finalizers": {'v:"y"': {}}}), id="an item of a set was replaced"
        ),
    ],
)
def test_an_edited_field_is_no_longer_owned(remove: Callable[[dict[str, Any]], object]) -> None:
    fields = deepcopy(FIELDS)
    remove(fields)
    assert not owns_all_fields(json.dumps(fields), WANTED)


@pytest.mark.parametrize(
    "part", ["f:args", 'f:ports/k:{"containerPort":9091,"protocol":"TCP"}', "f:ports", "f:name"]
)
def test_an_edited_nested_field_is_no_longer_owned(part: str) -> None:
    fields = deepcopy(FIELDS)
    inside = fields["f:spec"]["f:containers"]['k:{"name":"router"}']
    *path, last = part.split("/", 1)
    for step in path:
        inside = inside[step]
    del inside[last]
    assert not owns_all_fields(json.dumps(fields), WANTED)
