"""Process specs of vLLM engines of a local run, with an engine environment of empty files."""

from pathlib import Path
from typing import Any

import pytest

from fulcrum_cli.local.engine_environment import ENVIRONMENT_VARIABLE, find_engine_environment
from fulcrum_cli.local.engines import (
    EngineContext,
    build_process_spec,
    engine_facts,
    expected_startup_s,
    find_free_ports,
)
from fulcrum_cli.local.local_engine import LocalEngine, replace_engine, simulate_unless_named
from fulcrum_cli.local.preflight import check_manifest
from fulcrum_core.api import PDInstance, PDInstanceSpec, PDService
from fulcrum_core.errors import InvalidInput
from fulcrum_core.kv_compatibility import can_transfer
from fulcrum_core.values import FlipStrategy
from fulcrum_operator.plan.pools import desired_pools
from tests.objects import make_object
from tests.paths import MODELS

MODEL = (MODELS / "llama-3.1-8b" / "config.json").read_text(encoding="utf-8")


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An engine environment with a program `vllm` and a model `tiny-model`."""
    for name, text in (("bin/vllm", ""), ("tiny-model/config.json", MODEL)):
        file = tmp_path / name
        file.parent.mkdir()
        file.write_text(text, encoding="utf-8")
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, str(tmp_path))
    return tmp_path


def service(**spec: Any) -> PDService:
    pools = [{"name": "flex", "instances": {"min": 2}}]
    given = {"model": "tiny-model", "engine": {"type": "vLLM"}, "pools": pools, **spec}
    return make_object(PDService, "chat", given)


def instance(owner: PDService, name: str = "chat-0") -> PDInstance:
    pool = desired_pools(owner, ())[0]
    launch_spec = {field: getattr(pool.spec, field) for field in type(pool.spec.launch_spec).model_fields}
    spec = PDInstanceSpec.model_construct(
        **launch_spec, service="chat", pool="chat-flex", revision="", role=None
    )
    return PDInstance.model_validate(
        {"metadata": {"name": name, "namespace": "default"}, "spec": spec.model_dump(by_alias=True)}
    )


def engine_context(owner: PDService, folder: Path) -> EngineContext:
    return EngineContext(service=owner, host="127.0.0.1", folder=folder)


def option(command: tuple[str, ...], name: str) -> str:
    return command[command.index(name) + 1]


def test_each_engine_starts_from_the_environment_on_its_own_ports(environment: Path, tmp_path: Path) -> None:
    owner = service()
    specs = [
        build_process_spec(instance(owner, name), engine_context(owner, tmp_path))
        for name in ("chat-0", "chat-1")
    ]
    ports = [int(option(spec.command, "--port")) for spec in specs]
    assert [spec.command[1:6] for spec in specs] == [
        (
            "-m",
            "fulcrum_cli.local.exec_with_parent",
            f"{environment}/bin/vllm",
            "serve",
            f"{environment}/tiny-model",
        )
    ] * 2
    assert [spec.health_url for spec in specs] == [f"http://127.0.0.1:{port}/health" for port in ports]
    assert [spec.ports for spec in specs] == [
        {"port": port, "side_channel_port": int(spec.env["VLLM_NIXL_SIDE_CHANNEL_PORT"])}
        for port, spec in zip(ports, specs, strict=True)
    ]
    assert specs[0].env["HF_HUB_OFFLINE"] == "1"
    assert (specs[0].ready_timeout_s, specs[0].leftover_files) == (300.0, ())


@pytest.mark.usefixtures("environment")
def test_a_model_path_is_joined_to_its_host_path_as_in_a_pod(tmp_path: Path) -> None:
    owner = service(model="acme/model", modelSource={"hostPath": str(tmp_path), "path": "tiny-model"})
    spec = build_process_spec(instance(owner), engine_context(owner, tmp_path))
    assert spec.command[spec.command.index("serve") + 1] == f"{tmp_path}/tiny-model"


def test_engines_of_one_service_have_compatible_identities(environment: Path, tmp_path: Path) -> None:
    owner = service()
    one, other = (engine_facts(instance(owner, name), engine_context(owner, tmp_path)) for name in ("a", "b"))
    assert can_transfer(one.identity.to_identity(), other.identity.to_identity()).allowed
    assert (one.identity.model, one.flip_strategy) == (f"{environment}/tiny-model", FlipStrategy.RELABEL)
    assert expected_startup_s(owner) == one.startup_s


@pytest.mark.parametrize(
    ("memory", "expected"),
    [
        pytest.param({}, ("Unknown", "HardwareUnknown"), id="the spec names no memory"),
        pytest.param({"memory": "64Gi"}, ("True", "Fits"), id="enough memory"),
        pytest.param({"memory": "2Gi"}, ("False", "WeightsTooLarge"), id="less memory than the weights need"),
    ],
)
@pytest.mark.usefixtures("environment")
def test_the_model_fit_follows_from_the_memory_in_the_spec(
    tmp_path: Path, memory: dict[str, str], expected: tuple[str, str]
) -> None:
    pool = {"name": "flex", "instances": {"min": 2}, "hardware": {"resource": "cpu", **memory}}
    owner = service(pools=[pool])
    fit = engine_facts(instance(owner), engine_context(owner, tmp_path)).fit
    assert fit is not None
    assert (fit.status, fit.reason) == expected


@pytest.mark.usefixtures("environment")
def test_a_cache_server_has_its_own_ports_and_its_shared_memory_is_removed(tmp_path: Path) -> None:
    owner = service(kvTransfer={"connector": "NIXLWithLMCache"}, kvCache={"cpu": "256Mi"})
    first, second = (build_process_spec(instance(owner), engine_context(owner, tmp_path)) for _ in range(2))
    config = option(first.command, "--kv-transfer-config")
    (left,) = first.leftover_files
    port = left.name.rpartition("_")[2]
    assert left.parent == Path("/dev/shm")
    assert f'"lmcache.mp.port":{port},' in config
    assert first.leftover_files != second.leftover_files


@pytest.mark.parametrize(
    ("spec", "refusal"),
    [
        pytest.param(
            {"pools": [{"name": "p", "instances": {"min": 2}, "hardware": {"resource": "nvidia.com/gpu"}}]},
            "hardware.resource (nvidia.com/gpu) is not available to a local run; write cpu",
            id="a local run has CPUs",
        ),
        pytest.param(
            {"modelSource": {"pvc": "models"}},
            "modelSource.pvc (models) exists in a cluster only; write hostPath",
            id="a claim exists in a cluster only",
        ),
        pytest.param(
            {"modelSource": {"image": "acme/model:1"}},
            "modelSource.image (acme/model:1) exists in a cluster only; write hostPath",
            id="a model in an image exists in a cluster only",
        ),
        pytest.param(
            {"pools": [{"name": "p", "instances": {"min": 2}, "quantization": {"weights": "fp8"}}]},
            "spec.engine (vLLM) cannot be started: weights fp8: CPUs run the checkpoint's own data type",
            id="an option that the adapter refuses",
        ),
    ],
)
@pytest.mark.usefixtures("environment")
def test_a_local_run_refuses_a_spec_that_needs_a_cluster(spec: dict[str, Any], refusal: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        check_manifest((service(**spec),))
    assert str(refused.value) == refusal


def test_a_missing_engine_environment_is_refused_with_the_command_that_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, str(tmp_path))
    with pytest.raises(InvalidInput) as refused:
        find_engine_environment()
    assert str(refused.value) == (
        "spec.engine.type (vLLM) needs the engine environment on this machine; install it with `make engine`"
    )


def test_ports_are_distinct_and_below_the_ephemeral_range() -> None:
    ports = find_free_ports("127.0.0.1", 4)
    assert len(set(ports)) == 4
    assert all(20_000 <= port < 32_000 for port in ports)


def test_more_ports_than_are_free_are_refused() -> None:
    with pytest.raises(InvalidInput) as refused:
        find_free_ports("127.0.0.1", 2_000)
    assert str(refused.value).startswith("ports (2000) is more than")


def test_any_service_can_be_switched_to_vllm_cpu() -> None:
    pool = {"name": "flex", "instances": {"min": 3}, "hardware": {"resource": "nvidia.com/gpu"}}
    switched = replace_engine(
        service(model="acme/model", engine={"profile": "laptop"}, pools=[pool]), LocalEngine.VLLM_CPU
    )
    assert isinstance(switched, PDService)
    (kept,) = switched.spec.resolve_pools()
    assert (switched.spec.model, switched.spec.engine.type, kept.hardware, kept.instances.min) == (
        "tiny-model",
        "vLLM",
        None,
        3,
    )


@pytest.mark.parametrize(
    ("engine", "kind"),
    [({}, "Simulated"), ({"args": ["--x"], "image": "i:1"}, "Simulated"), ({"type": "vLLM"}, "vLLM")],
    ids=["no engine", "an engine without a type", "an engine with a type"],
)
def test_a_local_run_simulates_engines_unless_the_manifest_names_their_type(
    engine: dict[str, Any], kind: str
) -> None:
    pool = {"name": "flex", "instances": {"min": 3}, "hardware": {"resource": "nvidia.com/gpu"}}
    owner = make_object(PDService, "chat", {"model": "m", "engine": engine, "pools": [pool]})
    run = simulate_unless_named(owner)
    assert isinstance(run, PDService)
    assert (run.spec.engine.type, owner.spec.engine.type) == (kind, "vLLM")


def test_a_manifest_for_gpus_can_be_switched_to_simulated_engines() -> None:
    switched = replace_engine(service(engine={"type": "vLLM", "profile": "l8-h100"}), LocalEngine.SIMULATED)
    assert isinstance(switched, PDService)
    assert (switched.spec.engine.type, switched.spec.engine.profile) == ("Simulated", "l8-h100")
