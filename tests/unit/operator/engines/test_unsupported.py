"""What would not start is not tried: it is refused in words, or left to the engine to choose."""

from dataclasses import replace

import pytest

from fulcrum_core.api.engine import (
    KvCacheSpec,
    KvTransferSpec,
    ParallelismSpec,
    QuantizationSpec,
    SettingsSpec,
)
from fulcrum_core.hardware import hardware_of
from fulcrum_core.values import Role
from fulcrum_operator.engines.request import EngineRequest
from tests.unit.operator.engine_cases import LEFT, facts_of, plan, request

LMCACHE = KvTransferSpec.model_validate({"connector": "LMCache"})
TIERS = KvCacheSpec.model_validate({"cpu": "8Gi"})
REFUSED = [
    pytest.param(
        request(kv_cache=TIERS),
        "kvCache needs the connector NIXLWithLMCache or LMCache: NIXL keeps no tiers",
        id="tiers nobody keeps",
    ),
    pytest.param(
        request(settings=SettingsSpec(sleep_mode=True)),
        "sleepMode with NIXL: vLLM 0.32.0 does not register its memory again",
        id="sleep under NIXL",
    ),
    pytest.param(
        request("tiny-llama", "CPU", kv_transfer=LMCACHE, role=Role.PREFILL),
        "the connector LMCache needs a GPU: its in-process mode has no kernels for CPUs",
        id="LMCache in process on a CPU",
    ),
    pytest.param(
        request(kv_transfer=LMCACHE),
        "the connector LMCache fixes the role at start, and none is given",
        id="no role at start",
    ),
    pytest.param(
        replace(request(kv_transfer=LMCACHE, role=Role.DECODE), facts=None),
        "kvTransfer.bufferSize is needed: it follows from the model's config.json, which was not read",
        id="a buffer of unknown size",
    ),
    pytest.param(
        request(kv_transfer=LMCACHE, role=Role.PREFILL, kv_cache=KvCacheSpec.model_validate({"disk": "8Gi"})),
        "kvCache without cpu: LMCache fills disk and remote from memory",
        id="LMCache without memory",
    ),
    pytest.param(
        request(
            devices=2,
            kv_transfer=LMCACHE,
            role=Role.PREFILL,
            pool_role="Prefill",
            parallelism=ParallelismSpec(pipeline=2),
        ),
        "pipeline 2 with LMCache: it hands over from rank to rank, stages have none",
        id="stages under LMCache",
    ),
    pytest.param(
        request("qwen3-next-80b-a3b", kv_transfer=LMCACHE, role=Role.PREFILL),
        "the connector LMCache: 36 layers keep a state, which it does not hand over",
        id="states under LMCache",
    ),
    pytest.param(
        request("gemma-3-27b", devices=2, pool_role="Prefill", parallelism=ParallelismSpec(pipeline=2)),
        "pipeline 2: NIXL hands over from stages only where all layers keep all KV",
        id="stages and windows",
    ),
    pytest.param(
        request(settings=SettingsSpec(max_batched_tokens=128, max_sequences=256)),
        "maxSequences 256: each needs a token in a step of 128 tokens (maxBatchedTokens)",
        id="more requests than tokens",
    ),
    pytest.param(
        request(devices=2, parallelism=ParallelismSpec(pipeline=2)),
        "pipeline 2: only a Prefill pool may have stages, decode reads KV into none",
        id="stages that decode",
    ),
    pytest.param(
        request(devices=2, parallelism=ParallelismSpec(data=2)),
        "data 2: a model without experts gains nothing; use more instances instead",
        id="data parallel without experts",
    ),
    pytest.param(
        request("deepseek-v3", "CPU", quantization=QuantizationSpec.model_validate({"kvCache": "fp8"})),
        "kvCache fp8: CPUs keep a latent vector in the model's data type",
        id="latent FP8 KV on a CPU",
    ),
    pytest.param(
        request("tiny-llama", "CPU", quantization=QuantizationSpec.model_validate({"kvCache": "fp4"})),
        "kvCache fp4 needs Blackwell, CPU is not",
        id="FP4 KV on a CPU",
    ),
    pytest.param(
        request(quantization=QuantizationSpec.model_validate({"kvCache": "fp4"})),
        "kvCache fp4 needs Blackwell, H100-SXM is not",
        id="FP4 KV on Hopper",
    ),
    pytest.param(
        request(device="B200", quantization=QuantizationSpec.model_validate({"weights": "fp4"})),
        "weights fp4 need a checkpoint that is quantised already: four bits have to be calibrated",
        id="FP4 of a plain checkpoint",
    ),
    pytest.param(
        request("gpt-oss-20b", quantization=QuantizationSpec.model_validate({"weights": "fp8"})),
        "weights fp8: the checkpoint is quantised as mxfp4 already",
        id="quantised twice",
    ),
    pytest.param(
        request(settings=SettingsSpec(attention_backend="FlashMLA")),
        "attentionBackend FLASHMLA: the model has no latent attention",
        id="latent kernels without a latent vector",
    ),
    pytest.param(
        request("deepseek-v3", "H200-SXM", settings=SettingsSpec(attention_backend="FlashAttention")),
        "attentionBackend FLASH_ATTN: the model has latent attention",
        id="plain kernels for a latent vector",
    ),
    pytest.param(
        request(settings=SettingsSpec(micro_batching=True)),
        "microBatching needs DeepEP: a fixed role, expert parallelism over data-parallel ranks, Hopper",
        id="micro-batches without experts",
    ),
]


@pytest.mark.parametrize(("asked", "reason"), REFUSED)
def test_nothing_is_started_where(asked: EngineRequest, reason: str) -> None:
    made = plan(asked)
    assert (made.launch, reason in made.refusals) == (None, True)


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        pytest.param(
            request("deepseek-v3", "H200-SXM", replace(facts_of("deepseek-v3"), index_bytes=132)),
            "sparse attention has kernels of its own",
            id="sparse attention",
        ),
        pytest.param(
            request(facts=replace(facts_of("llama-3.1-8b"), dtype="float32")),
            "few kernels compute in float32",
            id="float32",
        ),
        pytest.param(
            request(device="B200", facts=replace(facts_of("llama-3.1-8b"), head_size=96)),
            "FLASHINFER has no kernel for 96 values a head",
            id="heads of an unusual size",
        ),
        pytest.param(
            request("deepseek-v3", "H200-SXM", replace(facts_of("deepseek-v3"), latent_size=288)),
            "FLASHMLA has no kernel for 288 values a head",
            id="a latent vector of an unusual size",
        ),
        pytest.param(
            replace(request(), hardware=hardware_of("B300", memory_bytes=2**38)),
            "model or device are not known",
            id="only the memory of the device is known",
        ),
    ],
)
def test_no_kernel_is_named_that_would_keep_the_engine_from_starting(
    asked: EngineRequest, reason: str
) -> None:
    found = next(choice for choice in plan(asked).choices if choice.name == "attentionBackend")
    assert (found.value, found.reason) == (LEFT, reason)


def test_what_is_not_known_of_a_device_refuses_nothing() -> None:
    fp4 = QuantizationSpec.model_validate({"kvCache": "fp4"})
    assert plan(replace(request(quantization=fp4), hardware=hardware_of("B300"))).refusals == ()
