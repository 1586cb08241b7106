"""The operator works on CRDs of its last two schema versions and of a later one."""

import contextlib
import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from fulcrum_core.api.env import KEY_ARGUMENT_MESSAGE
from tests.kubernetes.conftest import StartCluster
from tests.kubernetes.control_plane.operator_process import (
    FakeKubelet,
    NamespaceClient,
    OperatorProcess,
    operator_starter,
    pick_loopback_address,
    serve_engines,
    wait_until,
)
from tests.paths import ROOT
from tools.kubernetes.cluster import Cluster

PREVIOUS = ROOT / "tests" / "kubernetes" / "previous_crds"
LATER = {"type": "string", "default": "kept"}
"""A field that only a later version knows."""


@pytest.fixture
def bare_cluster(start_cluster: StartCluster) -> Iterator[Cluster]:
    """A control plane without CRDs, for one test: CRDs of several versions cannot be side by side."""
    cluster = start_cluster(0, crds=False)
    yield cluster
    cluster.stop()


@pytest.fixture
def started(bare_cluster: Cluster, tmp_path: Path) -> Iterator[Any]:
    with operator_starter(bare_cluster, "", tmp_path) as start:
        yield start


def apply_manifest(cluster: Cluster, path: Path) -> None:
    cluster.kubectl("apply", "--server-side", "--force-conflicts", "-f", str(path))
    cluster.kubectl("wait", "--for=condition=Established", "--timeout=30s", "-f", str(path))


def serve(api: NamespaceClient, started: Any) -> OperatorProcess:
    """Start an operator and wait until a service of two instances serves."""
    address = pick_loopback_address()
    operator: OperatorProcess = started("op-a", "--lease-namespace", "default")
    wait_until(operator.is_leader, "the operator to lead", timeout_s=30)
    with serve_engines(address):
        api.service(instances=2)
        wait_until(lambda: {"chat-0", "chat-1"} <= set(api.names("pods")), "the pods", timeout_s=30)
        FakeKubelet(api, address).set_ready("chat-0", "chat-1")
        wait_until(lambda: set(api.phases().values()) == {"Serving"}, "all to serve", timeout_s=30)
    return operator


@pytest.mark.parametrize("version", ["1", "2"])
def test_a_newer_operator_serves_on_older_crds_and_names_the_fields_they_lack(
    bare_cluster: Cluster, started: Any, version: str
) -> None:
    apply_manifest(bare_cluster, PREVIOUS / f"{version}.yaml")
    api = NamespaceClient(bare_cluster, "default")
    operator = serve(api, started)
    if version == "2":
        named = "pdinstances status.flipStrategy"
        wait_until(lambda: named in api.condition("Degraded")["message"], "the fields", timeout_s=30)
        wait_until(lambda: "CRDsOutdated" in api.events(), "the event")
    api.patch("pdservices", "chat", {"spec": {"instances": 3}})
    wait_until(lambda: "chat-2" in api.names("pods"), "a change to be acted on")
    assert "reconcile failed" not in operator.log.read_text()


@pytest.mark.parametrize("version", ["1", "2"])
def test_a_change_on_older_crds_replaces_each_engine_once(
    bare_cluster: Cluster, started: Any, version: str
) -> None:
    """The field of the default image is missing, and the image is part of the revision."""
    apply_manifest(bare_cluster, PREVIOUS / f"{version}.yaml")
    api = NamespaceClient(bare_cluster, "default")
    address = pick_loopback_address()
    operator: OperatorProcess = started("op-a", "--lease-namespace", "default")
    wait_until(operator.is_leader, "the operator to lead", timeout_s=30)
    kubelet = FakeKubelet(api, address)

    def all_settled(args: list[str]) -> bool:
        for name in api.names("pods"):
            with contextlib.suppress(LookupError):  # deleted meanwhile
                kubelet.set_ready(name)
        specs = [instance["spec"]["engine"].get("args", []) for instance in api.list("pdinstances")]
        return specs == [args, args] and api.condition("Progressing")["reason"] == "Settled"

    with serve_engines(address):
        api.service(instances=2, drain={"timeout": "1s"})
        wait_until(lambda: all_settled([]), "all to serve", timeout_s=30)
        api.patch("pdservices", "chat", {"spec": {"engine": {"args": ["--seed=7"]}}})
        wait_until(lambda: all_settled(["--seed=7"]), "the roll-out", timeout_s=60)
    created = [line for line in operator.log.read_text().splitlines() if '"pod created"' in line]
    assert len(created) == 4
    assert "pdpools spec.defaultImage" in api.condition("Degraded")["message"]


@pytest.mark.parametrize("version", ["1", "2"])
def test_an_upgrade_of_the_crds_keeps_every_engine_and_ends_the_complaint(
    bare_cluster: Cluster, started: Any, version: str
) -> None:
    """As `helm upgrade` does: the CRDs are replaced, then the operator is restarted."""
    apply_manifest(bare_cluster, PREVIOUS / f"{version}.yaml")
    api = NamespaceClient(bare_cluster, "default")
    address = pick_loopback_address()
    before: OperatorProcess = started("op-a", "--lease-namespace", "default")
    wait_until(before.is_leader, "the operator to lead", timeout_s=30)
    with serve_engines(address):
        api.service(instances=2)
        wait_until(lambda: {"chat-0", "chat-1"} <= set(api.names("pods")), "the pods", timeout_s=30)
        FakeKubelet(api, address).set_ready("chat-0", "chat-1")
        wait_until(lambda: set(api.phases().values()) == {"Serving"}, "all to serve", timeout_s=30)
        uids = engine_uids(api)
        before.stop()
        for path in sorted((ROOT / "crds").glob("*.yaml")):
            apply_manifest(bare_cluster, path)
        after: OperatorProcess = started("op-b", "--lease-namespace", "default")
        wait_until(after.is_leader, "the new operator to lead", timeout_s=30)
        wait_until(lambda: "CRDs" not in api.condition("Degraded")["message"], "no complaint", timeout_s=30)
        wait_until(lambda: api.get("pdinstances", "chat-0")["status"].get("flipStrategy"), "a new field")
    assert (set(api.phases().values()), engine_uids(api)) == ({"Serving"}, uids)
    log = after.log.read_text()
    assert [text for text in ("reconcile failed", "phase changed") if text in log] == []


def engine_uids(api: NamespaceClient) -> dict[str, str]:
    """Uids of the engines' pods, by name."""
    found = {pod["metadata"]["name"]: pod["metadata"]["uid"] for pod in api.list("pods")}
    return {name: found[name] for name in ("chat-0", "chat-1")}


def with_later_fields(crd: dict[str, Any]) -> dict[str, Any]:
    later = copy.deepcopy(crd)
    schema = later["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]
    for part in ("spec", "status"):
        if part in schema:
            schema[part]["properties"]["later"] = LATER
    return later


def test_an_older_operator_serves_on_newer_crds_and_keeps_their_fields(
    bare_cluster: Cluster, started: Any, tmp_path: Path
) -> None:
    crds = [
        with_later_fields(yaml.safe_load(path.read_text())) for path in sorted((ROOT / "crds").glob("*.yaml"))
    ]
    newer = tmp_path / "crds.yaml"
    newer.write_text(yaml.safe_dump_all(crds))
    apply_manifest(bare_cluster, newer)
    api = NamespaceClient(bare_cluster, "default")
    operator = serve(api, started)
    api.patch("pdpools", "chat-flex", {"spec": {"later": "mine"}})
    api.patch("pdservices", "chat", {"spec": {"later": "mine", "instances": 3}})
    wait_until(lambda: "chat-2" in api.names("pods"), "a change to be acted on")
    kept = [
        api.get(kind, name)["spec"]["later"]
        for kind, name in (("pdservices", "chat"), ("pdpools", "chat-flex"))
    ]
    assert kept == ["mine", "mine"]
    assert "reconcile failed" not in operator.log.read_text()


def without_rules(crd: dict[str, Any]) -> dict[str, Any]:
    earlier = copy.deepcopy(crd)
    spec = earlier["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
    del spec["properties"]["engine"]["x-kubernetes-validations"]
    return earlier


def test_a_service_from_before_a_rule_can_be_scaled_and_gets_no_more_tokens(
    bare_cluster: Cluster, tmp_path: Path
) -> None:
    crd = yaml.safe_load((ROOT / "crds" / "pdservices.yaml").read_text())
    earlier = tmp_path / "crds.yaml"
    earlier.write_text(yaml.safe_dump(without_rules(crd)))
    apply_manifest(bare_cluster, earlier)
    api = NamespaceClient(bare_cluster, "default")
    engine = {"type": "Simulated", "env": [{"name": "HF_TOKEN", "value": "abcdef"}], "args": ["--api-key=a"]}
    api.service(instances=2, engine=engine)
    apply_manifest(bare_cluster, ROOT / "crds" / "pdservices.yaml")
    api.patch("pdservices", "chat", {"spec": {"instances": 3}})
    api.patch("pdservices", "chat", {"status": {"ready": "2/3"}}, status=True)
    more = {"args": ["--api-key=b"]}
    wait_until(lambda: refusal(api, more) == KEY_ARGUMENT_MESSAGE, "the new rule to hold")
    assert api.get("pdservices", "chat")["spec"]["instances"] == 3


def refusal(api: NamespaceClient, engine: dict[str, Any]) -> str:
    """Our message about a change of the engine that the API server refuses; empty if it is accepted."""
    body = {"metadata": {"name": "other"}, "spec": {"model": "m", "engine": engine}}
    head = {"apiVersion": "fulcrum.dev/v1alpha1", "kind": "PDService"}
    try:
        api.cluster.kubectl("create", "--dry-run=server", "-f", "-", stdin=json.dumps({**head, **body}))
    except RuntimeError as error:
        return KEY_ARGUMENT_MESSAGE if KEY_ARGUMENT_MESSAGE in str(error) else str(error)
    return ""
