"""Model reader pods: their manifest, the result in their status, and when they are created and deleted."""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import yaml

from fulcrum_cluster.objects import POD
from fulcrum_core.api import PDService
from fulcrum_core.api.meta import format_time
from fulcrum_core.errors import Forbidden
from fulcrum_operator.controller.cache import ObjectCache
from fulcrum_operator.controller.cached_store import NotLeader
from fulcrum_operator.controller.context import ServiceKey
from fulcrum_operator.controller.pods.model_reader_pods import (
    RESULT_KEPT_S,
    ModelReaderPods,
    observe_reader_pod,
)
from fulcrum_operator.manifests.engine_pod import engine_pod
from fulcrum_operator.manifests.model_reader_pod import ATTEMPT_ANNOTATION, model_reader_pod
from fulcrum_operator.plan.model import ModelReadRequest, model_key
from fulcrum_operator.plan.observed import ModelReadAttempt
from fulcrum_operator.plan.pools import desired_pools
from tests.clocks import ManualClock
from tests.unit.operator.builders import NOW_S, SETTINGS, instance, service
from tests.unit.operator.fakes import FakePods, Json

KEY = ServiceKey("default", "chat")
WITH_PULL_SECRET = replace(SETTINGS, image_pull_secrets=("pull",))
CLAIM: dict[str, Any] = {"modelSource": {"pvc": "models", "path": "llama"}}
HUB: dict[str, Any] = {"modelSource": {"revision": "v2", "tokenSecret": "hub"}}


def chat(pool: Json | None = None, **spec: Any) -> PDService:
    """A service of vLLM engines."""
    pools = [{"name": "flex", "instances": {"min": 2}, **(pool or {})}]
    return service(**{"engine": {"type": "vLLM", "image": "vllm:1"}, "pools": pools, **spec})


def make_read(owner: PDService, attempt: int = 1) -> ModelReadRequest:
    launch_spec = desired_pools(owner, ())[0].spec.launch_spec
    return ModelReadRequest(launch_spec, model_key(launch_spec), attempt)


def pod(owner: PDService) -> Json:
    return model_reader_pod(make_read(owner), owner, WITH_PULL_SECRET)


@pytest.mark.parametrize(("name", "spec"), [("claim", CLAIM), ("hub", HUB)])
def test_the_model_reader_pod_equals_its_golden_file(
    golden: Callable[[str, str], None], name: str, spec: Json
) -> None:
    reader_pod = json.loads(json.dumps(pod(chat(**spec))))
    golden(f"manifests/model-reader-{name}.yaml", yaml.safe_dump(reader_pod, sort_keys=False, width=110))


@pytest.mark.parametrize(
    "spec", [CLAIM, {"modelSource": {"hostPath": "/srv/llama", "path": "hf"}}], ids=["claim", "folder"]
)
def test_the_reader_mounts_the_model_at_the_engines_path(spec: Json) -> None:
    owner = chat(**spec)
    launch_spec = desired_pools(owner, ())[0].spec.launch_spec
    member = instance("chat-0")
    update = {name: getattr(launch_spec, name) for name in type(launch_spec).model_fields}
    member = member.replace(spec=member.spec.model_copy(update=update))
    engine = engine_pod(member, owner, SETTINGS, startup_s=1.0)["spec"]
    reader = pod(owner)["spec"]
    assert reader["containers"][0]["args"][-1] == engine["containers"][0]["args"][0]
    assert [v for v in reader["volumes"] if v["name"] == "model"] == [
        v for v in engine["volumes"] if v["name"] == "model"
    ]
    mounts = engine["containers"][0]["volumeMounts"]
    assert reader["containers"][0]["volumeMounts"] == [m for m in mounts if m["name"] == "model"]


def test_the_reader_takes_only_the_hub_variables_of_the_engine() -> None:
    env = [
        {"name": "HF_ENDPOINT", "value": "http://mirror"},
        {"name": "HTTPS_PROXY", "value": "http://proxy:3128"},
        {"name": "LD_PRELOAD", "value": "/opt/x.so"},
    ]
    reader_pod = pod(chat(engine={"type": "vLLM", "env": env}))
    assert reader_pod["spec"]["containers"][0]["env"] == env[:2]


def test_the_reader_reads_the_revision_of_the_engines_own_arguments() -> None:
    """They come after the generated ones, and the last one wins in the engine."""
    args = ["--revision=v3"]
    reader_pod = pod(chat(engine={"type": "vLLM", "args": args}, modelSource={"revision": "v2"}))
    assert reader_pod["spec"]["containers"][0]["args"][-2:] == ["--revision", "v3"]


def test_the_reader_takes_placement_and_security_context_from_the_pool() -> None:
    template = {
        "spec": {
            "nodeSelector": {"disk": "fast"},
            "tolerations": [{"key": "team", "operator": "Exists"}],
            "securityContext": {"fsGroup": 7},
            "containers": [{"name": "engine", "env": [{"name": "A", "value": "1"}]}],
        }
    }
    spec = pod(chat({"template": template, "hardware": {"resource": "amd.com/gpu"}}, **CLAIM))["spec"]
    assert spec["nodeSelector"] == {"disk": "fast"}
    assert [one["key"] for one in spec["tolerations"]] == ["team", "amd.com/gpu"]
    assert (spec["securityContext"]["fsGroup"], spec["securityContext"]["runAsNonRoot"]) == (7, True)
    assert spec["containers"][0]["env"] == []


def test_directives_of_a_template_apply_to_the_placement_of_the_reader() -> None:
    template = {
        "spec": {
            "nodeSelector": {"$patch": "replace", "disk": "fast"},
            "securityContext": {"$patch": "replace", "runAsUser": 7},
        }
    }
    spec = pod(chat({"template": template}))["spec"]
    assert (spec["nodeSelector"], spec["securityContext"]) == ({"disk": "fast"}, {"runAsUser": 7})


def test_an_invalid_template_is_passed_on_for_the_api_server_to_refuse() -> None:
    odd = {"spec": {"tolerations": 5, "securityContext": "none"}}
    spec = pod(chat({"template": odd}))["spec"]
    assert (spec["tolerations"], spec["securityContext"]) == (5, "none")


def terminated_status(code: int, message: str = "", reason: str = "Completed") -> Json:
    terminated = {"exitCode": code, "message": message, "reason": reason}
    phase = "Failed" if code else "Succeeded"
    return {"phase": phase, "containerStatuses": [{"name": "reader", "state": {"terminated": terminated}}]}


def waiting(reason: str, message: str) -> Json:
    state = {"waiting": {"reason": reason, "message": message}}
    return {"phase": "Pending", "containerStatuses": [{"name": "reader", "state": state}]}


@pytest.mark.parametrize(
    ("status", "facts", "error", "start_failure"),
    [
        pytest.param({}, None, None, "", id="new"),
        pytest.param({"phase": "Running"}, None, None, "", id="running"),
        pytest.param(terminated_status(0, '{"head_dim":64}'), {"head_dim": 64}, None, "", id="read"),
        pytest.param(
            terminated_status(0, "{"),
            None,
            "the model reader pod ended without a result",
            "",
            id="half a message",
        ),
        pytest.param(
            terminated_status(0, ""), None, "the model reader pod ended without a result", "", id="no message"
        ),
        pytest.param(
            terminated_status(1, "hub: status 404\n", "Error"),
            None,
            "hub: status 404",
            "",
            id="its error message",
        ),
        pytest.param(
            terminated_status(1, "a\nValueError: b", "Error"),
            None,
            "ValueError: b",
            "",
            id="a log's last line",
        ),
        pytest.param(
            terminated_status(137, "", "OOMKilled"),
            None,
            "the model reader pod ended with exit code 137 (OOMKilled)",
            "",
            id="killed",
        ),
        pytest.param(
            {"phase": "Failed", "reason": "Evicted", "message": "The node was low on memory"},
            None,
            "Evicted: The node was low on memory",
            "",
            id="evicted",
        ),
        pytest.param(
            waiting("ErrImagePull", "not found"),
            None,
            None,
            "ErrImagePull: not found",
            id="a missing image",
        ),
    ],
)
def test_the_result_is_read_from_the_pods_status(
    status: Json, facts: Json | None, error: str | None, start_failure: str
) -> None:
    reader_pod = pod(chat()) | {"status": status}
    reader_pod["metadata"] |= {"creationTimestamp": format_time(NOW_S)}
    expected = ModelReadAttempt(
        key=make_read(chat()).key,
        attempt=1,
        started_s=NOW_S,
        facts=facts,
        error=error,
        start_failure=start_failure,
    )
    assert observe_reader_pod(reader_pod) == expected


class ModelReaderUnderTest:
    """One service and the `ModelReaderPods` under test."""

    def __init__(self) -> None:
        self.objects, self.notified, self.is_leader = FakePods(), list[ServiceKey](), True
        self.clock = ManualClock(NOW_S)
        self.cache = ObjectCache(lambda _: None)
        self.service = chat()
        api: Any = self.objects
        self.models = ModelReaderPods(
            api,
            self.cache,
            SETTINGS,
            self.clock,
            is_leader=lambda: self.is_leader,
            on_change=self.notified.append,
        )

    async def sync(self, attempt: int | None) -> None:
        await self.models.sync(self.service, None if attempt is None else make_read(self.service, attempt))

    def calls(self) -> list[str]:
        """Each creation and deletion with the number of its attempt."""
        return [
            f"{verb} {pod['metadata']['annotations'][ATTEMPT_ANNOTATION]}" for verb, pod in self.objects.log
        ]

    def observe_deleted(self) -> None:
        self.cache.remove(POD, "default", "chat-model", version=str(self.objects.version + 1))


@pytest.fixture
def under_test() -> ModelReaderUnderTest:
    return ModelReaderUnderTest()


async def test_the_reader_pod_is_created_once_and_deleted_when_no_longer_needed(
    under_test: ModelReaderUnderTest,
) -> None:
    await under_test.sync(1)
    await under_test.sync(1)
    assert under_test.models.reading(KEY) is not None
    await under_test.sync(None)
    under_test.observe_deleted()
    await under_test.sync(None)
    assert (under_test.calls(), under_test.models.reading(KEY)) == (["create 1", "delete 1"], None)


async def test_the_next_attempt_waits_until_the_previous_pod_is_deleted(
    under_test: ModelReaderUnderTest,
) -> None:
    await under_test.sync(1)
    await under_test.sync(2)
    assert under_test.calls() == ["create 1", "delete 1"]
    under_test.observe_deleted()
    await under_test.sync(2)
    assert under_test.calls() == ["create 1", "delete 1", "create 2"]


async def test_a_refused_pod_is_the_attempts_result_and_is_not_retried(
    under_test: ModelReaderUnderTest,
) -> None:
    under_test.objects.refusal = Forbidden("exceeded quota: pods")
    await under_test.sync(1)
    await under_test.sync(1)
    result = under_test.models.reading(KEY)
    assert result is not None
    assert (result.attempt, result.error, under_test.notified) == (
        1,
        "PodRefused: exceeded quota: pods",
        [KEY],
    )
    under_test.objects.refusal = None
    await under_test.sync(None)
    await under_test.sync(2)
    assert under_test.calls() == ["create 2"]


@pytest.mark.parametrize(
    "status",
    [terminated_status(0, '{"head_dim":64}'), terminated_status(1, "hub: status 404", "Error")],
    ids=["read", "failed"],
)
async def test_a_result_the_status_does_not_keep_is_remembered_for_ten_minutes(
    under_test: ModelReaderUnderTest, status: Json
) -> None:
    await under_test.sync(1)
    under_test.cache.put_object(
        POD, under_test.objects.put(under_test.objects.pods["chat-model"] | {"status": status})
    )
    result = under_test.models.reading(KEY)
    await under_test.sync(None)
    under_test.observe_deleted()
    await under_test.sync(1)
    assert (under_test.models.reading(KEY), under_test.calls()) == (result, ["create 1", "delete 1"])
    under_test.clock.at_s += RESULT_KEPT_S
    await under_test.sync(1)
    assert under_test.calls() == ["create 1", "delete 1", "create 1"]


async def test_results_of_a_deleted_service_are_forgotten(under_test: ModelReaderUnderTest) -> None:
    under_test.objects.refusal = Forbidden("exceeded quota: pods")
    await under_test.sync(1)
    under_test.models.forget(KEY)
    assert under_test.models.reading(KEY) is None


async def test_a_foreign_pod_with_the_readers_name_is_never_deleted(under_test: ModelReaderUnderTest) -> None:
    under_test.objects.put({"metadata": {"name": "chat-model", "namespace": "default"}})
    await under_test.sync(1)
    result = under_test.models.reading(KEY)
    assert result is not None
    assert result.error == "NameTaken: a pod chat-model exists that Fulcrum did not create"
    await under_test.sync(None)
    assert under_test.calls() == []


async def test_a_reader_pod_missing_from_the_cache_is_adopted(under_test: ModelReaderUnderTest) -> None:
    await under_test.sync(1)
    under_test.observe_deleted()
    under_test.objects.put({**under_test.objects.pods["chat-model"]})
    under_test.objects.version += 5
    under_test.objects.put({**under_test.objects.pods["chat-model"]})
    await under_test.sync(1)
    assert (under_test.models.reading(KEY) is not None, under_test.calls()) == (True, ["create 1"])


async def test_a_standby_creates_no_reader_pod(under_test: ModelReaderUnderTest) -> None:
    under_test.is_leader = False
    with pytest.raises(NotLeader):
        await under_test.sync(1)
    assert under_test.calls() == []
