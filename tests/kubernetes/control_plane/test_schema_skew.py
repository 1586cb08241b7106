"""The operator works on CRDs of its last two schema versions and of a later one."""

import contextlib
import copy
import functools
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from fulcrum_core.api.env import KEY_ARGUMENT_MESSAGE
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
StartOperator = Callable[[str], OperatorProcess]
LATER = {"type": "string", "default": "kept"}
"""A field that only a later version knows."""


@pytest.fixture
def started(bare_cluster: Cluster, bare_namespace: str, tmp_path: Path) -> Iterator[StartOperator]:
    """`started(identity)` starts an operator of all namespaces and waits until it leads."""
    with operator_starter(bare_cluster, "", tmp_path) as start:

        def start_leader(identity: str) -> OperatorProcess:
            operator = start(identity, "--lease-namespace", bare_namespace)
            wait_until(operator.is_leader, "the operator to lead", timeout_s=30)
            return operator

        yield start_leader


@pytest.fixture
def api(bare_cluster: Cluster, bare_namespace: str) -> NamespaceClient:
    return NamespaceClient(bare_cluster, bare_namespace)


def apply_manifest(cluster: Cluster, path: Path) -> None:
    cluster.kubectl("apply", "--server-side", "--force-conflicts", "-f", str(path))
    cluster.kubectl("wait", "--for=condition=Established", "--timeout=30s", "-f", str(path))


def is_settled(api: NamespaceClient, kubelet: FakeKubelet, args: Sequence[str], count: int) -> bool:
    """Make all engines ready; whether that many serve with these arguments, and nothing is left to do."""
    for name in api.names("pods"):
        with contextlib.suppress(LookupError):  # deleted meanwhile
            kubelet.set_ready(name)
    specs = [instance["spec"]["engine"].get("args", []) for instance in api.list("pdinstances")]
    serving = list(api.phases().values()) == ["Serving"] * count
    return serving and specs == [list(args)] * count and api.condition("Progressing")["reason"] == "Settled"


@pytest.mark.timeout(240)
@pytest.mark.parametrize("version", ["1", "2"])
def test_a_newer_operator_acts_on_older_crds_and_their_upgrade_keeps_every_engine(
    bare_cluster: Cluster, api: NamespaceClient, started: StartOperator, version: str
) -> None:
    """As `helm upgrade` does: the CRDs are replaced, then the operator is restarted."""
    apply_manifest(bare_cluster, PREVIOUS / f"{version}.yaml")
    address = pick_loopback_address()
    settled = functools.partial(is_settled, api, FakeKubelet(api, address))
    before = started("op-a")
    with serve_engines(address):
        api.service(instances=2, drain={"timeout": "1s"})
        wait_until(lambda: settled([], 2), "all to serve", timeout_s=30)

        api.patch("pdservices", "chat", {"spec": {"engine": {"args": ["--seed=7"]}}})
        wait_until(lambda: settled(["--seed=7"], 2), "the roll-out", timeout_s=60)
        # The field of the default image is missing, and the image is part of the revision.
        assert before.log.read_text().count('"pod created"') == 4, "each engine is replaced once"
        lacking = "pdpools spec.defaultImage", "pdinstances status.flipStrategy"
        for field in lacking if version == "2" else lacking[:1]:
            wait_until(functools.partial(names_field, api, field), f"{field} to be named", timeout_s=30)
        wait_until(lambda: "CRDsOutdated" in api.events(), "the event")

        api.patch("pdservices", "chat", {"spec": {"instances": 3}})
        wait_until(lambda: settled(["--seed=7"], 3), "the third instance", timeout_s=30)
        uids = engine_uids(api)
        for path in sorted((ROOT / "crds").glob("*.yaml")):
            apply_manifest(bare_cluster, path)
        wait_until(lambda: not names_field(api, "CRDs"), "no complaint before the restart", timeout_s=30)
        before.stop()
        after = started("op-b")
        name = next(iter(uids))
        wait_until(lambda: api.get("pdinstances", name)["status"].get("flipStrategy"), "a new field")
    assert (set(api.phases().values()), engine_uids(api), len(uids)) == ({"Serving"}, uids, 3)
    assert "reconcile failed" not in before.log.read_text()
    log = after.log.read_text()
    assert [text for text in ("reconcile failed", "phase changed") if text in log] == []


def names_field(api: NamespaceClient, text: str) -> bool:
    return text in api.condition("Degraded")["message"]


def engine_uids(api: NamespaceClient) -> dict[str, str]:
    """Uids of the engines' pods, by name."""
    engines = set(api.names("pdinstances"))
    pods = (pod["metadata"] for pod in api.list("pods"))
    return {pod["name"]: pod["uid"] for pod in pods if pod["name"] in engines}


def with_later_fields(crd: dict[str, Any]) -> dict[str, Any]:
    later = copy.deepcopy(crd)
    schema = later["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]
    for part in ("spec", "status"):
        if part in schema:
            schema[part]["properties"]["later"] = LATER
    return later


def test_an_older_operator_acts_on_newer_crds_and_keeps_their_fields(
    bare_cluster: Cluster, api: NamespaceClient, started: StartOperator, tmp_path: Path
) -> None:
    crds = [
        with_later_fields(yaml.safe_load(path.read_text())) for path in sorted((ROOT / "crds").glob("*.yaml"))
    ]
    newer = tmp_path / "crds.yaml"
    newer.write_text(yaml.safe_dump_all(crds))
    apply_manifest(bare_cluster, newer)
    operator = started("op-a")
    api.service(instances=2)
    wait_until(lambda: "chat-1" in api.names("pods"), "the pods", timeout_s=30)
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
    bare_cluster: Cluster, api: NamespaceClient, tmp_path: Path
) -> None:
    crd = yaml.safe_load((ROOT / "crds" / "pdservices.yaml").read_text())
    earlier = tmp_path / "crds.yaml"
    earlier.write_text(yaml.safe_dump(without_rules(crd)))
    apply_manifest(bare_cluster, earlier)
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
