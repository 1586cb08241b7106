"""Services of every shape that the vLLM adapter supports, for golden files and for vLLM's own parser."""

import json
from dataclasses import dataclass, field, replace
from typing import Any

from fulcrum_core.api import ObjectMeta, PDService, PDServiceSpec
from fulcrum_core.hardware import resolve_hardware
from fulcrum_core.models import ModelFacts, parse_model_config
from fulcrum_core.values import Role, Slo
from fulcrum_operator.engines.from_spec import build_launch_request
from fulcrum_operator.engines.launch import EnginePlan
from fulcrum_operator.engines.launch_request import LaunchRequest
from fulcrum_operator.engines.vllm import POD_PLACEMENT, VERSION, plan_engine
from fulcrum_operator.plan.pools import desired_pools
from tests.paths import MODELS


@dataclass(frozen=True, slots=True)
class Case:
    """One pool of one service; `role` if the connector fixes it at start."""

    name: str
    model: str
    pool: dict[str, Any]
    service: dict[str, Any] = field(default_factory=dict)
    role: Role | None = None
    facts: bool = True


def gpus(count: int, device: str, **more: Any) -> dict[str, Any]:
    return {"resource": "nvidia.com/gpu", "count": count, "type": device, **more}


CPU = {"resource": "cpu", "count": 2}
NIXL_WITH_LMCACHE = {"kvTransfer": {"connector": "NIXLWithLMCache"}}
LMCACHE = {"kvTransfer": {"connector": "LMCache"}}

CASES = (
    Case("dense-h100-nixl", "llama-3.1-8b", {"hardware": gpus(1, "H100-SXM")}),
    Case(
        "mha-a100-fp8-kv",
        "llama-2-7b",
        {"hardware": gpus(1, "A100-40GB"), "quantization": {"kvCache": "fp8"}},
    ),
    Case(
        "gqa-70b-tp4-infiniband",
        "llama-3.1-70b",
        {"hardware": gpus(4, "H100-SXM", fabric="InfiniBand")},
        {"slo": {"ttft": "4s", "tpot": "100ms"}, "kvTransfer": {"devices": "mlx5_0:1,mlx5_1:1"}},
    ),
    Case(
        "gqa-70b-fp8-tp2-roce",
        "llama-3.1-70b",
        {
            "hardware": gpus(2, "H200-SXM", fabric="RoCE"),
            "quantization": {"weights": "fp8", "kvCache": "fp8"},
        },
        {"modelSource": {"maxLength": 32768, "revision": "v1", "tokenSecret": "hub"}},
    ),
    Case(
        "gqa-70b-prefill-stages",
        "llama-3.1-70b",
        {
            "role": "Prefill",
            "hardware": gpus(4, "A100-80GB"),
            "parallelism": {"tensor": 2, "pipeline": 2},
        },
        {"modelSource": {"maxLength": 65536}},
    ),
    Case(
        "gqa-32b-nvlink-tiers",
        "qwen3-32b",
        {"hardware": gpus(2, "H100-SXM", fabric="NVLink")},
        {
            **NIXL_WITH_LMCACHE,
            "kvCache": {"cpu": "64Gi", "disk": "500Gi", "remote": "redis://kv.store.svc:6379"},
        },
    ),
    Case(
        "gqa-70b-lmcache-sender",
        "llama-3.1-70b",
        {"hardware": gpus(4, "H100-SXM", fabric="InfiniBand")},
        {**LMCACHE, "modelSource": {"maxLength": 32768}, "kvCache": {"cpu": "32Gi"}},
        role=Role.PREFILL,
    ),
    Case(
        "gqa-70b-lmcache-receiver",
        "llama-3.1-70b",
        {"hardware": gpus(4, "H100-SXM", fabric="InfiniBand"), "settings": {"sleepMode": True}},
        {**LMCACHE, "modelSource": {"maxLength": 32768}, "kvCache": {"cpu": "32Gi"}},
        role=Role.DECODE,
    ),
    Case(
        "mla-moe-h200-flexible",
        "deepseek-v3",
        {
            "hardware": gpus(8, "H200-SXM", fabric="InfiniBand"),
            "parallelism": {"tensor": 1, "data": 8, "expert": True},
        },
        {"modelSource": {"pvc": "models", "path": "deepseek-v3"}},
    ),
    Case(
        "mla-moe-h200-decode-expert",
        "deepseek-v3",
        {
            "role": "Decode",
            "hardware": gpus(8, "H200-SXM", fabric="InfiniBand"),
            "parallelism": {"tensor": 1, "data": 8, "expert": True},
            "quantization": {"kvCache": "fp8"},
        },
    ),
    Case(
        "mla-moe-b200-prefill-expert",
        "deepseek-v3",
        {
            "role": "Prefill",
            "hardware": gpus(8, "B200", fabric="NVLink"),
            "parallelism": {"tensor": 1, "data": 8, "expert": True},
        },
    ),
    Case("moe-mixtral-h100-tp2", "mixtral-8x7b", {"hardware": gpus(2, "NVIDIA-H100-80GB-HBM3")}),
    Case(
        "moe-qwen3-l40s-expert",
        "qwen3-30b-a3b",
        {"hardware": gpus(2, "L40S", fabric="TCP"), "parallelism": {"tensor": 2, "expert": True}},
    ),
    Case(
        "moe-mxfp4-b200-fp4-kv",
        "gpt-oss-20b",
        {"hardware": gpus(1, "B200"), "quantization": {"kvCache": "fp4"}},
    ),
    Case(
        "hybrid-state-h200",
        "qwen3-next-80b-a3b",
        {"hardware": gpus(2, "H200-SXM")},
    ),
    Case(
        "window-mi300x",
        "gemma-3-27b",
        {"hardware": {"resource": "amd.com/gpu", "count": 1, "type": "MI300X"}},
    ),
    Case("l4-context-too-long", "llama-3.1-8b", {"hardware": gpus(1, "L4")}),
    Case("weights-too-large", "llama-3.1-70b", {"hardware": gpus(1, "H100-SXM")}),
    Case("unknown-gpu", "llama-3.1-8b", {}),
    Case("unknown-model", "acme/private-9b", {"hardware": gpus(2, "H100-SXM")}, facts=False),
    Case(
        "all-settings-by-user",
        "llama-3.1-8b",
        {
            "hardware": gpus(2, "H100-SXM", memory="94Gi", fabric="TCP"),
            "parallelism": {"tensor": 2},
            "settings": {
                "attentionBackend": "FlexAttention",
                "asyncScheduling": False,
                "maxBatchedTokens": 4096,
                "maxSequences": 64,
                "blockSize": 32,
            },
        },
        {
            "modelSource": {"hostPath": "/data/llama", "servedName": "llama"},
            "engine": {
                "type": "vLLM",
                "args": ["--seed", "7"],
                "env": [{"name": "UCX_TLS", "value": "tcp"}, {"name": "NCCL_DEBUG", "value": "WARN"}],
            },
            "drain": {"timeout": "90s"},
        },
    ),
    Case(
        "gqa-70b-awq-b200-prefill",
        "llama-3.1-70b-awq",
        {"role": "Prefill", "hardware": gpus(1, "B200", fabric="RoCE")},
        {"modelSource": {"maxLength": 32768}},
    ),
    Case(
        "mla-sparse-h200-tp8",
        "deepseek-v3.2",
        {"hardware": gpus(8, "H200-SXM", fabric="InfiniBand"), "quantization": {"kvCache": "fp8"}},
    ),
    Case(
        "moe-slices-h100-dp2",
        "mixtral-8x7b",
        {"hardware": gpus(2, "H100-SXM"), "parallelism": {"tensor": 1, "data": 2}},
    ),
    Case("cpu-long-context", "llama-3.1-8b", {"hardware": {**CPU, "memory": "64Gi"}}),
    Case("tiny-cpu-nixl", "tiny-llama", {"hardware": CPU, "settings": {"blockSize": 32}}),
    Case("tiny-cpu-fp8-kv", "tiny-llama", {"hardware": CPU, "quantization": {"kvCache": "fp8"}}),
    Case(
        "tiny-cpu-tiers",
        "tiny-llama",
        {"hardware": CPU, "settings": {"blockSize": 32}},
        {**NIXL_WITH_LMCACHE, "kvCache": {"cpu": "256Mi"}},
    ),
)


def fixture_facts(model: str) -> ModelFacts:
    text = (MODELS / model / "config.json").read_text(encoding="utf-8")
    return parse_model_config(json.loads(text))


def case_service(case: Case) -> PDService:
    spec = {
        "model": case.model,
        "engine": {"type": "vLLM"},
        **case.service,
        "pools": [{"name": "pool", "instances": {"min": 2}, **case.pool}],
    }
    return PDService(metadata=ObjectMeta(name="chat"), spec=PDServiceSpec.model_validate(spec))


def case_request(case: Case) -> LaunchRequest:
    service = case_service(case)
    pool = desired_pools(service, ())[0].spec
    facts = fixture_facts(case.model) if case.facts else None
    return build_launch_request(service, pool, pool_role=pool.role, role=case.role, facts=facts)


def plan_case(case: Case) -> EnginePlan:
    return plan_engine(case_request(case), POD_PLACEMENT)


def make_launch_request(
    model: str = "llama-3.1-8b", device: str = "H100-SXM", facts: ModelFacts | None = None, **changes: Any
) -> LaunchRequest:
    """A launch request for a flexible pool on one device, with these fields changed."""
    made = LaunchRequest(
        model=model,
        pool_role="Flexible",
        slo=Slo(ttft_s=1.0, tpot_s=0.05),
        proxy_host="chat.default.svc",
        drain_timeout_s=120.0,
        facts=facts or fixture_facts(model),
        hardware=resolve_hardware(device),
        devices=None if device == "CPU" else 1,
        version=VERSION,
    )
    return replace(made, **changes)


def plan_launch(launch_request: LaunchRequest) -> EnginePlan:
    return plan_engine(launch_request, POD_PLACEMENT)


def chosen_value(launch_request: LaunchRequest, name: str) -> str | None:
    """Value of the choice with this name; None if there is no such choice."""
    return next((choice.value for choice in plan_launch(launch_request).choices if choice.name == name), None)


LEFT_TO_ENGINE = "left to the engine"
