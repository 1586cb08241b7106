"""Real engines of this machine: what a manifest becomes, with an environment that only looks like one."""

from pathlib import Path
from typing import Any

import pytest

from fulcrum_cli.local.engines import Around, engine_facts, engine_life, free_ports, startup_s
from fulcrum_cli.local.environment import VARIABLE, engine_environment
from fulcrum_cli.local.manifest import check_manifest
from fulcrum_cli.local.vllm_cpu import on_vllm_cpu
from fulcrum_core.api import PDInstance, PDInstanceSpec, PDService, parse_object
from fulcrum_core.errors import InvalidInput
from fulcrum_core.transfer import can_transfer
from fulcrum_core.values import FlipStrategy
from fulcrum_operator.plan.pools import desired_pools
from tests.paths import MODELS

MODEL = (MODELS / "llama-3.1-8b" / "config.json").read_text(encoding="utf-8")


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Holds a program `vllm` and a model `tiny-model`."""
    for name, text in (("bin/vllm", ""), ("tiny-model/config.json", MODEL)):
        file = tmp_path / name
        file.parent.mkdir()
        file.write_text(text, encoding="utf-8")
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    return tmp_path


def service(**spec: Any) -> PDService:
    pools = [{"name": "flex", "instances": {"min": 2}}]
    given = {"model": "tiny-model", "engine": {"type": "vLLM"}, "pools": pools, **spec}
    made = parse_object(
        {
            "apiVersion": "fulcrum.dev/v1alpha1",
            "kind": "PDService",
            "metadata": {"name": "chat"},
            "spec": given,
        }
    )
    assert isinstance(made, PDService)
    return made


def instance(owner: PDService, name: str = "chat-0") -> PDInstance:
    pool = desired_pools(owner, ())[0]
    start = {field: getattr(pool.spec, field) for field in type(pool.spec.start).model_fields}
    spec = PDInstanceSpec.model_construct(**start, service="chat", pool="chat-flex", revision="", role=None)
    return PDInstance.model_validate(
        {"metadata": {"name": name, "namespace": "default"}, "spec": spec.model_dump(by_alias=True)}
    )


def around(owner: PDService, folder: Path) -> Around:
    return Around(service=owner, host="127.0.0.1", folder=folder)


def option(command: tuple[str, ...], name: str) -> str:
    return command[command.index(name) + 1]


def test_an_engine_is_started_from_the_environment_with_ports_of_its_own(
    environment: Path, tmp_path: Path
) -> None:
    owner = service()
    lives = [engine_life(instance(owner, name), around(owner, tmp_path)) for name in ("chat-0", "chat-1")]
    ports = [int(option(life.command, "--port")) for life in lives]
    assert [life.command[1:6] for life in lives] == [
        (
            "-m",
            "fulcrum_cli.local.die_with_parent",
            f"{environment}/bin/vllm",
            "serve",
            f"{environment}/tiny-model",
        )
    ] * 2
    assert [life.health_url for life in lives] == [f"http://127.0.0.1:{port}/health" for port in ports]
    assert [life.ports for life in lives] == [
        {"port": port, "side_channel_port": int(life.env["VLLM_NIXL_SIDE_CHANNEL_PORT"])}
        for port, life in zip(ports, lives, strict=True)
    ]
    assert lives[0].env["HF_HUB_OFFLINE"] == "1"
    assert (lives[0].patience_s, lives[0].leaves) == (300.0, ())


@pytest.mark.usefixtures("environment")
def test_a_model_is_found_in_a_folder_of_the_path_as_in_a_pod(tmp_path: Path) -> None:
    owner = service(model="acme/model", modelSource={"hostPath": str(tmp_path), "path": "tiny-model"})
    life = engine_life(instance(owner), around(owner, tmp_path))
    assert life.command[life.command.index("serve") + 1] == f"{tmp_path}/tiny-model"


def test_what_is_known_of_engines_of_one_service_lets_them_hand_kv_over(
    environment: Path, tmp_path: Path
) -> None:
    owner = service()
    one, other = (engine_facts(instance(owner, name), around(owner, tmp_path)) for name in ("a", "b"))
    assert can_transfer(one.identity.value(), other.identity.value()).allowed
    assert (one.identity.model, one.strategy) == (f"{environment}/tiny-model", FlipStrategy.RELABEL)
    assert startup_s(owner) == one.startup_s


@pytest.mark.parametrize(
    ("memory", "expected"),
    [
        pytest.param({}, ("Unknown", "HardwareUnknown"), id="nobody says how much memory there is"),
        pytest.param({"memory": "64Gi"}, ("True", "Fits"), id="enough"),
        pytest.param({"memory": "2Gi"}, ("False", "WeightsTooLarge"), id="less than the engine itself takes"),
    ],
)
@pytest.mark.usefixtures("environment")
def test_whether_the_model_fits_follows_from_the_memory_that_is_written(
    tmp_path: Path, memory: dict[str, str], expected: tuple[str, str]
) -> None:
    pool = {"name": "flex", "instances": {"min": 2}, "hardware": {"resource": "cpu", **memory}}
    owner = service(pools=[pool])
    fit = engine_facts(instance(owner), around(owner, tmp_path)).fit
    assert fit is not None
    assert (fit.verdict, fit.reason) == expected


@pytest.mark.usefixtures("environment")
def test_a_cache_server_has_ports_of_its_own_and_leaves_no_memory(tmp_path: Path) -> None:
    owner = service(kvTransfer={"connector": "NIXLWithLMCache"}, kvCache={"cpu": "256Mi"})
    first, second = (engine_life(instance(owner), around(owner, tmp_path)) for _ in range(2))
    config = option(first.command, "--kv-transfer-config")
    (left,) = first.leaves
    port = left.name.rpartition("_")[2]
    assert left.parent == Path("/dev/shm")
    assert f'"lmcache.mp.port":{port},' in config
    assert first.leaves != second.leaves


@pytest.mark.parametrize(
    ("spec", "refusal"),
    [
        pytest.param(
            {"pools": [{"name": "p", "instances": {"min": 2}, "hardware": {"resource": "nvidia.com/gpu"}}]},
            "hardware.resource (nvidia.com/gpu) does not run locally: write cpu",
            id="a local run has CPUs",
        ),
        pytest.param(
            {"modelSource": {"pvc": "models"}},
            "modelSource.pvc (models) is of a cluster: write hostPath",
            id="a claim is of a cluster",
        ),
        pytest.param(
            {"pools": [{"name": "p", "instances": {"min": 2}, "quantization": {"weights": "fp8"}}]},
            "spec.engine (vLLM) cannot be started: weights fp8: CPUs run the checkpoint's own data type",
            id="what the adapter refuses is refused before a start",
        ),
    ],
)
@pytest.mark.usefixtures("environment")
def test_a_local_run_refuses_what_it_cannot_run(spec: dict[str, Any], refusal: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        check_manifest((service(**spec),))
    assert str(refused.value) == refusal


def test_without_an_environment_one_line_says_how_to_make_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    with pytest.raises(InvalidInput) as refused:
        engine_environment()
    assert (
        str(refused.value)
        == "spec.engine.type (vLLM) needs the engine environment: make engine makes it, once"
    )


def test_ports_are_free_and_below_those_that_connections_take() -> None:
    ports = free_ports("127.0.0.1", 4)
    assert len(set(ports)) == 4
    assert all(20_000 <= port < 32_000 for port in ports)


def test_any_service_can_be_had_on_vllm_for_cpus() -> None:
    pool = {"name": "flex", "instances": {"min": 3}, "hardware": {"resource": "nvidia.com/gpu"}}
    made = on_vllm_cpu(service(model="acme/model", engine={"profile": "laptop"}, pools=[pool]))
    assert isinstance(made, PDService)
    (kept,) = made.spec.resolved_pools()
    assert (made.spec.model, made.spec.engine.type, kept.hardware, kept.instances.min) == (
        "tiny-model",
        "vLLM",
        None,
        3,
    )
