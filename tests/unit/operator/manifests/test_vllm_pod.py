"""The pod of a vLLM engine differs from a simulated one only in the engine's container."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import yaml

from fulcrum_core.api import ObjectMeta, PDInstance, PDService, PDServiceSpec
from fulcrum_core.errors import InvalidInput
from fulcrum_operator.engines.images import EngineImages
from fulcrum_operator.engines.vllm import POD_PLACEMENT, expected_identity_and_startup_s, plan_engine
from fulcrum_operator.manifests.children import service_children
from fulcrum_operator.manifests.engine_container import vllm_launch_request
from fulcrum_operator.manifests.engine_pod import engine_pod
from fulcrum_operator.manifests.model_reader_pod import model_reader_pod
from fulcrum_operator.plan.model import ModelReadRequest
from fulcrum_operator.plan.pools import desired_pools
from tests.unit.operator.builders import SETTINGS


def service(pool: dict[str, Any] | None = None, **spec: Any) -> PDService:
    """A service of vLLM engines with one flexible pool."""
    pools = [{"name": "flex", "instances": {"min": 2}, **(pool or {})}]
    made = {"model": "acme/model", "engine": {"type": "vLLM", "image": "acme/vllm:1"}, "pools": pools, **spec}
    return PDService(metadata=ObjectMeta(name="chat", uid="u"), spec=PDServiceSpec.model_validate(made))


def instance(owner: PDService, role: str | None = None) -> PDInstance:
    """The first instance of its pool, as the plan creates it."""
    pool = desired_pools(owner, ())[0]
    launch_spec = pool.spec.launch_spec.model_dump(by_alias=True)
    spec = {**launch_spec, "service": "chat", "pool": pool.metadata.name, "role": role}
    return PDInstance.model_validate({"metadata": {"name": "chat-0", "uid": "u0"}, "spec": spec})


def container(owner: PDService, role: str | None = None) -> dict[str, Any]:
    """Container of the engine in the pod of that instance."""
    pod = engine_pod(instance(owner, role), owner, SETTINGS, startup_s=1.0)
    found: dict[str, Any] = pod["spec"]["containers"][0]
    return found


def test_vllm_pod_matches_its_golden_manifest(golden: Callable[[str, str], None]) -> None:
    owner = service(
        {"hardware": {"resource": "nvidia.com/gpu", "count": 4, "type": "H100-SXM", "fabric": "InfiniBand"}},
        modelSource={"pvc": "models", "path": "llama", "maxLength": 32768},
        kvTransfer={"connector": "NIXLWithLMCache"},
        kvCache={"cpu": "64Gi", "disk": "500Gi"},
    )
    made = engine_pod(instance(owner), owner, SETTINGS, startup_s=1.0)
    golden("manifests/vllm-pod.yaml", yaml.safe_dump(made, sort_keys=False, width=110))


def test_vllm_engine_gets_one_gpu_by_default() -> None:
    assert container(service())["resources"]["limits"]["nvidia.com/gpu"] == "1"
    cpu = {"hardware": {"resource": "cpu", "count": 2}}
    assert container(service(cpu))["resources"]["requests"]["cpu"] == "2"


def test_pod_requests_and_limits_what_the_engine_needs_besides_its_devices() -> None:
    made = engine_pod(instance(owner := service(modelSource={"pvc": "m"})), owner, SETTINGS, startup_s=1.0)
    assert made["spec"]["containers"][0]["resources"] == {
        "requests": {"cpu": "3", "memory": "8Gi", "ephemeral-storage": "5Gi", "nvidia.com/gpu": "1"},
        "limits": {"cpu": "12", "memory": "24Gi", "ephemeral-storage": "22Gi", "nvidia.com/gpu": "1"},
    }
    volumes = {volume["name"]: volume.get("emptyDir") for volume in made["spec"]["volumes"]}
    assert (volumes["tmp"], volumes["shared-memory"]) == (
        {"sizeLimit": "20Gi"},
        {"medium": "Memory", "sizeLimit": "8Gi"},
    )


def test_the_template_of_a_pool_overrides_single_resources() -> None:
    engine = {"name": "engine", "resources": {"requests": {"memory": "100Gi"}, "limits": {"cpu": None}}}
    resources = container(service({"template": {"spec": {"containers": [engine]}}}))["resources"]
    assert (resources["requests"]["memory"], resources["requests"]["cpu"]) == ("100Gi", "3")
    assert "cpu" not in resources["limits"]


@pytest.mark.parametrize("engine", [{"type": "vLLM", "image": "acme/vllm:1"}, {"type": "Simulated"}])
def test_references_to_secrets_reach_the_pod_without_their_values(engine: dict[str, Any]) -> None:
    sources = {
        "HF_TOKEN": {"secretKeyRef": {"name": "hub", "key": "token"}},
        "HTTPS_PROXY": {"configMapKeyRef": {"name": "site", "key": "proxy", "optional": True}},
        "NODE_IP": {"fieldRef": {"fieldPath": "status.hostIP"}},
    }
    env = [{"name": name, "valueFrom": source} for name, source in sources.items()]
    owner = service(engine={**engine, "env": env})
    assert [variable for variable in container(owner)["env"] if variable["name"] in sources] == env
    read = ModelReadRequest(instance(owner).spec.launch_spec, "key", 1)
    reader = model_reader_pod(read, owner, SETTINGS)["spec"]["containers"][0]
    assert reader["env"] == env[:2]


def test_lmcache_engine_is_started_for_the_role_of_its_instance() -> None:
    owner = service(
        {"hardware": {"resource": "nvidia.com/gpu", "type": "H100-SXM"}},
        kvTransfer={"connector": "LMCache", "bufferSize": "2Gi"},
    )
    assert desired_pools(owner, ())[0].spec.role_fixed_at_start
    roles = {role: container(owner, role)["args"][-1] for role in ("Prefill", "Decode")}
    assert '"lmcache.pd_role":"sender"' in roles["Prefill"]
    assert '"lmcache.pd_proxy_host":"chat.default.svc"' in roles["Prefill"]
    assert '"lmcache.pd_role":"receiver"' in roles["Decode"]
    assert '"lmcache.pd_peer_host":"$(POD_IP)"' in roles["Decode"]


def test_pod_of_an_unsupported_engine_is_refused_with_a_reason() -> None:
    with pytest.raises(InvalidInput) as refused:
        container(service({"settings": {"sleepMode": True}}))
    assert str(refused.value) == (
        "spec.engine (vLLM) cannot be started: "
        "sleepMode with NIXL: vLLM 0.32.0 does not register KV memory after waking"
    )


def test_image_defaults_to_vllms_own_on_nvidia_and_is_required_elsewhere() -> None:
    plain = {"engine": {"type": "vLLM"}}
    assert container(service(**plain))["image"] == "docker.io/vllm/vllm-openai:v0.32.0"
    with pytest.raises(InvalidInput) as refused:
        container(service({"hardware": {"resource": "cpu", "count": 2}}, **plain))
    assert str(refused.value) == "spec.engine.image (missing) is needed: there is no default for CPU"


def test_default_images_of_the_installation_replace_fulcrums() -> None:
    images = EngineImages(nvidia="mirror/vllm@sha256:01", cpu="mirror/cpu:2", simulated="mirror/engine:3")
    settings = replace(SETTINGS, engine_images=images)

    def image(**spec: Any) -> Any:
        owner = service(**{"engine": {"type": "vLLM"}, **spec})
        return engine_pod(instance(owner), owner, settings, startup_s=1.0)["spec"]["containers"][0]["image"]

    cpu = [{"name": "flex", "instances": {"min": 2}, "hardware": {"resource": "cpu"}}]
    assert (image(), image(pools=cpu), image(engine={"type": "Simulated"})) == (
        "mirror/vllm@sha256:01",
        "mirror/cpu:2",
        "mirror/engine:3",
    )
    assert image(engine={"type": "vLLM", "image": "own:4"}) == "own:4"


def test_image_that_a_pool_was_created_with_stays_when_the_default_changes() -> None:
    owner = service(engine={"type": "vLLM"})
    made = instance(owner)
    kept = made.replace(spec=made.spec.model_copy(update={"default_image": "vllm/vllm-openai:v0.1.0"}))
    pod = engine_pod(kept, owner, SETTINGS, startup_s=1.0)
    assert pod["spec"]["containers"][0]["image"] == "vllm/vllm-openai:v0.1.0"


def test_mirror_of_the_hub_reaches_engines_and_the_model_reader() -> None:
    settings = replace(SETTINGS, hub_endpoint="https://hub.example")

    def endpoints(**spec: Any) -> list[str]:
        owner = service(**spec)
        read = ModelReadRequest(instance(owner).spec.launch_spec, "key", 1)
        pods = (
            engine_pod(instance(owner), owner, settings, startup_s=1.0),
            model_reader_pod(read, owner, settings),
        )
        env = [variable for pod in pods for variable in pod["spec"]["containers"][0]["env"]]
        return [variable["value"] for variable in env if variable["name"] == "HF_ENDPOINT"]

    own = [{"name": "HF_ENDPOINT", "value": "https://own.example"}]
    assert endpoints() == ["https://hub.example"] * 2
    assert endpoints(engine={"type": "vLLM", "env": own}) == ["https://own.example"] * 2
    assert endpoints(modelSource={"pvc": "models"}) == []


def test_expected_identity_and_startup_equal_those_of_the_launch() -> None:
    owner = service()
    request = vllm_launch_request(instance(owner), owner)
    launch = plan_engine(request, POD_PLACEMENT).launch
    assert launch is not None
    assert expected_identity_and_startup_s(request, POD_PLACEMENT) == (launch.identity, launch.startup_s)


def test_only_engines_of_the_service_reach_the_transfer_ports_of_a_vllm_engine() -> None:
    policies = [
        child
        for child in service_children(service(), SETTINGS, min_available=2)
        if child["kind"] == "NetworkPolicy"
    ]
    engines = next(policy for policy in policies if policy["metadata"]["name"] == "chat-engines")
    selector = engines["spec"]["podSelector"]
    http, peers = engines["spec"]["ingress"]
    assert http["ports"] == [{"port": 8000, "protocol": "TCP"}]
    assert peers == {"from": [{"podSelector": selector}]}


def mounted(spec: dict[str, Any]) -> dict[str, Any]:
    """Source of the volume at each mount point of the pod's container, but of those that every pod has."""
    sources = {volume.pop("name"): volume for volume in spec.get("volumes", ())}
    mounts = spec["containers"][0]["volumeMounts"]
    return {
        each["mountPath"]: (sources[each["name"]], each.get("readOnly", False))
        for each in mounts
        if each["name"] not in ("tmp", "shared-memory")
    }


def test_a_model_in_an_image_is_mounted_by_engines_and_the_model_reader() -> None:
    owner = service(modelSource={"image": "registry.example/llama@sha256:01", "path": "llama"})
    engine = engine_pod(instance(owner), owner, SETTINGS, startup_s=1.0)["spec"]
    image = {"image": {"reference": "registry.example/llama@sha256:01", "pullPolicy": "IfNotPresent"}}
    assert mounted(engine) == mounted(reader(owner)) == {"/models": (image, True)}
    assert engine["containers"][0]["args"][0] == "/models/llama"
    assert reader(owner)["containers"][0]["args"] == ["--folder", "/models/llama"]


@pytest.mark.parametrize(
    ("downloads", "volume"),
    [
        ({"pvc": "models"}, {"persistentVolumeClaim": {"claimName": "models", "readOnly": False}}),
        ({"hostPath": "/data/hub"}, {"hostPath": {"path": "/data/hub", "type": "Directory"}}),
    ],
    ids=["one download in total", "one download on each node"],
)
def test_engines_share_a_folder_for_downloads(downloads: dict[str, Any], volume: dict[str, Any]) -> None:
    owner = service(modelSource={"downloads": downloads})
    pod = engine_pod(instance(owner), owner, SETTINGS, startup_s=1.0)["spec"]
    env = {each["name"]: each.get("value") for each in pod["containers"][0]["env"]}
    assert pod["containers"][0]["args"][0] == "acme/model"
    assert (mounted(pod), env["HF_HUB_CACHE"]) == ({"/var/cache/hub": (volume, False)}, "/var/cache/hub")
    assert "HF_HUB_OFFLINE" not in env


def test_the_key_of_the_hub_token_can_be_chosen() -> None:
    owner = service(modelSource={"tokenSecret": "hub", "tokenKey": "read"})
    source = {"secretKeyRef": {"name": "hub", "key": "read"}}
    for pod in (container(owner), reader(owner)["containers"][0]):
        assert {"name": "HF_TOKEN", "valueFrom": source} in pod["env"]


def reader(owner: PDService) -> dict[str, Any]:
    read = ModelReadRequest(instance(owner).spec.launch_spec, "key", 1)
    spec: dict[str, Any] = model_reader_pod(read, owner, SETTINGS)["spec"]
    return spec


@pytest.mark.parametrize(
    ("pool", "keys"),
    [
        ({}, ["nvidia.com/gpu"]),
        ({"hardware": {"resource": "amd.com/gpu"}}, ["amd.com/gpu"]),
        ({"hardware": {"resource": "cpu"}}, []),
        ({"template": {"spec": {"tolerations": [{"key": "own"}]}}}, ["nvidia.com/gpu", "own"]),
    ],
    ids=["a GPU", "another device", "CPUs", "with a template"],
)
def test_engines_and_the_model_reader_tolerate_the_same_taints(pool: dict[str, Any], keys: list[str]) -> None:
    owner = service(pool)
    engine = engine_pod(instance(owner), owner, SETTINGS, startup_s=1.0)["spec"]
    found = [sorted(t["key"] for t in spec.get("tolerations", [])) for spec in (engine, reader(owner))]
    assert found == [keys, keys]


def with_ipc_lock(**context: Any) -> PDService:
    added = {"capabilities": {"add": ["IPC_LOCK"]}, **context}
    return service({"template": {"spec": {"containers": [{"name": "engine", "securityContext": added}]}}})


def test_a_stored_template_with_ipc_lock_starts_a_pod_all_the_same() -> None:
    assert container(with_ipc_lock())["securityContext"]["capabilities"]["add"] == ["IPC_LOCK"]


def startup_budget_s(**spec: Any) -> int:
    probe = container(service(**spec))["startupProbe"]
    return int(probe["periodSeconds"] * probe["failureThreshold"])


def test_a_real_engine_may_take_half_an_hour_to_start() -> None:
    assert startup_budget_s(modelSource={"pvc": "models"}) >= 1800


def test_peers_of_the_installation_may_scrape_engines() -> None:
    monitoring = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}
    callers = [
        rule["from"]
        for settings in (SETTINGS, replace(SETTINGS, metrics_callers=(monitoring,)))
        for child in service_children(service(), settings, min_available=1)
        if child["kind"] == "NetworkPolicy" and child["metadata"]["name"] == "chat-engines"
        for rule in child["spec"]["ingress"]
        if rule.get("ports") == [{"port": 8000, "protocol": "TCP"}]
    ]
    assert [monitoring in allowed for allowed in callers] == [False, True]
