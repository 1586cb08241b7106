"""Unsupported settings give a reason and no launch. If no usual kernel suits, the engine chooses one."""

from dataclasses import replace

import pytest

from fulcrum_core.api.engine import (
    EngineSettingsSpec,
    KvCacheSpec,
    KvTransferSpec,
    ParallelismSpec,
    QuantizationSpec,
)
from fulcrum_core.hardware import resolve_hardware
from fulcrum_core.values import Role
from fulcrum_operator.engines.launch_request import LaunchRequest
from tests.unit.operator.engine_cases import LEFT_TO_ENGINE, fixture_facts, make_launch_request, plan_launch

LMCACHE = KvTransferSpec.model_validate({"connector": "LMCache"})
TIERS = KvCacheSpec.model_validate({"cpu": "8Gi"})
UNSUPPORTED = [
    pytest.param(
        make_launch_request(kv_cache=TIERS),
        "kvCache needs the connector NIXLWithLMCache or LMCache: NIXL keeps no tiers",
        id="tiers without LMCache",
    ),
    pytest.param(
        make_launch_request(settings=EngineSettingsSpec(sleep_mode=True)),
        "sleepMode with NIXL: vLLM 0.32.0 does not register KV memory after waking",
        id="sleep mode with NIXL",
    ),
    pytest.param(
        make_launch_request("tiny-llama", "CPU", kv_transfer=LMCACHE, role=Role.PREFILL),
        "the connector LMCache needs a GPU: its in-process mode has no CPU kernels",
        id="LMCache on a CPU",
    ),
    pytest.param(
        make_launch_request(kv_transfer=LMCACHE),
        "the connector LMCache fixes the role at start, but the instance has no role",
        id="no role at start",
    ),
    pytest.param(
        replace(make_launch_request(kv_transfer=LMCACHE, role=Role.DECODE), facts=None),
        "kvTransfer.bufferSize is needed: the default depends on config.json, which was not read",
        id="transfer buffer of unknown size",
    ),
    pytest.param(
        make_launch_request(
            kv_transfer=LMCACHE, role=Role.PREFILL, kv_cache=KvCacheSpec.model_validate({"disk": "8Gi"})
        ),
        "kvCache without cpu: LMCache fills disk and remote from the memory tier",
        id="LMCache tiers without a memory tier",
    ),
    pytest.param(
        make_launch_request(
            kv_transfer=KvTransferSpec.model_validate({"connector": "NIXLWithLMCache"}),
            kv_cache=KvCacheSpec.model_validate({"cpu": "8Gi", "remote": "rediss://kv.store.svc:6380"}),
        ),
        "kvCache.remote rediss://: LMCache's server has no TLS for Redis; "
        "use redis:// and a proxy for TLS in the engine's pod",
        id="a remote tier with TLS behind LMCache's server",
    ),
    pytest.param(
        make_launch_request(
            devices=2,
            kv_transfer=LMCACHE,
            role=Role.PREFILL,
            pool_role="Prefill",
            parallelism=ParallelismSpec(pipeline=2),
        ),
        "pipeline 2 with LMCache: LMCache transfers KV between equal ranks, not stages",
        id="pipeline stages with LMCache",
    ),
    pytest.param(
        make_launch_request("qwen3-next-80b-a3b", kv_transfer=LMCACHE, role=Role.PREFILL),
        "the connector LMCache: 36 layers have a state that LMCache cannot transfer",
        id="state layers with LMCache",
    ),
    pytest.param(
        make_launch_request(
            "gemma-3-27b", devices=2, pool_role="Prefill", parallelism=ParallelismSpec(pipeline=2)
        ),
        "pipeline 2: NIXL transfers KV from stages only if all layers keep all KV",
        id="pipeline stages with window layers",
    ),
    pytest.param(
        make_launch_request(settings=EngineSettingsSpec(max_batched_tokens=128, max_sequences=256)),
        "maxSequences 256: each needs a token in a step of 128 tokens (maxBatchedTokens)",
        id="more sequences than tokens in a step",
    ),
    pytest.param(
        make_launch_request(devices=2, parallelism=ParallelismSpec(pipeline=2)),
        "pipeline 2: only a Prefill pool may have stages: decode cannot use them",
        id="pipeline stages in a pool that decodes",
    ),
    pytest.param(
        make_launch_request(devices=2, parallelism=ParallelismSpec(data=2)),
        "data 2: a model without experts gains nothing from it; use more instances instead",
        id="data parallel without experts",
    ),
    pytest.param(
        make_launch_request(
            "deepseek-v3", "CPU", quantization=QuantizationSpec.model_validate({"kvCache": "fp8"})
        ),
        "kvCache fp8: a CPU stores the latent vector only in the model's data type",
        id="latent FP8 KV on a CPU",
    ),
    pytest.param(
        make_launch_request(
            "tiny-llama", "CPU", quantization=QuantizationSpec.model_validate({"kvCache": "fp4"})
        ),
        "kvCache fp4 needs Blackwell, CPU is not",
        id="FP4 KV on a CPU",
    ),
    pytest.param(
        make_launch_request(quantization=QuantizationSpec.model_validate({"kvCache": "fp4"})),
        "kvCache fp4 needs Blackwell, H100-SXM is not",
        id="FP4 KV on Hopper",
    ),
    pytest.param(
        make_launch_request(device="B200", quantization=QuantizationSpec.model_validate({"weights": "fp4"})),
        "weights fp4 need a checkpoint that is already quantised: FP4 weights need calibration",
        id="FP4 of a checkpoint that is not quantised",
    ),
    pytest.param(
        make_launch_request("gpt-oss-20b", quantization=QuantizationSpec.model_validate({"weights": "fp8"})),
        "weights fp8: the checkpoint is quantised as mxfp4 already",
        id="second quantisation of a checkpoint",
    ),
    pytest.param(
        make_launch_request(settings=EngineSettingsSpec(attention_backend="FlashMLA")),
        "attentionBackend FLASHMLA: the model has no latent attention",
        id="latent kernel for a model without latent attention",
    ),
    pytest.param(
        make_launch_request(
            "deepseek-v3", "H200-SXM", settings=EngineSettingsSpec(attention_backend="FlashAttention")
        ),
        "attentionBackend FLASH_ATTN: the model has latent attention",
        id="plain kernel for a model with latent attention",
    ),
    pytest.param(
        make_launch_request(settings=EngineSettingsSpec(micro_batching=True)),
        "microBatching needs DeepEP: a fixed role, expert parallelism over data-parallel ranks, Hopper",
        id="micro-batching without expert parallelism",
    ),
]


@pytest.mark.parametrize(("launch_request", "reason"), UNSUPPORTED)
def test_unsupported_request_is_refused_with_its_reason(launch_request: LaunchRequest, reason: str) -> None:
    made = plan_launch(launch_request)
    assert (made.launch, reason in made.unsupported) == (None, True)


@pytest.mark.parametrize(
    ("launch_request", "reason"),
    [
        pytest.param(
            make_launch_request(
                "deepseek-v3", "H200-SXM", replace(fixture_facts("deepseek-v3"), index_bytes=132)
            ),
            "sparse attention needs its own kernels",
            id="sparse attention",
        ),
        pytest.param(
            make_launch_request(facts=replace(fixture_facts("llama-3.1-8b"), dtype="float32")),
            "few kernels compute in float32",
            id="float32",
        ),
        pytest.param(
            make_launch_request(device="B200", facts=replace(fixture_facts("llama-3.1-8b"), head_size=96)),
            "FLASHINFER has no kernel for 96 values a head",
            id="unusual head size",
        ),
        pytest.param(
            make_launch_request(
                "deepseek-v3", "H200-SXM", replace(fixture_facts("deepseek-v3"), latent_size=288)
            ),
            "FLASHMLA has no kernel for 288 values a head",
            id="unusual latent size",
        ),
        pytest.param(
            replace(make_launch_request(), hardware=resolve_hardware("B300", memory_bytes=2**38)),
            "model or device is not known",
            id="device of which only the memory is known",
        ),
    ],
)
def test_attention_backend_is_left_to_the_engine_if_the_usual_kernel_does_not_suit(
    launch_request: LaunchRequest, reason: str
) -> None:
    found = next(
        choice for choice in plan_launch(launch_request).choices if choice.name == "attentionBackend"
    )
    assert (found.value, found.reason) == (LEFT_TO_ENGINE, reason)


def test_unknown_device_refuses_nothing() -> None:
    fp4 = QuantizationSpec.model_validate({"kvCache": "fp4"})
    assert (
        plan_launch(
            replace(make_launch_request(quantization=fp4), hardware=resolve_hardware("B300"))
        ).unsupported
        == ()
    )
