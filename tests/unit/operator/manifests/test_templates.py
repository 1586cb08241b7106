"""Templates of pods: which apply to which pods, and the Secret with the router's certificate."""

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import pytest

from fulcrum_core.api import PDInstance
from fulcrum_core.errors import InvalidInput
from fulcrum_operator.manifests.children import service_children
from fulcrum_operator.manifests.engine_pod import engine_pod
from fulcrum_operator.manifests.names import InstallationSettings
from fulcrum_operator.manifests.pod_template import apply_template
from fulcrum_operator.plan.pools import desired_pools
from fulcrum_router.options import parse_options
from tests.unit.operator.builders import SETTINGS, service


@pytest.mark.parametrize("patch", [{"$setElementOrder/env": []}, {"a": {"$patch": "remove"}}])
def test_other_directives_of_a_patch_are_refused(patch: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput):
        apply_template({}, patch)


def test_an_item_of_a_list_that_says_merge_is_merged() -> None:
    """The API server refuses this directive, which says what happens without it."""
    base = {"env": [{"name": "A", "value": "1"}]}
    patch = {"env": [{"$patch": "merge", "name": "A", "value": "2"}, {"$patch": "merge", "name": "B"}]}
    assert apply_template(base, patch) == {"env": [{"name": "A", "value": "2"}, {"name": "B"}]}


def make_engine_pod(template: dict[str, Any]) -> dict[str, Any]:
    spec: dict[str, Any] = {"service": "chat", "pool": "chat-flex", "model": "m", "template": template}
    spec["engine"] = {"type": "Simulated", "image": "registry.example/engine:1"}
    made = PDInstance.model_validate({"metadata": {"name": "chat-0", "uid": "u"}, "spec": spec})
    return engine_pod(made, service(), SETTINGS, startup_s=1.0)


OWN_ACCOUNT = {"serviceAccountName": "admin", "serviceAccount": "admin", "automountServiceAccountToken": True}


def test_no_template_changes_the_service_account_of_a_pod() -> None:
    template = {"spec": OWN_ACCOUNT}
    engine = make_engine_pod(template)["spec"]
    router = router_children(template=template)[("Deployment", "chat-router")]["spec"]["template"]["spec"]
    fields = ("serviceAccountName", "serviceAccount", "automountServiceAccountToken")
    assert [[pod.get(field) for field in fields] for pod in (engine, router)] == [
        ["chat-engine", None, False],
        ["chat-router", None, True],
    ]


def test_a_template_that_removes_the_program_is_refused() -> None:
    only_sidecar = {"spec": {"containers": [{"$patch": "replace"}, {"name": "sidecar", "image": "x"}]}}
    with pytest.raises(InvalidInput, match="must keep the container engine"):
        make_engine_pod(only_sidecar)


def test_the_template_of_a_service_applies_to_pools_without_their_own() -> None:
    def pools(**spec: Any) -> list[Any]:
        made = desired_pools(service(**spec), ())
        return [pool.spec.template for pool in made]

    shared, own = {"spec": {"priorityClassName": "high"}}, {"spec": {"runtimeClassName": "nvidia"}}
    two = [{"name": "a", "instances": {"min": 1}}, {"name": "b", "instances": {"min": 1}, "template": own}]
    assert pools(instances=2, template=shared) == [shared]
    assert pools(pools=two, template=shared) == [shared, own]


def router_children(settings: InstallationSettings = SETTINGS, **router: Any) -> dict[Any, Any]:
    owner = service(router=router)
    tls = owner.spec.router.tls is not None
    made = service_children(owner, settings, min_available=1, serves_tls=tls)
    return {(child["kind"], child["metadata"]["name"]): child for child in made}


def test_the_template_of_routers_is_merged_after_that_of_the_installation() -> None:
    every = {"spec": {"priorityClassName": "high", "nodeSelector": {"pool": "cpu"}}}
    settings = dataclasses.replace(SETTINGS, router_template=every)
    own = {
        "metadata": {"labels": {"team": "a", "app.kubernetes.io/name": "x"}},
        "spec": {"nodeSelector": None},
    }
    made = router_children(settings, template=own)["Deployment", "chat-router"]["spec"]["template"]
    labels = made["metadata"]["labels"]
    assert (made["spec"]["priorityClassName"], "nodeSelector" in made["spec"]) == ("high", False)
    assert (labels["team"], labels["app.kubernetes.io/name"]) == ("a", "fulcrum-router")


def test_an_invalid_template_of_routers_prevents_the_deployment_only() -> None:
    owner = service(router={"template": {"metadata": "x"}})
    made = service_children(owner, SETTINGS, min_available=1)
    assert len(list(itertools.islice(made, 11))) == 11
    with pytest.raises(InvalidInput):
        next(made)


def test_routers_serve_tls_from_the_secret_that_the_service_names() -> None:
    made = router_children(tls={"secretName": "chat-tls"})
    pod = made["Deployment", "chat-router"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    folder = "/var/run/secrets/fulcrum.dev/tls"
    tls = parse_options([arg.replace("$(POD_IP)", "10.0.0.1") for arg in container["args"]]).tls
    assert (tls and (tls.certificate, tls.key)) == (Path(folder) / "tls.crt", Path(folder) / "tls.key")
    assert {"name": "tls", "secret": {"secretName": "chat-tls"}} in pod["volumes"]
    assert {"name": "tls", "mountPath": folder, "readOnly": True} in container["volumeMounts"]
    assert container["readinessProbe"]["httpGet"]["scheme"] == "HTTPS"
    port = made["Service", "chat"]["spec"]["ports"][0]
    assert (port["name"], port["port"], port["appProtocol"]) == ("http", 443, "https")


def test_liveness_of_routers_is_not_checked_on_a_port_that_clients_can_fill() -> None:
    pod = router_children()["Deployment", "chat-router"]["spec"]["template"]["spec"]
    assert pod["containers"][0]["livenessProbe"]["httpGet"] == {"path": "/health", "port": "metrics"}


@pytest.mark.parametrize(("replicas", "max_unavailable"), [(1, 0), (2, 1), (3, 1)])
def test_one_router_remains_until_a_new_one_is_ready(replicas: int, max_unavailable: int) -> None:
    made = router_children(dataclasses.replace(SETTINGS, router_replicas=replicas))
    strategy = made["Deployment", "chat-router"]["spec"]["strategy"]["rollingUpdate"]
    assert strategy == {"maxUnavailable": max_unavailable, "maxSurge": 1}


SAFE_TO_EVICT = "cluster-autoscaler.kubernetes.io/safe-to-evict"


def test_cluster_autoscaler_may_remove_nodes_with_our_pods_unless_a_template_says_no() -> None:
    def annotations(template: dict[str, Any]) -> list[str]:
        router = router_children(template=template)["Deployment", "chat-router"]["spec"]["template"]
        pods = (make_engine_pod(template), router)
        return [pod["metadata"]["annotations"][SAFE_TO_EVICT] for pod in pods]

    kept = {"metadata": {"annotations": {SAFE_TO_EVICT: "false"}}}
    assert (annotations({}), annotations(kept)) == (["true", "true"], ["false", "false"])


def test_routers_read_api_keys_from_the_secret_that_the_service_names() -> None:
    made = router_children(auth={"apiKeys": {"secretName": "chat-keys"}})
    pod = made["Deployment", "chat-router"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    folder = "/var/run/secrets/fulcrum.dev/api-keys"
    options = parse_options([arg.replace("$(POD_IP)", "10.0.0.1") for arg in container["args"]])
    assert (options.api_keys, pod["volumes"][1:], container["volumeMounts"][1:]) == (
        Path(folder),
        [{"name": "api-keys", "secret": {"secretName": "chat-keys"}}],
        [{"name": "api-keys", "mountPath": folder, "readOnly": True}],
    )


def test_trusted_proxies_change_nothing_of_the_routers_pod() -> None:
    proxies = {"trustedProxies": ["10.0.0.0/8"]}
    assert router_children(auth=proxies) == router_children()
