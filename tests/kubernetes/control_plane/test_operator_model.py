"""A model reader pod reads the model before vLLM engines start. The test writes the pods' statuses."""

import json
from typing import Any

import pytest

from fulcrum_core.api import PDInstance, PDService
from fulcrum_core.models import excerpt_config, parse_model_config
from fulcrum_operator.engines import vllm
from fulcrum_operator.engines.from_spec import build_launch_request
from tests.kubernetes.control_plane.operator_process import (
    FakeKubelet,
    NamespaceClient,
    OperatorProcess,
    pick_loopback_address,
    serve_engines,
    wait_until,
)
from tests.paths import MODELS
from tools.kubernetes.cluster import Cluster

SPEC: dict[str, Any] = {
    "model": "acme/model",
    "modelSource": {"pvc": "models", "path": "llama"},
    "engine": {"type": "vLLM", "image": "localhost/vllm:1"},
    "pools": [
        {
            "name": "flex",
            "instances": {"min": 2},
            "hardware": {"resource": "nvidia.com/gpu", "type": "H100-SXM"},
        }
    ],
}
ENGINES = ["chat-0", "chat-1"]
READER = "chat-model"


def termination_message(model: str) -> str:
    """Termination message of a model reader pod for this model."""
    return json.dumps(excerpt_config(json.loads((MODELS / model / "config.json").read_text())))


@pytest.fixture
def api(control_plane: Cluster, namespace: str, operator: OperatorProcess) -> NamespaceClient:  # noqa: ARG001
    """A namespace with a service of vLLM engines, whose model is being read."""
    client = NamespaceClient(control_plane, namespace)
    client.service(**SPEC)
    wait_until(lambda: pods(client) == [READER], "the model reader pod")
    return client


def pods(api: NamespaceClient) -> list[str]:
    """Names of all pods except the router's."""
    return [name for name in api.names("pods") if not name.startswith("chat-router-")]


def end_reader(api: NamespaceClient, code: int, message: str) -> None:
    """Mark the reader's container as ended with this exit code and message."""
    ended = {"exitCode": code, "message": message, "reason": "Error" if code else "Completed"}
    status = {
        "name": "reader",
        "image": "localhost/fulcrum:1",
        "imageID": "localhost/fulcrum@sha256:0123",
        "ready": False,
        "restartCount": 0,
        "state": {"terminated": ended},
    }
    phase = "Failed" if code else "Succeeded"
    patch = {"status": {"phase": phase, "containerStatuses": [status]}}
    api.patch("pods", READER, patch, status=True)


def arguments(api: NamespaceClient, name: str) -> list[str]:
    """Arguments of a pod's engine."""
    return list(api.get("pods", name)["spec"]["containers"][0]["args"])


def planned(api: NamespaceClient, name: str, model: str | None) -> list[str]:
    """Arguments that `fulcrum plan` shows for an instance, given this model's config.json."""
    service = PDService.model_validate(api.get("pdservices", "chat"), extra="ignore")
    instance = PDInstance.model_validate(api.get("pdinstances", name), extra="ignore")
    facts = parse_model_config(json.loads(termination_message(model))) if model else None
    request = build_launch_request(service, instance.spec, pool_role="Flexible", facts=facts)
    launch = vllm.plan_engine(request, vllm.POD_PLACEMENT).launch
    assert launch is not None
    return list(launch.command[2:])


def test_engines_start_after_their_model_is_read_and_as_fulcrum_plan_shows(api: NamespaceClient) -> None:
    assert api.phases() == {}
    assert api.condition("ModelFits")["message"] == "pool chat-flex: the model's config.json is being read"
    end_reader(api, 0, termination_message("llama-3.1-8b"))
    wait_until(lambda: pods(api) == ENGINES, "engines in place of the reader")
    for name in ENGINES:
        assert arguments(api, name) == planned(api, name, "llama-3.1-8b")
    assert {"--attention-backend", "--max-num-batched-tokens"} <= set(arguments(api, "chat-0"))
    wait_until(lambda: api.condition("ModelFits")["status"] == "True", "the model to fit")


def test_an_unreadable_model_does_not_delay_engines(api: NamespaceClient) -> None:
    why = "/models/llama/config.json: No such file or directory; the folder is empty"
    end_reader(api, 1, why)
    wait_until(lambda: pods(api) == ENGINES, "the engines")
    assert arguments(api, "chat-0") == planned(api, "chat-0", None)
    wait_until(lambda: why in api.condition("ModelFits")["message"], "the reason")
    found = api.condition("ModelFits")
    assert (found["status"], found["reason"]) == ("Unknown", "ModelUnknown")
    known = api.get("pdservices", "chat")["status"]["model"]
    error = f"spec.modelSource (pvc: models, path: llama): {why}"
    assert (known["error"], known["attempts"]) == (error, 1)


def test_a_new_model_is_read_before_the_first_engine_of_its_rollout(api: NamespaceClient) -> None:
    address = pick_loopback_address()
    kubelet = FakeKubelet(api, address)
    end_reader(api, 0, termination_message("llama-3.1-8b"))
    wait_until(lambda: pods(api) == ENGINES, "the engines")
    with serve_engines(address):
        kubelet.set_ready(*ENGINES)
        wait_until(lambda: set(api.phases().values()) == {"Serving"}, "all to serve")
        api.patch("pdservices", "chat", {"spec": {"modelSource": {"path": "qwen"}}})
        wait_until(lambda: READER in pods(api), "the reader pod of the next model")
        assert arguments(api, READER) == ["--folder", "/models/qwen"]
        assert sorted(api.phases()) == ENGINES
        end_reader(api, 0, termination_message("qwen3-32b"))
        wait_until(lambda: pods(api) == [*ENGINES, "chat-2"], "the first engine of the next revision")
        assert arguments(api, "chat-2") == planned(api, "chat-2", "qwen3-32b")
        assert arguments(api, "chat-0") == planned(api, "chat-0", "llama-3.1-8b")
