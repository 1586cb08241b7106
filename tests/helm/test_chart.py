"""The chart: rendered objects, rejected values, and permissions of the components.

Helm itself renders it, without a cluster; a real API server takes it in `tests/kubernetes`.
"""

import importlib.util
import json
import re
from collections.abc import Callable
from typing import Any

import pytest
import yaml

from fulcrum_cli.doctor.findings import Component
from fulcrum_cli.doctor.gather import deployments_for_namespace
from fulcrum_operator.manifests.children import service_children
from fulcrum_operator.manifests.names import InstallationSettings, ServiceAccount, component_labels
from fulcrum_operator.program import main as operator
from tests.helm.conftest import CHART, ChartRefusedError, RenderedChart, Renderer
from tests.paths import ROOT
from tests.unit.operator.builders import service

WATCHED = "team-a"
ALL_VALUES_CHANGED: dict[str, Any] = {
    "nameOverride": "pd",
    "watchNamespace": WATCHED,
    "image": {
        "repository": "registry.example/fulcrum",
        "digest": "sha256:" + "0" * 64,
        "pullPolicy": "Always",
    },
    "imagePullSecrets": [{"name": "pull"}],
    "crds": {"enabled": False},
    "engine": {
        "images": {"nvidia": "mirror.example/vllm@sha256:" + "1" * 64, "amd": "mirror.example/vllm-rocm:1"},
        "hubEndpoint": "https://hub.example",
        "metricsFrom": [{"podSelector": {"matchLabels": {"app": "prometheus"}}}],
    },
    "router": {
        "replicas": 3,
        "resources": {"requests": {"cpu": 2}, "limits": {"memory": "1Gi"}},
        "stateCASecret": "fulcrum-state-ca",
        "podAnnotations": {"example.com/note": "router"},
        "nodeSelector": {"kubernetes.io/os": "linux"},
        "tolerations": [{"key": "control", "operator": "Exists", "effect": "NoSchedule"}],
        "affinity": {"nodeAffinity": {}},
        "priorityClassName": "system-cluster-critical",
    },
    "operator": {
        "replicas": 1,
        "serviceAccount": {"annotations": {"example.com/role": "operator"}},
        "podAnnotations": {"example.com/note": "operator"},
        "podLabels": {"team": "platform"},
        "nodeSelector": {"kubernetes.io/os": "linux"},
        "tolerations": [{"key": "control", "operator": "Exists", "effect": "NoSchedule"}],
        "affinity": {"nodeAffinity": {}},
        "priorityClassName": "system-cluster-critical",
        "securityContext": {"readOnlyRootFilesystem": True},
        "extraArgs": ["--host=::"],
        "extraEnv": [{"name": "PYTHONASYNCIODEBUG", "value": "1"}],
    },
    "autoscaler": {
        "resources": {"limits": {"cpu": 1}},
        "tolerations": [{"operator": "Exists"}],
        "extraEnv": [{"name": "PYTHONASYNCIODEBUG", "value": "1"}],
    },
    "monitoring": {
        "podMonitors": True,
        "runbookPrefix": "https://git.example/",
        "labels": {"release": "prometheus"},
    },
    "tracing": {"endpoint": "http://otel-collector.monitoring:4318", "samplingRatio": 0.1},
}
"""Each value differs from its default."""

COMPONENT = "app.kubernetes.io/component"
Golden = Callable[[str, str], None]


def join_files(made: RenderedChart) -> str:
    """Return all files except the generated CRDs as one text."""
    files = sorted((name, text) for name, text in made.files.items() if not name.startswith("crds/"))
    return "\n".join(f"# {name}\n{text.strip()}\n" for name, text in files if text.strip())


def list_pod_specs(made: RenderedChart) -> dict[str, dict[str, Any]]:
    """Return the pod specs of both Deployments and of the test pod, by name."""
    found = {
        made["metadata"]["name"]: made["spec"]["template"]["spec"]
        for made in made.objects
        if made["kind"] == "Deployment"
    }
    return found | {pod["metadata"]["name"]: pod["spec"] for pod in made.objects if pod["kind"] == "Pod"}


@pytest.mark.parametrize(
    ("name", "values"),
    [
        pytest.param("chart-defaults", {}, id="defaults"),
        pytest.param("chart-changed", ALL_VALUES_CHANGED, id="all changed"),
    ],
)
def test_rendered_chart_equals_its_golden_file(
    golden: Golden, render: Renderer, name: str, values: dict[str, Any]
) -> None:
    golden(f"manifests/{name}.yaml", join_files(render(**values)))


def test_chart_without_an_image_is_refused_with_what_to_set(render: Renderer) -> None:
    with pytest.raises(ChartRefusedError, match="repository is required: no image is published"):
        render(image={"repository": ""})


@pytest.mark.parametrize("repository", ["fulcrum", "team/fulcrum"])
def test_an_image_without_a_registry_is_refused_with_what_to_write(render: Renderer, repository: str) -> None:
    with pytest.raises(ChartRefusedError, match=f"names no registry.*write REGISTRY/{repository}"):
        render(image={"repository": repository})


@pytest.mark.parametrize("repository", ["localhost/fulcrum", "localhost:5000/fulcrum", "ghcr.io/a/fulcrum"])
def test_an_image_with_a_registry_is_accepted(render: Renderer, repository: str) -> None:
    operator = list_pod_specs(render(image={"repository": repository}))["fulcrum-operator"]
    assert operator["containers"][0]["image"] == f"{repository}:0.1.0"


def test_extra_objects_are_part_of_the_release(render: Renderer) -> None:
    made = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "one"}}
    text = "apiVersion: v1\nkind: ConfigMap\nmetadata:\n  name: {{ .Release.Name }}-two\n"
    objects = render(extraObjects=[made, text]).objects
    names = [each["metadata"]["name"] for each in objects if each["kind"] == "ConfigMap"]
    assert names == ["one", "fulcrum-two"]


def test_the_prometheus_rule_holds_the_rules_file(render: Renderer) -> None:
    made = render(monitoring={"rules": True}).find("PrometheusRule", "fulcrum")
    assert made["spec"] == yaml.safe_load((CHART / "rules" / "fulcrum.yaml").read_text(encoding="utf-8"))


def test_runbooks_of_alerts_are_where_the_chart_is_told(render: Renderer) -> None:
    prefix = "https://git.example/fulcrum/"
    made = render(monitoring={"rules": True, "runbookPrefix": prefix}).find("PrometheusRule", "fulcrum")
    rules = [rule for group in made["spec"]["groups"] for rule in group["rules"] if "alert" in rule]
    start = f"{prefix}docs/runbooks/Alerts.md#"
    assert [rule["alert"] for rule in rules if not rule["annotations"]["runbook_url"].startswith(start)] == []


@pytest.mark.parametrize(
    ("dashboards", "kinds", "labels"),
    [
        pytest.param("ConfigMaps", ["ConfigMap"], {"grafana_dashboard": "1"}, id="for the sidecar"),
        pytest.param("GrafanaDashboards", ["ConfigMap", "GrafanaDashboard"], {}, id="for the operator"),
    ],
)
def test_dashboards_are_the_files_of_the_chart(
    render: Renderer, dashboards: str, kinds: list[str], labels: dict[str, str]
) -> None:
    made = render(monitoring={"dashboards": dashboards}).objects
    monitoring = [each for each in made if each["metadata"]["labels"].get(COMPONENT) == "monitoring"]
    maps = [each for each in monitoring if each["kind"] == "ConfigMap"]
    data = {name: text for each in maps for name, text in each["data"].items()}
    files = (CHART / "dashboards").glob("*.json")
    assert data == {file.name: file.read_text(encoding="utf-8") for file in files}
    assert sorted({each["kind"] for each in monitoring}) == kinds
    assert all(labels.items() <= each["metadata"]["labels"].items() for each in maps)


def test_default_images_and_the_hub_are_set_once_for_all_services(render: Renderer) -> None:
    images = {"nvidia": "mirror.example/vllm@sha256:" + "1" * 64, "simulated": "mirror.example/fulcrum:1"}
    made = render(engine={"images": images, "hubEndpoint": "https://hub.example"})
    args = list_pod_specs(made)["fulcrum-operator"]["containers"][0]["args"]
    assert [arg for arg in args if arg.startswith(("--engine-image", "--hub-endpoint"))] == [
        *(f"--engine-image={kind}={image}" for kind, image in images.items()),
        "--hub-endpoint=https://hub.example",
    ]


@pytest.mark.parametrize("values", [{}, ALL_VALUES_CHANGED], ids=["defaults", "all changed"])
def test_helm_lint_reports_nothing(render: Renderer, values: dict[str, Any]) -> None:
    findings = [finding["error"] for finding in render(**values).findings]
    assert [finding for finding in findings if finding != "icon is recommended"] == []


@pytest.mark.parametrize(
    ("values", "named"),
    [
        pytest.param({"operatr": {}}, "operatr", id="an unknown section"),
        pytest.param({"operator": {"replica": 3}}, "replica", id="an unknown value"),
        pytest.param({"operator": {"replicas": "3"}}, "replicas", id="text for a number"),
        pytest.param({"operator": {"replicas": 0}}, "replicas", id="no operator"),
        pytest.param({"router": {"replicas": 0}}, "replicas", id="no router"),
        pytest.param({"image": {"tag": 1.10}}, "tag", id="a tag that YAML made a number"),
        pytest.param({"image": {"digest": "0123"}}, "digest", id="a digest without sha256"),
        pytest.param({"image": {"pullPolicy": "Sometimes"}}, "pullPolicy", id="an unknown pull policy"),
        pytest.param({"imagePullSecrets": ["pull"]}, "imagePullSecrets", id="text for an object"),
        pytest.param({"operator": {"tolerations": [{"effct": "NoSchedule"}]}}, "effct", id="deep in a list"),
        pytest.param({"operator": {"resources": {"limit": {}}}}, "limit", id="a misspelt limit"),
        pytest.param(
            {"operator": {"podSecurityContext": {"runAsUsr": 1}}},
            "runAsUsr",
            id="a misspelt field of a security context",
        ),
        pytest.param({"operator": {"extraEnv": [{"value": "1"}]}}, "name", id="a variable without a name"),
        pytest.param({"watchNamespace": "Team_A"}, "watchNamespace", id="an invalid namespace"),
        pytest.param({"fullnameOverride": "x" * 47}, "fullnameOverride", id="a name that is too long"),
    ],
)
def test_invalid_value_is_refused_by_its_name(render: Renderer, values: dict[str, Any], named: str) -> None:
    with pytest.raises(ChartRefusedError, match=named):
        render(**values)


def test_chart_for_one_namespace_has_no_cluster_scoped_object(render: Renderer) -> None:
    made = render(watchNamespace=WATCHED, crds={"enabled": False})
    of_cluster = {
        kind for kind in made.list_kinds() if kind.startswith("Cluster") or kind.startswith("Custom")
    }
    assert of_cluster == set()
    assert "--namespace=team-a" in list_pod_specs(made)["fulcrum-operator"]["containers"][0]["args"]


@pytest.mark.parametrize("component", [Component.OPERATOR, Component.AUTOSCALER])
def test_doctor_finds_the_release_only_from_the_namespace_that_it_watches(
    render: Renderer, component: Component
) -> None:
    made = render(watchNamespace=WATCHED).find("Deployment", f"fulcrum-{component}")
    found = {namespace: deployments_for_namespace([made], namespace) for namespace in (WATCHED, "team-b")}
    assert found == {WATCHED: [made], "team-b": []}


@pytest.mark.parametrize(
    ("namespace", "roles"),
    [
        pytest.param(WATCHED, {"fulcrum-operator", "fulcrum-autoscaler"}, id="its own namespace"),
        pytest.param(
            "other",
            {"fulcrum-operator", "fulcrum-autoscaler", "fulcrum-operator-lease"},
            id="another namespace",
        ),
    ],
)
def test_operator_has_a_role_for_its_lease_in_the_release_namespace(
    render: Renderer, namespace: str, roles: set[str]
) -> None:
    made = render(namespace=namespace, watchNamespace=WATCHED)
    named = {made["metadata"]["name"] for made in made.objects if made["kind"] == "Role"}
    bound = {made["metadata"]["name"] for made in made.objects if made["kind"] == "RoleBinding"}
    assert (named, bound) == (roles, roles)


def test_roles_and_cluster_roles_have_the_same_rules(render: Renderer) -> None:
    whole, one = render(), render(watchNamespace=WATCHED)
    nodes = {"apiGroups": [""], "resources": ["nodes"], "verbs": ["list", "watch"]}  # no Role can grant it
    for name, of_cluster in (("fulcrum-operator", [nodes]), ("fulcrum-autoscaler", [])):
        assert whole.find("ClusterRole", name)["rules"] == one.find("Role", name)["rules"] + of_cluster


def test_no_role_reads_secrets_or_has_wildcards(render: Renderer) -> None:
    granted = {
        (group, resource, verb)
        for made in render().objects
        if made["kind"] == "ClusterRole"
        for rule in made["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }
    too_much = {("", "secrets"), ("rbac.authorization.k8s.io", "clusterroles")}
    assert not {(group, resource) for group, resource, _ in granted} & too_much
    assert not {verb for _, _, verb in granted} & {"*", "bind", "escalate", "impersonate"}
    assert not any("*" in word for rule in granted for word in rule)


def test_operator_has_every_permission_that_it_grants_to_routers(render: Renderer) -> None:
    """Otherwise the API server refuses the Role that the operator creates for routers."""

    def expand_rules(rules: list[dict[str, Any]]) -> set[tuple[str, str, str]]:
        return {
            (g, r, v)
            for rule in rules
            for g in rule["apiGroups"]
            for r in rule["resources"]
            for v in rule["verbs"]
        }

    accounts = (
        ServiceAccount("fulcrum-system", "fulcrum-operator"),
        ServiceAccount("fulcrum-system", "fulcrum-autoscaler"),
    )
    settings = InstallationSettings(image="i", operator=accounts[0], autoscaler=accounts[1])
    (role,) = (
        child for child in service_children(service(), settings, min_available=2) if child["kind"] == "Role"
    )
    held = expand_rules(render().find("ClusterRole", "fulcrum-operator")["rules"])
    assert expand_rules(role["rules"]) - held == set()


@pytest.mark.parametrize("values", [{}, ALL_VALUES_CHANGED], ids=["defaults", "all changed"])
def test_every_pod_of_the_chart_meets_the_restricted_pod_security_standard(
    render: Renderer, values: dict[str, Any]
) -> None:
    for spec in list_pod_specs(render(**values)).values():
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        (container,) = spec["containers"]
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "readOnlyRootFilesystem": True,
            "runAsNonRoot": True,
        }


@pytest.mark.parametrize("keep", [True, False])
def test_crds_are_kept_on_uninstall_only_if_crds_keep_is_true(render: Renderer, keep: bool) -> None:
    kinds = [
        made for made in render(crds={"keep": keep}).objects if made["kind"] == "CustomResourceDefinition"
    ]
    policies = {made["metadata"].get("annotations", {}).get("helm.sh/resource-policy") for made in kinds}
    assert (len(kinds), policies) == (5, {"keep" if keep else None})


def test_crds_of_the_chart_equal_the_crds_folder(render: Renderer) -> None:
    kinds = {
        made["metadata"]["name"]: made
        for made in render(crds={"keep": False}).objects
        if made["kind"] == "CustomResourceDefinition"
    }
    files = [yaml.safe_load(file.read_text(encoding="utf-8")) for file in (ROOT / "crds").glob("*.yaml")]
    assert kinds == {crd["metadata"]["name"]: crd for crd in files}


def test_notes_say_how_to_apply_the_crds_when_the_chart_does_not(render: Renderer) -> None:
    assert "crds/" not in render().files["NOTES.txt"]
    made = render(crds={"enabled": False})
    assert "kubectl apply --server-side -f crds/" in made.files["NOTES.txt"]
    assert "CustomResourceDefinition" not in made.list_kinds()


def test_notes_watch_a_single_kind(render: Renderer) -> None:
    watched = re.findall(r"kubectl get (\S+) .*-w$", render().files["NOTES.txt"], re.MULTILINE)
    assert watched == ["pds"]


def test_manifest_in_the_notes_is_a_pdservice(render: Renderer) -> None:
    manifest = re.search(r"<<'END'\n(.*?)\n  END", render().files["NOTES.txt"], re.DOTALL)
    assert manifest
    typed = yaml.safe_load(manifest[1])
    assert typed == {
        "apiVersion": "fulcrum.dev/v1alpha1",
        "kind": "PDService",
        "metadata": {"name": "chat"},
        "spec": {"model": "Qwen/Qwen3-32B", "instances": 4},
    }


def test_containers_start_modules_that_exist(render: Renderer) -> None:
    for name in ("fulcrum-operator", "fulcrum-autoscaler"):
        (container,) = list_pod_specs(render())[name]["containers"]
        assert container["command"][:2] == ["python", "-m"]
        assert importlib.util.find_spec(f"{container['command'][2]}.__main__")


def test_operator_accepts_the_arguments_of_its_deployment(
    render: Renderer, capsys: pytest.CaptureFixture[str]
) -> None:
    """The only argument that is refused is the unknown one."""
    args = list_pod_specs(render(**ALL_VALUES_CHANGED))["fulcrum-pd-operator"]["containers"][0]["args"]
    with pytest.raises(SystemExit):
        operator([*args, "--unknown"])
    assert capsys.readouterr().err == "error: unrecognized arguments: --unknown\n"


def test_a_quote_in_an_annotation_of_routers_reaches_the_operator(render: Renderer) -> None:
    annotations = {"example.com/note": 'it\'s "ours" <&>'}
    made = render(router={"podAnnotations": annotations})
    args = list_pod_specs(made)["fulcrum-operator"]["containers"][0]["args"]
    (template,) = (arg.partition("=")[2] for arg in args if arg.startswith("--router-template="))
    assert json.loads(template) == {"metadata": {"annotations": annotations}}


def test_every_pod_of_the_chart_requests_what_quotas_count(render: Renderer) -> None:
    for spec in list_pod_specs(render()).values():
        requests = spec["containers"][0]["resources"]["requests"]
        assert sorted(requests) == ["cpu", "ephemeral-storage", "memory"]


def test_pods_carry_the_labels_that_network_policies_select(render: Renderer) -> None:
    """NetworkPolicies admit the operator and the autoscaler by labels that every release sets."""
    made = render(release="other", nameOverride="pd")
    for component in ("operator", "autoscaler"):
        (labels,) = (
            deployment["spec"]["template"]["metadata"]["labels"]
            for deployment in made.objects
            if deployment["kind"] == "Deployment" and deployment["metadata"]["name"].endswith(component)
        )
        assert component_labels(component).items() <= labels.items()


def test_rendering_twice_gives_the_same_chart(render: Renderer) -> None:
    assert render.render_again(**ALL_VALUES_CHANGED) == render(**ALL_VALUES_CHANGED)


def test_single_operator_has_no_pod_disruption_budget(render: Renderer) -> None:
    """A budget for a single pod would block each drain of its node."""
    assert "PodDisruptionBudget" in render().list_kinds()
    assert "PodDisruptionBudget" not in render(operator={"replicas": 1}).list_kinds()


def test_chart_version_equals_the_package_version() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text(encoding="utf-8"))
    version = re.search(
        r'^version = "(.*)"', (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert version
    assert (chart["version"], chart["appVersion"]) == (version[1], version[1])
