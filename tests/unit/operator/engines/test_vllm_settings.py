"""Settings of an engine follow from the manifest, else from model, hardware, role and SLO."""

import json
from dataclasses import replace
from typing import Any

import pytest

from fulcrum_core.api.engine import (
    EngineSettingsSpec,
    KvCacheSpec,
    KvTransferSpec,
    ModelSourceSpec,
    ParallelismSpec,
    QuantizationSpec,
)
from fulcrum_core.api.env import EnvVar
from fulcrum_core.hardware import Fabric, HardwareFacts, resolve_hardware
from fulcrum_core.kv_compatibility import can_transfer
from fulcrum_core.models import step_costs_s
from fulcrum_core.values import KV_LEASE_S, FlipStrategy, Role, Slo
from fulcrum_operator.engines.launch import EnginePlacement
from fulcrum_operator.engines.launch_request import LaunchRequest
from fulcrum_operator.engines.vllm import POD_PLACEMENT, plan_engine
from fulcrum_operator.engines.vllm.connectors import kv_lease_s, longest_transfer_s
from fulcrum_operator.engines.vllm.ucx import ucx_environment
from tests.unit.operator.engine_cases import (
    LEFT_TO_ENGINE,
    chosen_value,
    fixture_facts,
    make_launch_request,
    plan_launch,
)

LOCAL_PLACEMENT = EnginePlacement(
    host="127.0.0.1",
    port=8101,
    side_channel_port=8102,
    cache_port=8103,
    cache_http_port=8104,
    program=("/engine/bin/vllm",),
    model_folder="",
    loopback=True,
)
LMCACHE = KvTransferSpec.model_validate({"connector": "LMCache"})


@pytest.mark.parametrize(
    ("model", "device", "kv", "expected"),
    [
        pytest.param("llama-3.1-8b", "H100-SXM", "auto", "FLASH_ATTN", id="Hopper"),
        pytest.param("llama-3.1-8b", "H100-SXM", "fp8", "FLASH_ATTN", id="Hopper reads FP8 KV"),
        pytest.param("llama-3.1-8b", "B200", "auto", "FLASHINFER", id="Blackwell"),
        pytest.param("llama-3.1-8b", "A100-80GB", "auto", "FLASH_ATTN", id="Ampere"),
        pytest.param("llama-3.1-8b", "L4", "fp8", "FLASHINFER", id="FP8 KV before Hopper"),
        pytest.param("deepseek-v3", "H200-SXM", "auto", "FLASHMLA", id="latent on Hopper"),
        pytest.param("deepseek-v3", "B200", "fp8", "CUTLASS_MLA", id="latent on Blackwell"),
        pytest.param("deepseek-v3", "A100-80GB", "auto", "TRITON_MLA", id="latent before Hopper"),
        pytest.param("gpt-oss-20b", "A100-80GB", "auto", LEFT_TO_ENGINE, id="windows before Hopper"),
        pytest.param("llama-3.1-8b", "MI300X", "auto", LEFT_TO_ENGINE, id="AMD"),
        pytest.param("tiny-llama", "CPU", "auto", LEFT_TO_ENGINE, id="CPU"),
    ],
)
def test_attention_backend_follows_from_model_device_and_kv_precision(
    model: str, device: str, kv: str, expected: str
) -> None:
    quantization = QuantizationSpec.model_validate({"kvCache": kv})
    assert (
        chosen_value(make_launch_request(model, device, quantization=quantization), "attentionBackend")
        == expected
    )


def test_kv_moves_in_blocks_of_128_where_kernels_can_read_them() -> None:
    assert chosen_value(make_launch_request(), "blockSize") == "128"
    assert chosen_value(make_launch_request("deepseek-v3", "H200-SXM"), "blockSize") == "128"
    assert chosen_value(make_launch_request("deepseek-v3", "CPU"), "blockSize") == "16"


def test_step_tokens_are_the_most_that_fit_the_tpot_objective() -> None:
    launch_request = make_launch_request("llama-3.1-8b")
    fixed_s, token_s = step_costs_s(
        fixture_facts("llama-3.1-8b"), launch_request.hardware, launch_request.layout
    )
    tokens = int(chosen_value(launch_request, "maxBatchedTokens") or 0)
    assert fixed_s + tokens * token_s <= launch_request.slo.tpot_s < fixed_s + (tokens + 128) * token_s


@pytest.mark.parametrize(
    ("tpot_s", "expected"),
    [
        pytest.param(0.001, "256", id="at least the smallest useful step"),
        pytest.param(0.05, "1280", id="as many as the TPOT allows"),
        pytest.param(10.0, "8192", id="at most the step of a prefill pool"),
    ],
)
def test_a_looser_tpot_allows_larger_steps_within_bounds(tpot_s: float, expected: str) -> None:
    assert chosen_value(make_launch_request(slo=Slo(1.0, tpot_s)), "maxBatchedTokens") == expected


def test_prefill_pool_takes_large_steps_and_decode_pool_keeps_the_tpot() -> None:
    sizes = {
        role: chosen_value(make_launch_request(pool_role=role), "maxBatchedTokens")
        for role in ("Prefill", "Decode")
    }
    assert sizes == {"Prefill": "8192", "Decode": "1280"}


def test_engine_started_for_prefill_takes_large_steps() -> None:
    launch_request = make_launch_request(kv_transfer=LMCACHE)
    sizes = [
        chosen_value(replace(launch_request, role=role), "maxBatchedTokens")
        for role in (Role.PREFILL, Role.DECODE)
    ]
    assert sizes == ["8192", "1280"]


@pytest.mark.parametrize(
    ("quantization", "device", "twice"),
    [
        pytest.param("fp8", "H100-SXM", True, id="FP8 on Hopper"),
        pytest.param("fp8", "A100-80GB", False, id="FP8 on Ampere is converted to 16 bits"),
        pytest.param("awq", "H100-SXM", False, id="four bits are converted to 16 bits"),
        pytest.param("", "H100-SXM", False, id="16 bits"),
    ],
)
def test_a_token_costs_half_where_the_device_multiplies_in_eight_bits(
    quantization: str, device: str, twice: bool
) -> None:
    bits = {"fp8": 8.0, "awq": 4.5, "": 16.0}[quantization]
    llama, launch_request = fixture_facts("llama-3.1-8b"), make_launch_request(device=device)
    quantised = replace(llama, quantization=quantization, weight_bits=bits)
    _, plain_s = step_costs_s(llama, launch_request.hardware, launch_request.layout)
    _, token_s = step_costs_s(quantised, launch_request.hardware, launch_request.layout)
    assert token_s == plain_s / (2 if twice else 1)


def test_step_cost_counts_the_same_weight_bytes_as_the_fit() -> None:
    spread = ParallelismSpec(tensor=1, data=8, expert=True)
    launch_request = make_launch_request("deepseek-v3", "H200-SXM", parallelism=spread, devices=8)
    fixed_s, _ = step_costs_s(fixture_facts("deepseek-v3"), launch_request.hardware, launch_request.layout)
    assert fixed_s * 4.8e12 * 0.7 == pytest.approx(plan_launch(launch_request).fit.device_weight_bytes or 0)


def test_step_has_at_least_one_token_for_each_allowed_request() -> None:
    many = make_launch_request(device="L4", settings=EngineSettingsSpec(max_sequences=512))
    assert (chosen_value(many, "maxBatchedTokens"), chosen_value(many, "maxSequences")) == ("512", "512")


def test_a_cpu_has_room_for_one_request_of_the_longest_context() -> None:
    llama, tiny = make_launch_request("llama-3.1-8b", "CPU"), make_launch_request("tiny-llama", "CPU")
    assert chosen_value(llama, "kvMemory") == "16.0 GiB"  # 131,072 tokens of 128 KiB, plus the reserved block
    assert chosen_value(tiny, "kvMemory") == "64 MiB"
    limited = replace(llama, model_source=ModelSourceSpec(max_length=8192))
    assert chosen_value(limited, "kvMemory") == "4.0 GiB"
    assert chosen_value(make_launch_request(), "kvMemory") is None


def test_sleep_mode_turns_on_vllms_development_endpoints() -> None:
    sleep_mode_request = make_launch_request(
        kv_transfer=LMCACHE, role=Role.DECODE, settings=EngineSettingsSpec(sleep_mode=True)
    )
    launch = plan_launch(sleep_mode_request).launch
    assert launch is not None
    assert "--enable-sleep-mode" in launch.command
    assert ("VLLM_SERVER_DEV_MODE", "1") in [(v.name, v.value) for v in launch.env]
    awake = plan_launch(make_launch_request()).launch
    assert awake is not None
    assert "VLLM_SERVER_DEV_MODE" not in [v.name for v in awake.env]


def lmcache_config(launch_request: LaunchRequest) -> dict[str, Any]:
    """Configuration of LMCache in the engine."""
    launch = plan_launch(launch_request).launch
    assert launch is not None
    config: dict[str, Any] = json.loads(launch.command[-1])["kv_connector_extra_config"]
    return config


def test_lmcache_sender_splits_its_tiers_over_its_ranks_and_receiver_has_none() -> None:
    tiers = KvCacheSpec.model_validate({"cpu": "32Gi", "disk": "100Gi"})
    launch_request = make_launch_request("llama-3.1-70b", devices=4, kv_transfer=LMCACHE, kv_cache=tiers)
    sender = lmcache_config(replace(launch_request, role=Role.PREFILL))
    assert (sender["lmcache.max_local_cpu_size"], sender["lmcache.max_local_disk_size"]) == (8.0, 25.0)
    receiver = lmcache_config(replace(launch_request, role=Role.DECODE))
    assert receiver["lmcache.local_cpu"] is False
    assert not {"lmcache.max_local_cpu_size", "lmcache.local_disk"} & set(receiver)


def test_lmcache_sender_gets_the_address_of_a_remote_tier_with_tls() -> None:
    tiers = KvCacheSpec.model_validate({"cpu": "8Gi", "remote": "rediss://kv.store.svc:6380"})
    sender = lmcache_config(make_launch_request(kv_transfer=LMCACHE, kv_cache=tiers, role=Role.PREFILL))
    assert sender["lmcache.remote_url"] == "rediss://kv.store.svc:6380"


def test_max_sequences_is_bounded_by_step_tokens_and_kv_room() -> None:
    assert (
        chosen_value(make_launch_request(settings=EngineSettingsSpec(max_batched_tokens=128)), "maxSequences")
        == "128"
    )
    assert chosen_value(make_launch_request(device="L4"), "maxSequences") == "26"


def test_all2all_backend_of_a_flexible_pool_serves_both_roles() -> None:
    spread = ParallelismSpec(tensor=1, data=8, expert=True)
    launch_request = make_launch_request("deepseek-v3", "H200-SXM", parallelism=spread, devices=8)
    found = {
        role: (chosen_value(request, "all2allBackend"), chosen_value(request, "microBatching"))
        for role in ("Flexible", "Prefill", "Decode")
        for request in (replace(launch_request, pool_role=role),)
    }
    assert found == {
        "Flexible": ("allgather_reducescatter", "false"),
        "Prefill": ("deepep_high_throughput", "true"),
        "Decode": ("deepep_low_latency", "true"),
    }


def test_tensor_parallel_size_defaults_to_all_devices() -> None:
    assert make_launch_request(devices=8).tensor == 8
    assert make_launch_request(devices=8, parallelism=ParallelismSpec(pipeline=2)).tensor == 4
    assert make_launch_request(devices=8, parallelism=ParallelismSpec(tensor=2)).tensor == 2
    assert make_launch_request(devices=None).tensor == 1


def test_kv_lease_is_twice_the_sum_of_ttft_and_transfer_and_at_least_the_default() -> None:
    short, long = make_launch_request("tiny-llama"), make_launch_request("llama-3.1-70b", slo=Slo(10.0, 0.05))
    assert kv_lease_s(short) == KV_LEASE_S
    assert kv_lease_s(long) == 55  # 2 × (10 s + 40 GiB at 2.5 GB/s)
    assert longest_transfer_s(long) == pytest.approx(17.2, abs=0.05)


def test_transfer_buffer_of_a_rank_is_taken_off_its_gpu_memory() -> None:
    decode_request = make_launch_request(
        "llama-3.1-70b",
        devices=4,
        role=Role.DECODE,
        kv_transfer=LMCACHE,
    )
    assert decode_request.buffer_bytes == 10 * 2**30
    launch = plan_launch(decode_request).launch
    assert launch is not None
    assert launch.command[launch.command.index("--gpu-memory-utilization") + 1] == "0.77"
    assert launch.flip_strategy is FlipStrategy.RESTART


@pytest.mark.parametrize("fabric", Fabric)
@pytest.mark.parametrize("device", ["H100-SXM", "MI300X", "CPU"])
def test_ucx_lists_tcp_last_and_the_fabric_before_it(fabric: Fabric, device: str) -> None:
    hardware = replace(resolve_hardware(device), fabric=fabric)
    variables = {v.name: v.value for v in ucx_environment(hardware, devices=None, loopback=False)}
    transports = variables["UCX_TLS"].split(",")
    assert transports[-3:] == ["tcp", "sm", "self"]
    assert ("rc" in transports) == (fabric in _RDMA or (fabric is Fabric.AUTO and device != "CPU"))
    assert ("UCX_RNDV_THRESH" in variables) == ("rc" in transports)


_RDMA = (Fabric.INFINIBAND, Fabric.ROCE)


def test_instances_on_one_machine_transfer_kv_over_loopback() -> None:
    launch = plan_engine(make_launch_request("tiny-llama", "CPU"), LOCAL_PLACEMENT).launch
    assert launch is not None
    env = {variable.name: variable.value for variable in launch.env}
    assert {name: env[name] for name in ("UCX_TLS", "UCX_NET_DEVICES", "VLLM_LOOPBACK_IP")} == {
        "UCX_TLS": "tcp,sm,self",
        "UCX_NET_DEVICES": "lo",
        "VLLM_LOOPBACK_IP": "127.0.0.1",
    }
    assert launch.command[:2] == ("/engine/bin/vllm", "serve")
    assert "POD_IP" not in env


def test_no_engine_id_is_set_and_a_failed_kv_load_is_recomputed() -> None:
    for connector in ("NIXL", "NIXLWithLMCache", "LMCache"):
        spec = KvTransferSpec.model_validate({"connector": connector})
        launch = plan_launch(make_launch_request(kv_transfer=spec, role=Role.PREFILL)).launch
        assert launch is not None
        assert "engine_id" not in launch.command[-1]
        assert '"kv_load_failure_policy":"recompute"' in launch.command[-1]


def test_user_arguments_and_variables_override_ours() -> None:
    launch_request = make_launch_request(
        args=("--seed", "7"), env=(EnvVar(name="PYTHONHASHSEED", value="1"), EnvVar(name="A", value="b"))
    )
    launch = plan_launch(launch_request).launch
    assert launch is not None
    assert launch.command[-2:] == ("--seed", "7")
    assert [(v.name, v.value) for v in launch.env if v.name in ("PYTHONHASHSEED", "A")] == [
        ("PYTHONHASHSEED", "1"),
        ("A", "b"),
    ]


def identity_of(launch_request: LaunchRequest) -> Any:
    launch = plan_launch(launch_request).launch
    assert launch is not None
    return launch.identity.to_identity()


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        pytest.param(
            make_launch_request(settings=EngineSettingsSpec(block_size=64)),
            "block size differs: prefill has 128, decode has 64",
            id="block size",
        ),
        pytest.param(
            make_launch_request(quantization=QuantizationSpec.model_validate({"kvCache": "fp8"})),
            "KV data type differs: prefill has auto, decode has fp8",
            id="KV data type",
        ),
        pytest.param(
            make_launch_request(device="B200"),
            "attention back end differs: prefill has FLASH_ATTN, decode has FLASHINFER",
            id="attention back end of another device",
        ),
        pytest.param(
            replace(make_launch_request(), version="0.33.0"),
            "engine differs: prefill has vllm 0.32.0, decode has vllm 0.33.0",
            id="engine version",
        ),
    ],
)
def test_pools_that_cannot_exchange_kv_are_found_before_they_start(other: LaunchRequest, reason: str) -> None:
    verdict = can_transfer(identity_of(make_launch_request()), identity_of(other))
    assert (verdict.allowed, verdict.reason) == (False, reason)


def test_instances_that_differ_only_in_addresses_have_one_identity() -> None:
    launch_request = make_launch_request("tiny-llama", "CPU")
    plans = (
        plan_engine(launch_request, POD_PLACEMENT),
        plan_engine(launch_request, replace(LOCAL_PLACEMENT, model_folder="/models")),
    )
    first, second = (made.launch.identity for made in plans if made.launch)
    assert first == second


def test_unknown_device_leaves_settings_to_the_engine() -> None:
    unknown: HardwareFacts = resolve_hardware(resource="nvidia.com/gpu")
    launch_request = replace(make_launch_request(), hardware=unknown)
    assert chosen_value(launch_request, "attentionBackend") == LEFT_TO_ENGINE
    assert chosen_value(launch_request, "maxBatchedTokens") == LEFT_TO_ENGINE
    assert plan_launch(launch_request).fit.reason == "HardwareUnknown"


def test_a_start_includes_the_download_from_the_hub() -> None:
    startups_s = [
        launch.startup_s
        for source in (ModelSourceSpec(pvc="models"), ModelSourceSpec())
        if (launch := plan_engine(make_launch_request(model_source=source), POD_PLACEMENT).launch) is not None
    ]
    assert startups_s == [69, 150]
