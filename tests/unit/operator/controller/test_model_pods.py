"""The pod that reads a model: what it is, what its status says, and when it is made and deleted."""

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
from fulcrum_operator.controller.cache import Cache
from fulcrum_operator.controller.cached_store import NotLeading
from fulcrum_operator.controller.pods.model_pods import REMEMBERED_S, ModelPods, reading_of
from fulcrum_operator.controller.reconcile import ServiceKey
from fulcrum_operator.manifests.engine_pod import pod_of
from fulcrum_operator.manifests.model_reader_pod import ATTEMPT, reader_pod
from fulcrum_operator.plan.model import Read, model_key
from fulcrum_operator.plan.observed import Reading
from fulcrum_operator.plan.pools import desired_pools
from tests.unit.operator.builders import NOW_S, SETTINGS, instance, service
from tests.unit.operator.fakes import Json, Pods

KEY = ServiceKey("default", "chat")
PULLS = replace(SETTINGS, image_pull_secrets=("pull",))
CLAIM: dict[str, Any] = {"modelSource": {"pvc": "models", "path": "llama"}}
HUB: dict[str, Any] = {"modelSource": {"revision": "v2", "tokenSecret": "hub"}}


def chat(pool: Json | None = None, **spec: Any) -> PDService:
    """A service of real engines."""
    pools = [{"name": "flex", "instances": {"min": 2}, **(pool or {})}]
    return service(**{"engine": {"type": "vLLM", "image": "vllm:1"}, "pools": pools, **spec})


def to_read(owner: PDService, attempt: int = 1) -> Read:
    start = desired_pools(owner, ())[0].spec.start
    return Read(start, model_key(start), attempt)


def pod(owner: PDService) -> Json:
    return reader_pod(to_read(owner), owner, PULLS)


@pytest.mark.parametrize(("name", "spec"), [("claim", CLAIM), ("hub", HUB)])
def test_the_pod_that_reads_a_model_is_this(
    golden: Callable[[str, str], None], name: str, spec: Json
) -> None:
    made = json.loads(json.dumps(pod(chat(**spec))))
    golden(f"manifests/model-reader-{name}.yaml", yaml.safe_dump(made, sort_keys=False, width=110))


@pytest.mark.parametrize(
    "spec", [CLAIM, {"modelSource": {"hostPath": "/srv/llama", "path": "hf"}}], ids=["claim", "folder"]
)
def test_it_finds_the_model_where_an_engine_does(spec: Json) -> None:
    owner = chat(**spec)
    start = desired_pools(owner, ())[0].spec.start
    member = instance("chat-0")
    update = {name: getattr(start, name) for name in type(start).model_fields}
    member = member.replace(spec=member.spec.model_copy(update=update))
    engine = pod_of(member, owner, SETTINGS, startup_s=1.0)["spec"]
    reader = pod(owner)["spec"]
    assert reader["containers"][0]["args"][-1] == engine["containers"][0]["args"][0]
    assert [v for v in reader["volumes"] if v["name"] == "model"] == [
        v for v in engine["volumes"] if v["name"] == "model"
    ]
    mounts = engine["containers"][0]["volumeMounts"]
    assert reader["containers"][0]["volumeMounts"] == [m for m in mounts if m["name"] == "model"]


def test_it_asks_the_hub_that_the_engines_ask_and_takes_nothing_else_of_theirs() -> None:
    env = [
        {"name": "HF_ENDPOINT", "value": "http://mirror"},
        {"name": "HTTPS_PROXY", "value": "http://proxy:3128"},
        {"name": "LD_PRELOAD", "value": "/opt/x.so"},
    ]
    made = pod(chat(engine={"type": "vLLM", "env": env}))
    assert made["spec"]["containers"][0]["env"] == env[:2]


def test_it_runs_where_the_pools_engines_run_and_as_whom_they_run() -> None:
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
    assert [one["key"] for one in spec["tolerations"]] == ["amd.com/gpu", "team"]
    assert (spec["securityContext"]["fsGroup"], spec["securityContext"]["runAsNonRoot"]) == (7, True)
    assert spec["containers"][0]["env"] == []


def test_a_template_that_is_none_is_left_to_the_api_server_to_refuse() -> None:
    odd = {"spec": {"tolerations": 5, "securityContext": "none"}}
    spec = pod(chat({"template": odd}))["spec"]
    assert (spec["tolerations"], spec["securityContext"]) == (5, "none")


def ended(code: int, message: str = "", reason: str = "Completed") -> Json:
    terminated = {"exitCode": code, "message": message, "reason": reason}
    phase = "Failed" if code else "Succeeded"
    return {"phase": phase, "containerStatuses": [{"name": "reader", "state": {"terminated": terminated}}]}


def waits(reason: str, message: str) -> Json:
    state = {"waiting": {"reason": reason, "message": message}}
    return {"phase": "Pending", "containerStatuses": [{"name": "reader", "state": state}]}


@pytest.mark.parametrize(
    ("status", "facts", "error", "hindrance"),
    [
        pytest.param({}, None, None, "", id="new"),
        pytest.param({"phase": "Running"}, None, None, "", id="at it"),
        pytest.param(ended(0, '{"head_dim":64}'), {"head_dim": 64}, None, "", id="read"),
        pytest.param(ended(0, "{"), None, "the pod that reads it did not say it", "", id="half a message"),
        pytest.param(ended(0, ""), None, "the pod that reads it did not say it", "", id="no message"),
        pytest.param(ended(1, "hub: status 404\n", "Error"), None, "hub: status 404", "", id="its words"),
        pytest.param(
            ended(1, "a\nValueError: b", "Error"), None, "ValueError: b", "", id="a log's last line"
        ),
        pytest.param(
            ended(137, "", "OOMKilled"),
            None,
            "the pod that reads it ended with exit code 137 (OOMKilled)",
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
            waits("ErrImagePull", "not found"),
            None,
            None,
            "ErrImagePull: not found",
            id="an image that is not there",
        ),
    ],
)
def test_what_the_pod_says(status: Json, facts: Json | None, error: str | None, hindrance: str) -> None:
    made = pod(chat()) | {"status": status}
    made["metadata"] |= {"creationTimestamp": format_time(NOW_S)}
    expected = Reading(
        key=to_read(chat()).key, attempt=1, born_s=NOW_S, facts=facts, error=error, hindrance=hindrance
    )
    assert reading_of(made) == expected


class World:
    """One service, and the pod that reads its model."""

    def __init__(self) -> None:
        self.objects, self.woken, self.leads = Pods(), list[ServiceKey](), True
        self.at_s = NOW_S
        self.cache = Cache(lambda _: None)
        self.service = chat()
        api: Any = self.objects
        clock: Any = self
        self.models = ModelPods(
            api, self.cache, SETTINGS, clock, leads=lambda: self.leads, on_change=self.woken.append
        )

    def now_s(self) -> float:
        return self.at_s

    async def tend(self, attempt: int | None) -> None:
        await self.models.tend(self.service, None if attempt is None else to_read(self.service, attempt))

    def done(self) -> list[str]:
        """What was created and deleted, each with the number of its try."""
        return [f"{verb} {pod['metadata']['annotations'][ATTEMPT]}" for verb, pod in self.objects.log]

    def heard_gone(self) -> None:
        self.cache.drop(POD, "default", "chat-model", version=str(self.objects.version + 1))


@pytest.fixture
def world() -> World:
    return World()


async def test_it_is_made_once_and_deleted_when_it_is_not_asked_for(world: World) -> None:
    await world.tend(1)
    await world.tend(1)
    assert world.models.reading(KEY) is not None
    await world.tend(None)
    world.heard_gone()
    await world.tend(None)
    assert (world.done(), world.models.reading(KEY)) == (["create 1", "delete 1"], None)


async def test_what_is_to_be_read_now_waits_for_the_end_of_what_was_read_before(world: World) -> None:
    await world.tend(1)
    await world.tend(2)
    assert world.done() == ["create 1", "delete 1"]
    world.heard_gone()
    await world.tend(2)
    assert world.done() == ["create 1", "delete 1", "create 2"]


async def test_a_refusal_is_what_came_of_it_until_the_next_try(world: World) -> None:
    world.objects.refusal = Forbidden("exceeded quota: pods")
    await world.tend(1)
    await world.tend(1)
    said = world.models.reading(KEY)
    assert said is not None
    assert (said.attempt, said.error, world.woken) == (1, "PodRefused: exceeded quota: pods", [KEY])
    world.objects.refusal = None
    await world.tend(None)
    await world.tend(2)
    assert world.done() == ["create 2"]


@pytest.mark.parametrize(
    "status", [ended(0, '{"head_dim":64}'), ended(1, "hub: status 404", "Error")], ids=["read", "failed"]
)
async def test_an_answer_that_no_status_keeps_is_not_asked_for_again_at_once(
    world: World, status: Json
) -> None:
    await world.tend(1)
    world.cache.take(POD, world.objects.put(world.objects.pods["chat-model"] | {"status": status}))
    said = world.models.reading(KEY)
    await world.tend(None)
    world.heard_gone()
    await world.tend(1)
    assert (world.models.reading(KEY), world.done()) == (said, ["create 1", "delete 1"])
    world.at_s += REMEMBERED_S
    await world.tend(1)
    assert world.done() == ["create 1", "delete 1", "create 1"]


async def test_nothing_is_remembered_of_a_service_that_is_gone(world: World) -> None:
    world.objects.refusal = Forbidden("exceeded quota: pods")
    await world.tend(1)
    world.models.forget(KEY)
    assert world.models.reading(KEY) is None


async def test_a_pod_of_somebody_else_under_its_name_is_left_alone(world: World) -> None:
    world.objects.put({"metadata": {"name": "chat-model", "namespace": "default"}})
    await world.tend(1)
    said = world.models.reading(KEY)
    assert said is not None
    assert said.error == "NameTaken: there is a pod chat-model that Fulcrum did not make"
    await world.tend(None)
    assert world.done() == []


async def test_a_pod_that_was_not_heard_of_yet_is_taken_for_its_own(world: World) -> None:
    await world.tend(1)
    world.heard_gone()
    world.objects.put({**world.objects.pods["chat-model"]})
    world.objects.version += 5
    world.objects.put({**world.objects.pods["chat-model"]})
    await world.tend(1)
    assert (world.models.reading(KEY) is not None, world.done()) == (True, ["create 1"])


async def test_who_does_not_lead_makes_none(world: World) -> None:
    world.leads = False
    with pytest.raises(NotLeading):
        await world.tend(1)
    assert world.done() == []
