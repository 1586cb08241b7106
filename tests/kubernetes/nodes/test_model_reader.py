"""The model reader pod reads a model from a node's folder; real engines are tested elsewhere."""

import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fulcrum_core.models import excerpt_config
from tests.conftest import RecordMeasurement
from tests.kubernetes.nodes.pods import list_pods
from tests.kubernetes.nodes.service import DeployedService
from tests.paths import MODELS
from tools.kubernetes.cluster import Cluster
from tools.kubernetes.waiting import wait_for

CONFIG = MODELS / "llama-3.1-8b" / "config.json"


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    """A folder on the nodes with a model in `llama`, readable by all users."""
    model = tmp_path / "weights" / "llama"
    model.mkdir(parents=True)
    shutil.copy(CONFIG, model)
    for path in (model.parent, model, model / CONFIG.name):
        path.chmod(0o755 if path.is_dir() else 0o644)
    return model.parent


@pytest.fixture
def real(
    cluster: Cluster, namespace: str, service: DeployedService, weights: Path
) -> Iterator[DeployedService]:
    """A service of real engines with the model in this folder; its image contains no engine."""
    assert service.is_fully_ready()  # Fulcrum is installed
    hardware = {"resource": "cpu", "memory": "64Gi"}
    spec = {
        "model": "acme/model",
        "modelSource": {"hostPath": str(weights), "path": "llama"},
        "engine": {"type": "vLLM", "image": "localhost/fulcrum:1"},
        "pools": [{"name": "flex", "instances": {"min": 1}, "hardware": hardware}],
    }
    head = {"apiVersion": "fulcrum.dev/v1alpha1", "kind": "PDService", "metadata": {"name": "real"}}
    cluster.kubectl("apply", f"--namespace={namespace}", "-f", "-", stdin=json.dumps({**head, "spec": spec}))
    yield DeployedService(cluster, namespace, "real")
    cluster.kubectl("delete", "pdservice", "real", f"--namespace={namespace}", "--wait=false")


def read_model_status(real: DeployedService) -> dict[str, Any]:
    """Return `status.model`; KeyError before it is set."""
    found: dict[str, Any] = real.read("pdservices")["status"]["model"]
    return found


def list_pod_names(cluster: Cluster, namespace: str) -> list[str]:
    return [pod.name for pod in list_pods(cluster, namespace)]


@pytest.mark.timeout(240)
def test_model_config_is_read_in_a_pod_and_a_missing_one_is_reported_with_its_path(
    cluster: Cluster,
    namespace: str,
    real: DeployedService,
    weights: Path,
    record_measurement: RecordMeasurement,
) -> None:
    began_s = time.monotonic()
    wait_for(lambda: bool(read_model_status(real)), "the model to be read", timeout_s=90)
    read_s = time.monotonic() - began_s
    assert read_model_status(real)["configExcerpt"] == excerpt_config(json.loads(CONFIG.read_text()))
    wait_for(
        lambda: "configExcerpt" in real.read("pdinstances", "real-0")["spec"], "an instance", timeout_s=10
    )
    wait_for(
        lambda: real.condition("ModelFits")["reason"] not in ("NoInstanceYet", ""), "a verdict", timeout_s=10
    )
    assert real.condition("ModelFits")["reason"] != "ModelUnknown"
    wait_for(
        lambda: "real-model" not in list_pod_names(cluster, namespace),
        "the pod that read it to go",
        timeout_s=10,
    )
    real.patch("pdservices", {"spec": {"modelSource": {"path": "lama"}}})
    wait_for(lambda: "error" in read_model_status(real), "the next model to be looked for", timeout_s=60)
    location = f"spec.modelSource (hostPath: {weights}, path: lama)"
    why = "/models/lama/config.json: No such file or directory; /models contains llama"
    assert read_model_status(real)["error"] == f"{location}: {why}"
    record_measurement(f"applied to model read: {read_s:.1f} s")
