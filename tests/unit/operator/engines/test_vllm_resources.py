"""CPU, memory and storage of a vLLM instance follow from the devices, the model and the tiers of kvCache."""

from dataclasses import replace
from typing import Any

import pytest

from fulcrum_core.api.engine import EngineSettingsSpec, KvCacheSpec, KvTransferSpec, ModelSourceSpec
from fulcrum_core.api.env import EnvVar
from fulcrum_core.hardware import resolve_hardware
from fulcrum_core.models import weight_bytes
from fulcrum_core.models.sizes import GIB
from fulcrum_operator.engines.launch import EngineResources
from fulcrum_operator.engines.launch_request import LaunchRequest
from tests.unit.operator.engine_cases import chosen_value, fixture_facts, make_launch_request, plan_launch

MOUNTED = ModelSourceSpec(pvc="models")
TIERS: dict[str, Any] = {
    "kv_transfer": KvTransferSpec.model_validate({"connector": "NIXLWithLMCache"}),
    "kv_cache": KvCacheSpec(cpu=64 * GIB, disk=500 * GIB),
}


def resources(launch_request: LaunchRequest) -> EngineResources:
    launch = plan_launch(launch_request).launch
    assert launch is not None
    return launch.resources


def test_an_engine_with_one_gpu_and_a_mounted_model() -> None:
    assert resources(make_launch_request(model_source=MOUNTED)) == EngineResources(
        cpu=3,
        cpu_limit=12,
        memory_bytes=8 * GIB,
        memory_limit_bytes=24 * GIB,
        shared_memory_bytes=8 * GIB,
        storage_bytes=5 * GIB,
        storage_limit_bytes=22 * GIB,
        temporary_limit_bytes=20 * GIB,
    )


def test_tiers_add_to_memory_shared_memory_and_storage() -> None:
    plain = resources(make_launch_request(model_source=MOUNTED))
    tiers = resources(make_launch_request(model_source=MOUNTED, **TIERS))
    assert (
        tiers.memory_bytes - plain.memory_bytes,
        tiers.memory_limit_bytes - plain.memory_limit_bytes,
        tiers.shared_memory_bytes - plain.shared_memory_bytes,
        tiers.storage_bytes - plain.storage_bytes,
    ) == (64 * GIB, 64 * GIB, 64 * GIB, 500 * GIB)


def test_a_model_at_the_hub_adds_its_download_to_the_storage() -> None:
    mounted = resources(make_launch_request(model_source=MOUNTED))
    downloaded = resources(make_launch_request())
    weights = weight_bytes(fixture_facts("llama-3.1-8b"))
    assert weights < downloaded.storage_bytes - mounted.storage_bytes <= 1.1 * weights + GIB
    assert downloaded.temporary_limit_bytes is not None
    assert downloaded.temporary_limit_bytes >= 20 * GIB + weights


def test_a_shared_folder_for_downloads_takes_nothing_from_the_pods_storage() -> None:
    shared = ModelSourceSpec.model_validate({"downloads": {"pvc": "models"}})
    mounted = resources(make_launch_request(model_source=MOUNTED))
    assert resources(make_launch_request(model_source=shared)) == mounted


def test_the_download_of_an_unknown_model_has_no_limit() -> None:
    unknown = resources(replace(make_launch_request(), facts=None))
    assert (unknown.storage_limit_bytes, unknown.temporary_limit_bytes) == (None, None)


def test_an_engine_that_may_sleep_has_room_for_its_weights() -> None:
    asleep: dict[str, Any] = {
        "settings": EngineSettingsSpec(sleep_mode=True),
        "kv_transfer": _lmcache(),
        "role": "Decode",
    }
    awake = resources(
        make_launch_request(model_source=MOUNTED, **{**asleep, "settings": EngineSettingsSpec()})
    )
    sleeping = resources(make_launch_request(model_source=MOUNTED, **asleep))
    assert sleeping.memory_bytes - awake.memory_bytes >= weight_bytes(fixture_facts("llama-3.1-8b"))


def _lmcache() -> KvTransferSpec:
    return KvTransferSpec.model_validate({"connector": "LMCache"})


def test_an_engine_on_cpus_holds_weights_and_kv_in_memory_and_has_the_cores_of_its_hardware() -> None:
    made = resources(make_launch_request("tiny-llama", "CPU", model_source=MOUNTED, cores=4))
    assert (made.cpu, made.memory_bytes, made.storage_bytes) == (4, 3 * GIB, GIB)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("cpu", "3, at most 12"),
        ("memory", "72.0 GiB, at most 88.0 GiB"),
        ("sharedMemory", "at most 72.0 GiB"),
        ("ephemeralStorage", "505.0 GiB, at most 522.0 GiB"),
    ],
)
def test_plan_shows_the_resources(name: str, value: str) -> None:
    assert chosen_value(make_launch_request(model_source=MOUNTED, **TIERS), name) == value


@pytest.mark.parametrize(
    ("args", "gib"),
    [
        pytest.param(("--cpu-offload-gb", "40"), 80, id="weights of both ranks"),
        pytest.param(("--swap_space=8",), 16, id="swap space of both ranks"),
        pytest.param(("--kv-offloading-size", "64"), 64, id="KV of all ranks"),
        pytest.param(("--cpu-offload-gb=10", "--cpu-offload-gb=20"), 40, id="the last one counts"),
        pytest.param(("--cpu-offload-gb", "much"), 0, id="no number"),
        pytest.param(("--cpu-offload-gb", "inf"), 0, id="no size"),
    ],
)
def test_memory_that_arguments_take_from_the_node_is_requested(args: tuple[str, ...], gib: int) -> None:
    plain = resources(make_launch_request(model_source=MOUNTED, devices=2))
    given = resources(make_launch_request(model_source=MOUNTED, devices=2, args=args))
    more = given.memory_bytes - plain.memory_bytes, given.memory_limit_bytes - plain.memory_limit_bytes
    assert more == (gib * GIB, 2 * gib * GIB)


def test_the_default_memory_tier_of_an_lmcache_server_is_requested() -> None:
    plain = resources(make_launch_request(model_source=MOUNTED))
    cached = resources(make_launch_request(model_source=MOUNTED, kv_transfer=TIERS["kv_transfer"]))
    assert (
        cached.memory_bytes - plain.memory_bytes,
        cached.shared_memory_bytes - plain.shared_memory_bytes,
    ) == (8 * GIB, 8 * GIB)


@pytest.mark.parametrize(
    ("variables", "memory", "storage"),
    [
        pytest.param({"LMCACHE_MAX_LOCAL_CPU_SIZE": "20"}, 40, 0, id="memory of both ranks"),
        pytest.param({"LMCACHE_MAX_LOCAL_CPU_SIZE": "much"}, 0, 0, id="no number"),
        pytest.param(
            {"LMCACHE_LOCAL_DISK": "file:///tmp/kv", "LMCACHE_MAX_LOCAL_DISK_SIZE": "50"},
            0,
            100,
            id="in /tmp",
        ),
        pytest.param(
            {"LMCACHE_LOCAL_DISK": "file:///scratch", "LMCACHE_MAX_LOCAL_DISK_SIZE": "50"},
            *(0, 0),
            id="on a volume of the template",
        ),
    ],
)
def test_what_variables_of_lmcache_take_from_the_node_is_requested(
    variables: dict[str, str], memory: int, storage: int
) -> None:
    env = tuple(EnvVar(name=name, value=value) for name, value in variables.items())
    plain = resources(make_launch_request(model_source=MOUNTED, devices=2))
    given = resources(make_launch_request(model_source=MOUNTED, devices=2, env=env))
    assert (
        given.memory_bytes - plain.memory_bytes,
        given.memory_limit_bytes - plain.memory_limit_bytes,
        given.storage_bytes - plain.storage_bytes,
        (given.temporary_limit_bytes or 0) - (plain.temporary_limit_bytes or 0),
    ) == (memory * GIB, 2 * memory * GIB, storage * GIB, storage * GIB)


@pytest.mark.parametrize(
    ("args", "env"),
    [
        (("--kv-cache-memory-bytes", str(40 * GIB)), ()),
        ((), (EnvVar(name="VLLM_CPU_KVCACHE_SPACE", value="40"),)),
    ],
    ids=["an argument", "a variable"],
)
def test_the_users_kv_cache_on_cpus_is_part_of_the_memory(
    args: tuple[str, ...], env: tuple[EnvVar, ...]
) -> None:
    cpus: dict[str, Any] = {"hardware": resolve_hardware("", resource="cpu"), "devices": None, "cores": 8}
    given = resources(make_launch_request(model_source=MOUNTED, args=args, env=env, **cpus))
    assert given.memory_bytes > 40 * GIB
