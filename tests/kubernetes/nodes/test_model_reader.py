"""A model is read in a real pod, where an engine would find it; the engine itself is another scenario's."""

import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fulcrum_core.models import excerpt
from tests.conftest import Figure
from tests.kubernetes.nodes.pods import list_pods
from tests.kubernetes.nodes.service import Service
from tests.paths import MODELS
from tools.kubernetes.cluster import Cluster
from tools.kubernetes.waiting import wait_for

CONFIG = MODELS / "llama-3.1-8b" / "config.json"


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    """A folder of the nodes that holds a model in `llama`, and that anybody may read."""
    model = tmp_path / "weights" / "llama"
    model.mkdir(parents=True)
    shutil.copy(CONFIG, model)
    for path in (model.parent, model, model / CONFIG.name):
        path.chmod(0o755 if path.is_dir() else 0o644)
    return model.parent


@pytest.fixture
def real(cluster: Cluster, namespace: str, service: Service, weights: Path) -> Iterator[Service]:
    """A service of real engines whose model is in that folder; their image has no engine."""
    assert service.is_whole()  # the product is installed
    hardware = {"resource": "cpu", "memory": "64Gi"}
    spec = {
        "model": "acme/model",
        "modelSource": {"hostPath": str(weights), "path": "llama"},
        "engine": {"type": "vLLM", "image": "localhost/fulcrum:1"},
        "pools": [{"name": "flex", "instances": {"min": 1}, "hardware": hardware}],
    }
    head = {"apiVersion": "fulcrum.dev/v1alpha1", "kind": "PDService", "metadata": {"name": "real"}}
    cluster.kubectl("apply", f"--namespace={namespace}", "-f", "-", stdin=json.dumps({**head, "spec": spec}))
    yield Service(cluster, namespace, "real")
    cluster.kubectl("delete", "pdservice", "real", f"--namespace={namespace}", "--wait=false")


def model_of(real: Service) -> dict[str, Any]:
    """What the status says of the model; KeyError before it says anything."""
    found: dict[str, Any] = real.read("pdservices")["status"]["model"]
    return found


def pod_names(cluster: Cluster, namespace: str) -> list[str]:
    return [pod.name for pod in list_pods(cluster, namespace)]


@pytest.mark.timeout(240)
def test_a_model_is_read_where_it_is_and_its_absence_is_told_in_words(
    cluster: Cluster, namespace: str, real: Service, figure: Figure
) -> None:
    began_s = time.monotonic()
    wait_for(lambda: bool(model_of(real)), "the model to be read", timeout_s=90)
    read_s = time.monotonic() - began_s
    assert model_of(real)["facts"] == excerpt(json.loads(CONFIG.read_text()))
    wait_for(lambda: "modelFacts" in real.read("pdinstances", "real-0")["spec"], "an instance", timeout_s=10)
    wait_for(
        lambda: real.condition("ModelFits")["reason"] not in ("NoInstanceYet", ""), "a verdict", timeout_s=10
    )
    assert real.condition("ModelFits")["reason"] != "ModelUnknown"
    wait_for(
        lambda: "real-model" not in pod_names(cluster, namespace), "the pod that read it to go", timeout_s=10
    )
    real.patch("pdservices", {"spec": {"modelSource": {"path": "lama"}}})
    wait_for(lambda: "error" in model_of(real), "the next model to be looked for", timeout_s=60)
    why = "/models/lama/config.json: No such file or directory; /models holds llama"
    assert model_of(real)["error"] == why
    figure(f"from the manifest to a model that was read: {read_s:.1f} s")
