"""The real API server takes the chart's PodMonitors and rules by the CRDs of the Prometheus Operator."""

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.helm.conftest import Renderer
from tests.helm.conftest import render as render  # a fixture
from tests.kubernetes.clusters import temporary_namespace
from tools.kubernetes.cluster import Cluster
from tools.kubernetes.program import find_go

MODULE = "github.com/prometheus-operator/prometheus-operator@v0.85.0"
MODULE_SUM = "h1:M5xLCLEoaW2IJfnuCwFzzpL+jSVQu3KGT84Pye+fW8s="
KINDS = ("podmonitors", "prometheusrules")


def download_crds() -> Path:
    """Return the folder with the CRDs of the Prometheus Operator, from its Go module."""
    command = [str(find_go()), "mod", "download", "-json", MODULE]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd="/")
    found = json.loads(done.stdout)
    assert found["Sum"] == MODULE_SUM
    return Path(found["Dir"]) / "example" / "prometheus-operator-crd"


@pytest.fixture
def namespace(control_plane: Cluster) -> Iterator[str]:
    """A namespace in a cluster that has the CRDs; both are deleted afterwards."""
    folder = download_crds()
    files = [f"--filename={folder}/monitoring.coreos.com_{kind}.yaml" for kind in KINDS]
    control_plane.kubectl("create", *files)
    try:
        names = [f"crd/{kind}.monitoring.coreos.com" for kind in KINDS]
        control_plane.kubectl("wait", "--for=condition=Established", "--timeout=60s", *names)
        with temporary_namespace(control_plane) as name:
            yield name
    finally:
        control_plane.kubectl("delete", "--wait=false", *files)


def test_pod_monitors_and_rules_are_accepted_as_they_are(
    control_plane: Cluster, namespace: str, render: Renderer
) -> None:
    made = render(namespace=namespace, monitoring={"podMonitors": True, "rules": True}).objects
    ours = [each for each in made if each["apiVersion"].startswith("monitoring.coreos.com/")]
    created = control_plane.kubectl(
        "create", "--validate=strict", "--filename=-", "--output=name", stdin=yaml.safe_dump_all(ours)
    )
    assert sorted(created.split()) == [
        "podmonitor.monitoring.coreos.com/fulcrum-components",
        "podmonitor.monitoring.coreos.com/fulcrum-engines",
        "podmonitor.monitoring.coreos.com/fulcrum-routers",
        "prometheusrule.monitoring.coreos.com/fulcrum",
    ]
