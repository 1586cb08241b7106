"""Manifests of an instance's pod and of a service's objects: golden files, and rules for all of them."""

import json
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from fulcrum_core.api import PDInstance, PDService
from fulcrum_core.api.labels import ROLE_LABEL
from fulcrum_core.errors import InvalidInput
from fulcrum_operator.manifests.children import service_children
from fulcrum_operator.manifests.engine_pod import PRE_STOP_S, TEARDOWN_S, engine_pod
from fulcrum_operator.manifests.model_reader_pod import model_reader_pod
from fulcrum_operator.manifests.pod_template import apply_template
from fulcrum_operator.plan.model import ModelReadRequest, model_key
from tests.unit.operator.builders import SETTINGS, service

PLAIN: dict[str, Any] = {"engine": {"type": "Simulated"}}
CUSTOMIZED: dict[str, Any] = {
    "revision": "0a1b2c3d4e",
    "role": "Decode",
    "engine": {
        "type": "Simulated",
        "image": "registry.example/engine@sha256:0123",
        "args": ["--seed", "7"],
        "env": [{"name": "UCX_TLS", "value": "tcp"}],
    },
    "hardware": {"resource": "nvidia.com/gpu", "count": 4},
    "template": {
        "metadata": {"labels": {"team": "chat"}, "annotations": {"example.com/note": "kept"}},
        "spec": {
            "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
            "containers": [
                {
                    "name": "engine",
                    "resources": {"limits": {"memory": "64Gi"}},
                    "volumeMounts": [{"name": "models", "mountPath": "/models", "readOnly": True}],
                },
                {"name": "sidecar", "image": "localhost/busybox:1"},
            ],
            "volumes": [{"name": "models", "persistentVolumeClaim": {"claimName": "models"}}],
        },
    },
}


def instance(**spec: Any) -> PDInstance:
    """Instance chat-0 of the only pool of service chat."""
    made = {"service": "chat", "pool": "chat-flex", "model": "m", **spec}
    return PDInstance.model_validate({"metadata": {"name": "chat-0", "uid": "u-chat-0"}, "spec": made})


def pod(
    spec: dict[str, Any] | None = None, *, startup_s: float = 7.0, **service_fields: Any
) -> dict[str, Any]:
    """Pod of instance chat-0."""
    return engine_pod(instance(**(spec or PLAIN)), service(**service_fields), SETTINGS, startup_s=startup_s)


def children(
    chat: PDService | None = None, *, min_available: int = 3
) -> dict[tuple[str, str], dict[str, Any]]:
    """Child objects of the service by kind and name."""
    made = service_children(chat or service(), SETTINGS, min_available=min_available)
    return {(child["kind"], child["metadata"]["name"]): child for child in made}


def to_yaml(*manifests: dict[str, Any]) -> str:
    """YAML without anchors for repeated values, as a person would write it."""
    return yaml.safe_dump_all(json.loads(json.dumps(manifests)), sort_keys=False)


def pod_specs() -> Iterable[dict[str, Any]]:
    """Yield the spec of each kind of pod that the operator creates."""
    yield pod()["spec"]
    yield pod(CUSTOMIZED)["spec"]
    yield children()["Deployment", "chat-router"]["spec"]["template"]["spec"]
    launch_spec = instance(**PLAIN, modelSource={"pvc": "models"}).spec.launch_spec
    yield model_reader_pod(ModelReadRequest(launch_spec, model_key(launch_spec), 1), service(), SETTINGS)[
        "spec"
    ]


@pytest.mark.parametrize(
    ("name", "spec"),
    [("pod-plain", PLAIN), ("pod-with-pool-template", CUSTOMIZED)],
    ids=lambda value: str(value)[:12],
)
def test_engine_pod_matches_its_golden_manifest(
    golden: Callable[[str, str], None], name: str, spec: dict[str, Any]
) -> None:
    golden(f"manifests/{name}.yaml", to_yaml(pod(spec)))


def test_service_children_match_their_golden_manifests(golden: Callable[[str, str], None]) -> None:
    made = service_children(service(), SETTINGS, min_available=3)
    golden("manifests/children.yaml", to_yaml(*made))


@pytest.mark.parametrize(
    ("template", "path"),
    [({"metadata": "x"}, "template.metadata"), ({"metadata": {"labels": ["x"]}}, "template.metadata.labels")],
)
def test_template_metadata_that_is_not_a_map_is_refused_with_its_path(
    template: dict[str, Any], path: str
) -> None:
    with pytest.raises(InvalidInput, match="must be a map") as refused:
        pod(PLAIN | {"template": template})
    assert refused.value.path == path


@pytest.mark.parametrize("template", [{"metadata": None}, {"metadata": {"labels": None}}])
def test_template_cannot_remove_the_metadata_that_the_operator_needs(template: dict[str, Any]) -> None:
    assert pod(PLAIN | {"template": template})["metadata"] == pod(PLAIN)["metadata"]


def test_template_cannot_rename_a_pod_or_change_its_owner() -> None:
    template = {
        "metadata": {
            "name": "other",
            "namespace": "elsewhere",
            "ownerReferences": [],
            "labels": {"fulcrum.dev/service": "other", "team": "chat"},
        }
    }
    made = pod(PLAIN | {"template": template})["metadata"]
    assert made == pod()["metadata"] | {"labels": pod()["metadata"]["labels"] | {"team": "chat"}}


def test_grace_period_covers_pre_stop_drain_and_teardown() -> None:
    made = pod(drain={"timeout": "90s"})["spec"]
    engine = made["containers"][0]
    shutdown = engine["args"][engine["args"].index("--shutdown-timeout") + 1]
    assert (made["terminationGracePeriodSeconds"], shutdown) == (PRE_STOP_S + 90 + TEARDOWN_S, "90")


@pytest.mark.parametrize(
    ("startup_s", "budget_s"), [(0.0, 60), (0.3, 60), (7.0, 70), (180.0, 1800), (1200.0, 12000)]
)
def test_startup_probe_allows_ten_times_the_known_startup(startup_s: float, budget_s: int) -> None:
    probe = pod(startup_s=startup_s)["spec"]["containers"][0]["startupProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] >= budget_s
    assert probe["periodSeconds"] * (probe["failureThreshold"] - 1) < budget_s


def test_every_pod_meets_the_restricted_pod_security_standard() -> None:
    def is_restricted(spec: dict[str, Any]) -> bool:
        pod_context = spec["securityContext"]
        ours = [container for container in spec["containers"] if container["name"] != "sidecar"]
        return (
            pod_context["runAsNonRoot"] is True
            and pod_context["runAsUser"] > 0
            and pod_context["seccompProfile"] == {"type": "RuntimeDefault"}
            and all(
                container["securityContext"]["allowPrivilegeEscalation"] is False
                and container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
                and container["securityContext"]["readOnlyRootFilesystem"] is True
                for container in ours
            )
        )

    assert [is_restricted(spec) for spec in pod_specs()] == [True, True, True, True]


def test_only_router_pods_get_an_api_token() -> None:
    tokens = [spec["automountServiceAccountToken"] for spec in pod_specs()]
    accounts = [
        child["automountServiceAccountToken"]
        for (kind, _), child in children().items()
        if kind == "ServiceAccount"
    ]
    assert (tokens, accounts) == ([False, False, True, False], [False, False])


def test_no_manifest_selects_by_role() -> None:
    """A flip must not remove a pod from any selector."""
    assert ROLE_LABEL not in yaml.safe_dump_all([*children().values(), pod()])


def test_every_child_is_owned_by_its_service() -> None:
    owners = {str(child["metadata"]["ownerReferences"]) for child in children().values()}
    expected = {
        "apiVersion": "fulcrum.dev/v1alpha1",
        "kind": "PDService",
        "name": "chat",
        "uid": "u-service",
        "controller": True,
    }
    assert owners == {str([expected])}


def selects(selector: dict[str, str], labels: dict[str, str]) -> bool:
    """Whether the label selector matches an object with these labels."""
    return selector.items() <= labels.items()


def test_engine_and_router_selectors_match_only_their_own_pods() -> None:
    made = children()
    engine = pod()["metadata"]["labels"]
    router = made["Deployment", "chat-router"]["spec"]["template"]["metadata"]["labels"]
    found = {
        name: (selects(selector, engine), selects(selector, router))
        for name, selector in {
            "budget of engines": made["PodDisruptionBudget", "chat-engines"]["spec"]["selector"][
                "matchLabels"
            ],
            "budget of routers": made["PodDisruptionBudget", "chat-router"]["spec"]["selector"][
                "matchLabels"
            ],
            "policy of engines": made["NetworkPolicy", "chat-engines"]["spec"]["podSelector"]["matchLabels"],
            "policy of routers": made["NetworkPolicy", "chat-router"]["spec"]["podSelector"]["matchLabels"],
            "deployment": made["Deployment", "chat-router"]["spec"]["selector"]["matchLabels"],
        }.items()
    }
    assert found == {
        "budget of engines": (True, False),
        "budget of routers": (False, True),
        "policy of engines": (True, False),
        "policy of routers": (False, True),
        "deployment": (False, True),
    }


def test_disruption_budget_of_engines_is_a_number_and_that_of_routers_allows_one() -> None:
    made = children(min_available=7)
    engines, routers = (made["PodDisruptionBudget", f"chat-{part}"]["spec"] for part in ("engines", "router"))
    assert (engines["minAvailable"], engines["unhealthyPodEvictionPolicy"]) == (7, "AlwaysAllow")
    assert (routers["maxUnavailable"], "minAvailable" in routers) == (1, False)


def test_side_channel_is_open_only_to_engines_of_the_service() -> None:
    engine = pod()["metadata"]["labels"]
    ingress = children()["NetworkPolicy", "chat-engines"]["spec"]["ingress"]
    (peers,) = (rule["from"] for rule in ingress if rule["ports"] == [{"port": 5600, "protocol": "TCP"}])
    (peer,) = peers
    other = engine | {"fulcrum.dev/service": "other"}
    assert set(peer) == {"podSelector"}, "without a namespaceSelector only pods of the same namespace match"
    assert selects(peer["podSelector"]["matchLabels"], engine)
    assert not selects(peer["podSelector"]["matchLabels"], other)


def test_router_may_change_only_its_lease_and_its_endpoint_slice() -> None:
    changing = [
        (rule["apiGroups"], rule["resources"], rule.get("resourceNames"))
        for rule in children()["Role", "chat-router"]["rules"]
        if not set(rule["verbs"]) <= {"get", "list", "watch"}
    ]
    assert changing == [
        (["coordination.k8s.io"], ["leases"], ["chat-router"]),
        (["discovery.k8s.io"], ["endpointslices"], ["chat-router"]),
    ]


@pytest.mark.parametrize(
    ("base", "patch", "merged"),
    [
        pytest.param({"a": 1}, {"b": 2}, {"a": 1, "b": 2}, id="a new field is added"),
        pytest.param({"a": 1}, {"a": None}, {}, id="a null removes"),
        pytest.param({"m": {"a": 1, "b": 2}}, {"m": {"b": 3}}, {"m": {"a": 1, "b": 3}}, id="maps merge"),
        pytest.param(
            {"command": ["a"]}, {"command": ["b"]}, {"command": ["b"]}, id="other lists are replaced"
        ),
        pytest.param(
            {"containers": [{"name": "engine", "image": "a", "tty": True}]},
            {"containers": [{"name": "more"}, {"name": "engine", "image": "b"}]},
            {"containers": [{"name": "engine", "image": "b", "tty": True}, {"name": "more"}]},
            id="containers merge by name, new ones follow",
        ),
        pytest.param(
            {"env": [{"name": "POD_IP", "valueFrom": {}}]},
            {"env": [{"name": "A", "value": "1"}]},
            {"env": [{"name": "POD_IP", "valueFrom": {}}, {"name": "A", "value": "1"}]},
            id="variables merge by name",
        ),
        pytest.param({"a": [1]}, {"a": {"b": 1}}, {"a": {"b": 1}}, id="a value of another type replaces"),
        pytest.param(
            {"m": {"a": 1}}, {"m": {"$patch": "replace", "b": 2}}, {"m": {"b": 2}}, id="a map is replaced"
        ),
        pytest.param({"m": {"a": 1}}, {"m": {"$patch": "delete"}}, {}, id="a map is deleted"),
        pytest.param(
            {"env": [{"name": "A"}, {"name": "B"}]},
            {"env": [{"$patch": "delete", "name": "A"}]},
            {"env": [{"name": "B"}]},
            id="an item is deleted",
        ),
        pytest.param(
            {"env": [{"name": "A"}]},
            {"env": [{"$patch": "replace"}, {"name": "C"}]},
            {"env": [{"name": "C"}]},
            id="a list is replaced",
        ),
        pytest.param(
            {"volumes": [{"name": "tmp", "emptyDir": {}}]},
            {"volumes": [{"name": "tmp", "hostPath": {"path": "/x"}, "$retainKeys": ["name", "hostPath"]}]},
            {"volumes": [{"name": "tmp", "hostPath": {"path": "/x"}}]},
            id="a volume gets another source",
        ),
    ],
)
def test_template_is_merged_as_a_strategic_merge_patch(
    base: dict[str, Any], patch: dict[str, Any], merged: dict[str, Any]
) -> None:
    assert apply_template(base, patch) == merged


_VALUES = st.recursive(
    st.none() | st.integers() | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["name", "env", "a"]), inner, max_size=3)
    ),
    max_leaves=8,
)
_MAPS = st.dictionaries(st.sampled_from(["containers", "env", "volumes", "a", "b"]), _VALUES, max_size=4)


@given(patch=_MAPS)
def test_any_template_spec_gives_a_pod_or_removes_the_engine(patch: dict[str, Any]) -> None:
    """An invalid template is passed on; the API server's refusal is shown in a condition."""
    try:
        name = pod(PLAIN | {"template": {"spec": patch}})["metadata"]["name"]
    except InvalidInput as refused:
        name = refused.path
    assert name in ("chat-0", "template.spec.containers")


@given(base=_MAPS, patch=_MAPS)
def test_merging_a_template_changes_neither_input(base: dict[str, Any], patch: dict[str, Any]) -> None:
    before = repr((base, patch))
    apply_template(base, patch)
    assert repr((base, patch)) == before


def killed_after_s(probe: dict[str, Any], until_failure_s: float) -> float:
    """Shortest time from the begin of a fault to the kill, if each probe fails after `until_failure_s`."""
    period_s, failures = probe["periodSeconds"], probe["failureThreshold"]
    return float(max(period_s, until_failure_s) * (failures - 1) + until_failure_s)


@pytest.mark.parametrize(
    ("startup_s", "refused_s", "silent_s", "noticed_s"),
    [
        pytest.param(0.3, 4, 6, 8, id="restarts at once"),
        pytest.param(12.0, 10, 12, 14, id="as long as it needs to start"),
        pytest.param(600.0, 25, 30, 35, id="a restart is expensive"),
    ],
)
def test_a_hung_engine_is_killed_after_as_long_as_a_restart_takes_within_bounds(
    startup_s: float, refused_s: float, silent_s: float, noticed_s: float
) -> None:
    probe = pod(startup_s=startup_s)["spec"]["containers"][0]["livenessProbe"]
    shortest = (killed_after_s(probe, 0.0), killed_after_s(probe, probe["timeoutSeconds"]))
    assert (*shortest, shortest[1] + probe["periodSeconds"]) == (refused_s, silent_s, noticed_s)
