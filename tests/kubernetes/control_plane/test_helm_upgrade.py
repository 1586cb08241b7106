"""`helm upgrade` replaces CRDs of earlier schemas, and a new install takes over kept ones; services stay."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.kubernetes.nodes.installation import CHART, Helm, build_values
from tests.paths import ROOT
from tools.kubernetes.cluster import Cluster
from tools.kubernetes.waiting import wait_for

PREVIOUS = ROOT / "tests" / "kubernetes" / "previous_crds"
NEW_FIELD = {"spec": {"router": {"stateTls": {"secretName": "state"}}}}
"""A field that no earlier schema has."""


def write_earlier_chart(folder: Path, crds: Path) -> Path:
    """Write the chart as it was with these CRDs: templates that stay when the release is uninstalled."""
    chart = folder / "fulcrum"
    shutil.copytree(CHART, chart)
    shutil.rmtree(chart / "templates" / "crds")
    documents = list(yaml.safe_load_all(crds.read_text(encoding="utf-8")))
    for crd in documents:
        crd["metadata"]["annotations"] = {"helm.sh/resource-policy": "keep"}
    (chart / "templates" / "earlier-crds.yaml").write_text(yaml.safe_dump_all(documents), encoding="utf-8")
    return chart


@pytest.fixture
def helm(bare_cluster: Cluster, bare_namespace: str) -> Iterator[Helm]:
    """Helm for a cluster without Fulcrum and without its CRDs."""
    made = Helm(bare_cluster, bare_namespace)
    yield made
    made.uninstall()


@pytest.fixture
def path(bare_namespace: str) -> str:
    """Path of the PDService `chat`."""
    return f"/apis/fulcrum.dev/v1alpha1/namespaces/{bare_namespace}/pdservices/chat"


def create_service(cluster: Cluster, path: str) -> dict[str, Any]:
    """Create `chat` as soon as its kind is served."""
    meta = {"name": "chat"}
    body = {
        "apiVersion": "fulcrum.dev/v1alpha1",
        "kind": "PDService",
        "metadata": meta,
        "spec": {"model": "m"},
    }
    folder = path.rpartition("/")[0]
    wait_for(
        lambda: cluster.request("POST", folder, json.dumps(body).encode())[0] in (201, 409),
        "the kind to be served",
        timeout_s=30,
    )
    made: dict[str, Any] = cluster.read(path)
    return made


def accepts_new_field(cluster: Cluster, path: str) -> bool:
    """Whether the API server knows the field, by its strict validation."""
    query = "?fieldValidation=Strict&dryRun=All"
    body = json.dumps(NEW_FIELD).encode()
    return cluster.request("PATCH", path + query, body, content_type="application/merge-patch+json")[0] == 200


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    "crds", sorted(PREVIOUS.glob("*.yaml")), ids=lambda path: f"{path.stem} versions ago"
)
def test_helm_upgrade_replaces_crds_of_an_earlier_schema_and_keeps_services(
    bare_cluster: Cluster, helm: Helm, path: str, tmp_path: Path, crds: Path
) -> None:
    helm.install(build_values(), wait=False, chart=write_earlier_chart(tmp_path, crds))
    before = create_service(bare_cluster, path)
    known = [accepts_new_field(bare_cluster, path)]
    helm.upgrade(build_values(), wait=False)
    wait_for(lambda: accepts_new_field(bare_cluster, path), "the new schema", timeout_s=30)
    after = bare_cluster.read(path)
    assert (known, after["metadata"]["uid"]) == ([False], before["metadata"]["uid"])


@pytest.mark.timeout(180)
def test_an_install_beside_kept_crds_takes_them_over_with_their_services(
    bare_cluster: Cluster, helm: Helm, path: str
) -> None:
    helm.install(build_values(), wait=False)
    before = create_service(bare_cluster, path)
    helm.uninstall()
    kept = bare_cluster.read(path)
    helm.install(build_values(), wait=False)
    after = bare_cluster.read(path)
    assert kept["metadata"]["uid"] == after["metadata"]["uid"] == before["metadata"]["uid"]
