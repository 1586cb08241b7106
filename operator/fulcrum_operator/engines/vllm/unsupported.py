"""Find settings that this vLLM version does not support, before an engine is started with them.

`vllm/launch` then returns the reasons and no launch; they reach the user in `fulcrum plan` and in Degraded.
Whether the model fits its devices is `fulcrum_core.models.fit`'s.
"""

from collections.abc import Iterator

from fulcrum_core.api.engine import Connector
from fulcrum_core.hardware import Vendor
from fulcrum_core.models import KvPrecision, WeightPrecision
from fulcrum_operator.engines.launch_request import LaunchRequest
from fulcrum_operator.engines.vllm.settings import DEEPEP_BACKENDS, LATENT_BACKENDS, VllmSettings


def find_unsupported(request: LaunchRequest, settings: VllmSettings) -> tuple[str, ...]:
    """One message for each unsupported setting; empty if the engine can start."""
    return (*_transfer(request), *_layout(request), *_quantization(request), *_kernels(request, settings))


def _transfer(request: LaunchRequest) -> Iterator[str]:
    connector = request.kv_transfer.connector
    if connector is Connector.NIXL and not request.kv_cache.is_empty:
        yield "kvCache needs the connector NIXLWithLMCache or LMCache: NIXL keeps no tiers"
    if connector is Connector.NIXL_WITH_LMCACHE and (request.kv_cache.remote or "").startswith("rediss:"):
        yield (
            "kvCache.remote rediss://: LMCache's server has no TLS for Redis; "
            "use redis:// and a proxy for TLS in the engine's pod"
        )
    if request.settings.sleep_mode and connector is not Connector.LMCACHE:
        yield f"sleepMode with {connector}: vLLM {request.version} does not register KV memory after waking"
    if connector is not Connector.LMCACHE:
        return
    if request.hardware.vendor is Vendor.CPU:
        yield "the connector LMCache needs a GPU: its in-process mode has no CPU kernels"
    if request.role is None:
        yield "the connector LMCache fixes the role at start, but the instance has no role"
    if request.buffer_bytes is None:
        yield "kvTransfer.bufferSize is needed: the default depends on config.json, which was not read"
    kv_cache = request.kv_cache
    if kv_cache.cpu is None and not kv_cache.is_empty:
        yield "kvCache without cpu: LMCache fills disk and remote from the memory tier"


def _layout(request: LaunchRequest) -> Iterator[str]:
    layout, facts = request.layout, request.facts
    if layout.pipeline > 1 and request.pool_role != "Prefill":
        yield f"pipeline {layout.pipeline}: only a Prefill pool may have stages: decode cannot use them"
    if layout.data > 1 and facts is not None and not facts.is_moe:
        yield f"data {layout.data}: a model without experts gains nothing from it; use more instances instead"
    if request.kv_transfer.connector is Connector.LMCACHE:
        yield from _lmcache_layout(request)
    elif layout.pipeline > 1 and facts is not None and facts.window_layers + facts.state_layers:
        yield f"pipeline {layout.pipeline}: NIXL transfers KV from stages only if all layers keep all KV"


def _lmcache_layout(request: LaunchRequest) -> Iterator[str]:
    layout, facts = request.layout, request.facts
    if layout.data > 1:
        yield f"data {layout.data} with LMCache: data-parallel ranks would listen on the same receiver ports"
    if layout.pipeline > 1:
        yield f"pipeline {layout.pipeline} with LMCache: LMCache transfers KV between equal ranks, not stages"
    if facts is not None and facts.state_layers:
        yield f"the connector LMCache: {facts.state_layers} layers have a state that LMCache cannot transfer"


def _quantization(request: LaunchRequest) -> Iterator[str]:
    weights, kv = request.quantization.weights, request.quantization.kv_cache
    facts, hardware = request.facts, request.hardware
    cpu = hardware.vendor is Vendor.CPU
    if cpu and weights is not WeightPrecision.AUTO:
        yield f"weights {weights}: CPUs run the checkpoint's own data type"
    if cpu and kv is KvPrecision.FP8 and facts is not None and facts.latent:
        yield f"kvCache {kv}: a CPU stores the latent vector only in the model's data type"
    capability_known = hardware.compute_capability or hardware.vendor is not Vendor.NVIDIA
    if kv is KvPrecision.FP4 and capability_known and not hardware.supports_fp4:
        yield f"kvCache fp4 needs Blackwell, {hardware.name} is not"
    if kv is KvPrecision.FP4 and facts is not None and facts.latent:
        yield "kvCache fp4: no kernel reads a latent vector in FP4"
    if facts is None:
        return
    if weights is WeightPrecision.FP4 and facts.weight_bits > 5:
        yield "weights fp4 need a checkpoint that is already quantised: FP4 weights need calibration"
    if weights is WeightPrecision.FP8 and facts.quantization and facts.weight_bits != 8:
        yield f"weights fp8: the checkpoint is quantised as {facts.quantization} already"


def _kernels(request: LaunchRequest, settings: VllmSettings) -> Iterator[str]:
    if settings.max_batched_tokens is not None and settings.max_sequences > settings.max_batched_tokens:
        step = f"a step of {settings.max_batched_tokens} tokens (maxBatchedTokens)"
        yield f"maxSequences {settings.max_sequences}: each needs a token in {step}"
    if settings.micro_batching and settings.all2all_backend not in DEEPEP_BACKENDS:
        yield "microBatching needs DeepEP: a fixed role, expert parallelism over data-parallel ranks, Hopper"
    facts = request.facts
    if facts is None or settings.attention_backend is None:
        return
    if (settings.attention_backend in LATENT_BACKENDS) != facts.latent:
        kind = "has" if facts.latent else "has no"
        yield f"attentionBackend {settings.attention_backend}: the model {kind} latent attention"
