"""What is chosen for an engine follows from model, hardware and role; what cannot be is refused in words."""

import json
from dataclasses import replace
from typing import Any

import pytest

from fulcrum_core.api.engine import (
    KvCacheSpec,
    KvTransferSpec,
    ModelSourceSpec,
    ParallelismSpec,
    QuantizationSpec,
    SettingsSpec,
)
from fulcrum_core.hardware import Fabric, HardwareFacts, hardware_of
from fulcrum_core.transfer import can_transfer
from fulcrum_core.values import KV_LEASE_S, FlipStrategy, Role, Slo
from fulcrum_operator.engines.launch import Place
from fulcrum_operator.engines.request import EngineRequest
from fulcrum_operator.engines.vllm import POD, plan_engine
from fulcrum_operator.engines.vllm.connectors import lease_s, longest_transfer_s
from fulcrum_operator.engines.vllm.settings import step_costs
from fulcrum_operator.engines.vllm.ucx import ucx_environment
from tests.unit.operator.engine_cases import LEFT, chosen, facts_of, plan, request

LOCAL = Place(
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
        pytest.param("gpt-oss-20b", "A100-80GB", "auto", LEFT, id="windows before Hopper"),
        pytest.param("llama-3.1-8b", "MI300X", "auto", LEFT, id="AMD"),
        pytest.param("tiny-llama", "CPU", "auto", LEFT, id="CPU"),
    ],
)
def test_attention_follows_from_model_device_and_kv(model: str, device: str, kv: str, expected: str) -> None:
    quantization = QuantizationSpec.model_validate({"kvCache": kv})
    assert chosen(request(model, device, quantization=quantization), "attentionBackend") == expected


def test_kv_moves_in_blocks_of_128_where_kernels_can_read_them() -> None:
    assert chosen(request(), "blockSize") == "128"
    assert chosen(request("deepseek-v3", "H200-SXM"), "blockSize") == "128"
    assert chosen(request("deepseek-v3", "CPU"), "blockSize") == "16"


def test_the_tokens_of_a_step_come_from_the_slo() -> None:
    asked = request("llama-3.1-8b")
    fixed_s, token_s = step_costs(facts_of("llama-3.1-8b"), asked.hardware, asked.layout)
    tokens = int(chosen(asked, "maxBatchedTokens") or 0)
    assert fixed_s + tokens * token_s <= asked.slo.tpot_s < fixed_s + (tokens + 128) * token_s


@pytest.mark.parametrize(
    ("tpot_s", "expected"),
    [
        pytest.param(0.001, "256", id="never fewer than make sense"),
        pytest.param(0.05, "1280", id="what fits"),
        pytest.param(10.0, "8192", id="never more than a prefill pool takes"),
    ],
)
def test_a_looser_tpot_allows_larger_steps_within_bounds(tpot_s: float, expected: str) -> None:
    assert chosen(request(slo=Slo(1.0, tpot_s)), "maxBatchedTokens") == expected


def test_a_prefill_pool_takes_large_steps_and_a_decode_pool_those_of_the_slo() -> None:
    sizes = {role: chosen(request(pool_role=role), "maxBatchedTokens") for role in ("Prefill", "Decode")}
    assert sizes == {"Prefill": "8192", "Decode": "1280"}


def test_an_engine_that_is_started_to_prefill_takes_large_steps_until_it_is_started_again() -> None:
    asked = request(kv_transfer=LMCACHE)
    sizes = [chosen(replace(asked, role=role), "maxBatchedTokens") for role in (Role.PREFILL, Role.DECODE)]
    assert sizes == ["8192", "1280"]


@pytest.mark.parametrize(
    ("quantization", "device", "twice"),
    [
        pytest.param("fp8", "H100-SXM", True, id="FP8 on Hopper"),
        pytest.param("fp8", "A100-80GB", False, id="FP8 on Ampere is unpacked first"),
        pytest.param("awq", "H100-SXM", False, id="four bits are unpacked first"),
        pytest.param("", "H100-SXM", False, id="16 bits"),
    ],
)
def test_a_token_costs_half_where_the_device_multiplies_in_eight_bits(
    quantization: str, device: str, twice: bool
) -> None:
    bits = {"fp8": 8.0, "awq": 4.5, "": 16.0}[quantization]
    llama, asked = facts_of("llama-3.1-8b"), request(device=device)
    kept = replace(llama, quantization=quantization, weight_bits=bits)
    _, plain_s = step_costs(llama, asked.hardware, asked.layout)
    _, token_s = step_costs(kept, asked.hardware, asked.layout)
    assert token_s == plain_s / (2 if twice else 1)


def test_a_step_reads_the_weights_that_fit_says_a_device_holds() -> None:
    spread = ParallelismSpec(tensor=1, data=8, expert=True)
    asked = request("deepseek-v3", "H200-SXM", parallelism=spread, devices=8)
    fixed_s, _ = step_costs(facts_of("deepseek-v3"), asked.hardware, asked.layout)
    assert fixed_s * 4.8e12 * 0.7 == pytest.approx(plan(asked).fit.device_weight_bytes or 0)


def test_a_step_has_a_token_for_each_request_that_is_asked_for() -> None:
    many = request(device="L4", settings=SettingsSpec(max_sequences=512))
    assert (chosen(many, "maxBatchedTokens"), chosen(many, "maxSequences")) == ("512", "512")


def test_a_cpu_has_room_for_one_request_of_the_longest_context() -> None:
    short, long = request("llama-3.1-8b", "CPU"), request("tiny-llama", "CPU")
    assert chosen(short, "kvMemory") == "16.0 GiB"  # 131,072 tokens of 128 KiB, and a block
    assert chosen(long, "kvMemory") == "64 MiB"
    limited = replace(short, source=ModelSourceSpec(max_length=8192))
    assert chosen(limited, "kvMemory") == "4.0 GiB"
    assert chosen(request(), "kvMemory") is None


def test_the_doors_of_sleep_mode_are_opened_with_it() -> None:
    asleep = request(kv_transfer=LMCACHE, role=Role.DECODE, settings=SettingsSpec(sleep_mode=True))
    launch = plan(asleep).launch
    assert launch is not None
    assert "--enable-sleep-mode" in launch.command
    assert ("VLLM_SERVER_DEV_MODE", "1") in [(v.name, v.value) for v in launch.env]
    awake = plan(request()).launch
    assert awake is not None
    assert "VLLM_SERVER_DEV_MODE" not in [v.name for v in awake.env]


def lmcache_keys(asked: EngineRequest) -> dict[str, Any]:
    """What LMCache in the engine is told."""
    launch = plan(asked).launch
    assert launch is not None
    config: dict[str, Any] = json.loads(launch.command[-1])["kv_connector_extra_config"]
    return config


def test_tiers_of_lmcache_in_the_engine_are_a_senders_and_each_rank_has_its_share() -> None:
    tiers = KvCacheSpec.model_validate({"cpu": "32Gi", "disk": "100Gi"})
    asked = request("llama-3.1-70b", devices=4, kv_transfer=LMCACHE, kv_cache=tiers)
    sender = lmcache_keys(replace(asked, role=Role.PREFILL))
    assert (sender["lmcache.max_local_cpu_size"], sender["lmcache.max_local_disk_size"]) == (8.0, 25.0)
    receiver = lmcache_keys(replace(asked, role=Role.DECODE))
    assert receiver["lmcache.local_cpu"] is False
    assert not {"lmcache.max_local_cpu_size", "lmcache.local_disk"} & set(receiver)


def test_there_are_never_more_requests_than_tokens_in_a_step_or_room_for_kv() -> None:
    assert chosen(request(settings=SettingsSpec(max_batched_tokens=128)), "maxSequences") == "128"
    assert chosen(request(device="L4"), "maxSequences") == "26"


def test_experts_of_a_pool_that_flips_use_what_serves_both_phases() -> None:
    spread = ParallelismSpec(tensor=1, data=8, expert=True)
    asked = request("deepseek-v3", "H200-SXM", parallelism=spread, devices=8)
    found = {
        role: (chosen(one, "all2allBackend"), chosen(one, "microBatching"))
        for role in ("Flexible", "Prefill", "Decode")
        for one in (replace(asked, pool_role=role),)
    }
    assert found == {
        "Flexible": ("allgather_reducescatter", "false"),
        "Prefill": ("deepep_high_throughput", "true"),
        "Decode": ("deepep_low_latency", "true"),
    }


def test_unless_it_is_written_every_device_shares_each_layer() -> None:
    assert request(devices=8).tensor == 8
    assert request(devices=8, parallelism=ParallelismSpec(pipeline=2)).tensor == 4
    assert request(devices=8, parallelism=ParallelismSpec(tensor=2)).tensor == 2
    assert request(devices=None).tensor == 1


def test_a_lease_lasts_for_twice_the_wait_and_the_transfer_and_never_less_than_the_router_counts_on() -> None:
    short, long = request("tiny-llama"), request("llama-3.1-70b", slo=Slo(10.0, 0.05))
    assert lease_s(short) == KV_LEASE_S
    assert lease_s(long) == 55  # 2 × (10 s + 40 GiB at 2.5 GB/s)
    assert longest_transfer_s(long) == pytest.approx(17.2, abs=0.05)


def test_the_buffer_of_a_rank_is_its_share_and_comes_off_the_engines_memory() -> None:
    pushed = request(
        "llama-3.1-70b",
        devices=4,
        role=Role.DECODE,
        kv_transfer=LMCACHE,
    )
    assert pushed.buffer_bytes == 10 * 2**30
    launch = plan(pushed).launch
    assert launch is not None
    assert launch.command[launch.command.index("--gpu-memory-utilization") + 1] == "0.77"
    assert launch.strategy is FlipStrategy.RESTART


@pytest.mark.parametrize("fabric", Fabric)
@pytest.mark.parametrize("device", ["H100-SXM", "MI300X", "CPU"])
def test_tcp_is_always_there_and_the_fabric_before_it(fabric: Fabric, device: str) -> None:
    hardware = replace(hardware_of(device), fabric=fabric)
    variables = {v.name: v.value for v in ucx_environment(hardware, devices=None, loopback=False)}
    transports = variables["UCX_TLS"].split(",")
    assert transports[-3:] == ["tcp", "sm", "self"]
    assert ("rc" in transports) == (fabric in _RDMA or (fabric is Fabric.AUTO and device != "CPU"))
    assert ("UCX_RNDV_THRESH" in variables) == ("rc" in transports)


_RDMA = (Fabric.INFINIBAND, Fabric.ROCE)


def test_instances_of_one_machine_use_its_loopback() -> None:
    launch = plan_engine(request("tiny-llama", "CPU"), LOCAL).launch
    assert launch is not None
    env = {variable.name: variable.value for variable in launch.env}
    assert {name: env[name] for name in ("UCX_TLS", "UCX_NET_DEVICES", "VLLM_LOOPBACK_IP")} == {
        "UCX_TLS": "tcp,sm,self",
        "UCX_NET_DEVICES": "lo",
        "VLLM_LOOPBACK_IP": "127.0.0.1",
    }
    assert launch.command[:2] == ("/engine/bin/vllm", "serve")
    assert "POD_IP" not in env


def test_an_engine_id_is_never_pinned_and_a_failed_load_is_computed_again() -> None:
    for connector in ("NIXL", "NIXLWithLMCache", "LMCache"):
        spec = KvTransferSpec.model_validate({"connector": connector})
        launch = plan(request(kv_transfer=spec, role=Role.PREFILL)).launch
        assert launch is not None
        assert "engine_id" not in launch.command[-1]
        assert '"kv_load_failure_policy":"recompute"' in launch.command[-1]


def test_what_is_written_comes_last_and_over_what_is_made() -> None:
    asked = request(args=("--seed", "7"), env=(("PYTHONHASHSEED", "1"), ("A", "b")))
    launch = plan(asked).launch
    assert launch is not None
    assert launch.command[-2:] == ("--seed", "7")
    assert [(v.name, v.value) for v in launch.env if v.name in ("PYTHONHASHSEED", "A")] == [
        ("PYTHONHASHSEED", "1"),
        ("A", "b"),
    ]


def identity_of(asked: EngineRequest) -> Any:
    launch = plan(asked).launch
    assert launch is not None
    return launch.identity.value()


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        pytest.param(
            request(settings=SettingsSpec(block_size=64)),
            "block size differs: prefill has 128, decode has 64",
            id="blocks",
        ),
        pytest.param(
            request(quantization=QuantizationSpec.model_validate({"kvCache": "fp8"})),
            "kv dtype differs: prefill has auto, decode has fp8",
            id="KV in another type",
        ),
        pytest.param(
            request(device="B200"),
            "attention back end differs: prefill has FLASH_ATTN, decode has FLASHINFER",
            id="another device with other kernels",
        ),
        pytest.param(
            replace(request(), version="0.33.0"),
            "engine differs: prefill has vllm 0.32.0, decode has vllm 0.33.0",
            id="another version",
        ),
    ],
)
def test_pools_that_cannot_exchange_kv_are_told_apart_before_they_start(
    other: EngineRequest, reason: str
) -> None:
    verdict = can_transfer(identity_of(request()), identity_of(other))
    assert (verdict.allowed, verdict.reason) == (False, reason)


def test_instances_that_differ_in_addresses_only_are_of_one_identity() -> None:
    asked = request("tiny-llama", "CPU")
    plans = (plan_engine(asked, POD), plan_engine(asked, replace(LOCAL, model_folder="/models")))
    first, second = (made.launch.identity for made in plans if made.launch)
    assert first == second


def test_a_device_nobody_knows_leaves_choices_to_the_engine() -> None:
    unknown: HardwareFacts = hardware_of(resource="nvidia.com/gpu")
    asked = replace(request(), hardware=unknown)
    assert chosen(asked, "attentionBackend") == LEFT
    assert chosen(asked, "maxBatchedTokens") == LEFT
    assert plan(asked).fit.reason == "HardwareUnknown"
