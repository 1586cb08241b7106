"""A model of real engines is read by a pod before they start. The test plays that pod, and its node."""

import json
from typing import Any

import pytest

from fulcrum_core.api import PDInstance, PDService
from fulcrum_core.models import excerpt, parse_model_config
from fulcrum_operator.engines import vllm
from fulcrum_operator.engines.from_spec import engine_request
from tests.kubernetes.control_plane.operators import (
    Kubelet,
    OperatorProcess,
    Space,
    engines_at,
    some_address,
    until,
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


def words_of(model: str) -> str:
    """The last words of the pod that reads this model."""
    return json.dumps(excerpt(json.loads((MODELS / model / "config.json").read_text())))


@pytest.fixture
def space(control_plane: Cluster, namespace: str, operator: OperatorProcess) -> Space:  # noqa: ARG001
    """A namespace with a service of real engines, whose model is being read."""
    made = Space(control_plane, namespace)
    made.service(**SPEC)
    until(lambda: pods(made) == [READER], "the pod that reads the model")
    return made


def pods(space: Space) -> list[str]:
    """Names of all but the router's."""
    return [name for name in space.names("pods") if not name.startswith("chat-router-")]


def ends(space: Space, code: int, message: str) -> None:
    """The reader's container has ended with these words."""
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
    told = {"status": {"phase": phase, "containerStatuses": [status]}}
    space.patch("pods", READER, told, status=True)


def arguments(space: Space, name: str) -> list[str]:
    """What the engine of a pod is started with."""
    return list(space.get("pods", name)["spec"]["containers"][0]["args"])


def planned(space: Space, name: str, model: str | None) -> list[str]:
    """What `fulcrum plan` has it started with, given this model's config.json."""
    service = PDService.model_validate(space.get("pdservices", "chat"), extra="ignore")
    instance = PDInstance.model_validate(space.get("pdinstances", name), extra="ignore")
    facts = parse_model_config(json.loads(words_of(model))) if model else None
    request = engine_request(service, instance.spec, pool_role="Flexible", facts=facts)
    launch = vllm.plan_engine(request, vllm.POD).launch
    assert launch is not None
    return list(launch.command[2:])


def test_engines_wait_for_their_model_and_are_started_as_planned(space: Space) -> None:
    assert space.phases() == {}
    assert space.condition("ModelFits")["message"] == "pool chat-flex: the model's config.json is being read"
    ends(space, 0, words_of("llama-3.1-8b"))
    until(lambda: pods(space) == ENGINES, "engines in place of the reader")
    for name in ENGINES:
        assert arguments(space, name) == planned(space, name, "llama-3.1-8b")
    assert {"--attention-backend", "--max-num-batched-tokens"} <= set(arguments(space, "chat-0"))
    until(lambda: space.condition("ModelFits")["status"] == "True", "the model to fit")


def test_a_model_that_cannot_be_read_holds_no_engine_up(space: Space) -> None:
    why = "/models/llama/config.json: No such file or directory; the folder is empty"
    ends(space, 1, why)
    until(lambda: pods(space) == ENGINES, "the engines")
    assert arguments(space, "chat-0") == planned(space, "chat-0", None)
    until(lambda: why in space.condition("ModelFits")["message"], "the reason")
    found = space.condition("ModelFits")
    assert (found["status"], found["reason"]) == ("Unknown", "ModelUnknown")
    known = space.get("pdservices", "chat")["status"]["model"]
    assert (known["error"], known["attempts"]) == (why, 1)


def test_another_model_is_read_before_the_first_engine_of_its_roll_out(space: Space) -> None:
    address = some_address()
    kubelet = Kubelet(space, address)
    ends(space, 0, words_of("llama-3.1-8b"))
    until(lambda: pods(space) == ENGINES, "the engines")
    with engines_at(address):
        kubelet.ready(*ENGINES)
        until(lambda: set(space.phases().values()) == {"Serving"}, "all to serve")
        space.patch("pdservices", "chat", {"spec": {"modelSource": {"path": "qwen"}}})
        until(lambda: READER in pods(space), "the pod that reads the next model")
        assert arguments(space, READER) == ["--folder", "/models/qwen"]
        assert sorted(space.phases()) == ENGINES
        ends(space, 0, words_of("qwen3-32b"))
        until(lambda: pods(space) == [*ENGINES, "chat-2"], "the first engine of the next revision")
        assert arguments(space, "chat-2") == planned(space, "chat-2", "qwen3-32b")
        assert arguments(space, "chat-0") == planned(space, "chat-0", "llama-3.1-8b")
