"""Explains layout, precision and KV transfer of an engine in `fulcrum plan`: each value with its reason.

`launch_request` and `connectors` decide the values; `vllm/launch.py` collects these explanations.
"""

from collections.abc import Iterator

from fulcrum_core.api.engine import Connector
from fulcrum_core.hardware import Fabric
from fulcrum_core.models import KvPrecision, WeightPrecision, format_gib, kv_bytes_per_token, weight_bytes
from fulcrum_core.values import FlipStrategy
from fulcrum_operator.engines.launch import Choice
from fulcrum_operator.engines.launch_request import LaunchRequest
from fulcrum_operator.engines.vllm.connectors import flip_strategy, kv_lease_s, longest_transfer_s
from fulcrum_operator.engines.vllm.user_args import user_kv_lease_s


def explain_layout(request: LaunchRequest) -> Iterator[Choice]:
    """Yield the sizes of tensor, pipeline and data parallelism, and how the ranks share the experts."""
    layout, facts = request.layout, request.facts
    why = (
        "set in the manifest"
        if request.parallelism.tensor
        else "every device of the instance shares each layer"
    )
    yield Choice("tensor", str(layout.tensor), why)
    if layout.pipeline * layout.data > 1:
        yield Choice("pipeline × data", f"{layout.pipeline} × {layout.data}", "set in the manifest")
    if facts is not None and facts.is_moe and layout.devices_needed > 1:
        share = "some experts" if layout.expert else "a slice of each expert"
        yield Choice("expert", str(layout.expert).lower(), f"of {facts.experts}, every rank has {share}")


def explain_precision(request: LaunchRequest) -> Iterator[Choice]:
    """Yield the precision of weights and KV; if the model is known, with their memory (KV: for one token)."""
    weights, kv, facts = request.quantization.weights, request.quantization.kv_cache, request.facts
    if facts is None:
        for name, value in (("weights", weights.value), ("kvCache", kv.value)):
            yield Choice(name, value, "the model is not known" if value == "auto" else "set in the manifest")
        return
    checkpoint_type = facts.quantization or facts.dtype
    size = format_gib(weight_bytes(facts, weights))
    if weights is WeightPrecision.AUTO:
        yield Choice("weights", checkpoint_type, f"as the checkpoint has them: {size}")
    else:
        yield Choice(
            "weights", weights.value, f"set in the manifest, the checkpoint has {checkpoint_type}: {size}"
        )
    token = f"{kv_bytes_per_token(facts, kv):,} bytes a token"
    if kv is KvPrecision.AUTO:
        yield Choice("kvCache", facts.dtype, f"the data type of the model: {token}")
    else:
        yield Choice("kvCache", kv.value, f"set in the manifest: {token}")


def explain_kv_transfer(request: LaunchRequest) -> tuple[Choice, ...]:
    """Return flip strategy (flexible pools only), KV lease, buffer size and KV cache tiers."""
    connector = request.kv_transfer.connector
    strategy = flip_strategy(connector)
    reasons = {
        FlipStrategy.RELABEL: "the role is in each request: a flip is a routing decision",
        FlipStrategy.RESTART: "the role is fixed at start: a flip drains and restarts",
    }
    rows = [Choice("flip", strategy.value, reasons[strategy])] if request.pool_role == "Flexible" else []
    if connector is not Connector.LMCACHE:
        rule = "twice the sum of TTFT objective and transfer time, at least 30 s"
        chosen = f"{rule}; {_describe_longest_transfer(request)}"
        reason = chosen if user_kv_lease_s(request.args) is None else "set in engine.args"
        rows.append(Choice("lease", f"{kv_lease_s(request):g}s", reason))
        rows.append(Choice("bufferSize", "none", "NIXL reads the engine's KV cache directly"))
    elif (size := request.buffer_bytes) is not None:
        tokens = f"{request.longest_prompt_tokens or 0:,}"
        default = f"a rank's share of a prompt of {tokens} tokens, rounded up to multiples of 256 MiB"
        set_by_user = request.kv_transfer.buffer_size is not None
        rows.append(
            Choice("bufferSize", f"{size // 2**20}Mi", "set in the manifest" if set_by_user else default)
        )
    return (*rows, *_tier_choices(request))


def _describe_longest_transfer(request: LaunchRequest) -> str:
    """Describe how long a KV transfer of the longest prompt takes: a part of the reason for the KV lease."""
    longest_s, fabric = longest_transfer_s(request), request.hardware.fabric
    if not longest_s:
        return "the transfer time of the longest prompt is not known"
    path = (
        f"{fabric.bytes_per_s / 1e9:g} GB/s, assumed because hardware.fabric is not set"
        if fabric is Fabric.AUTO
        else fabric.value
    )
    duration = f"{longest_s:.1f}" if longest_s >= 0.1 else "less than 0.1"
    return f"the longest prompt takes {duration} s over {path}"


def _tier_choices(request: LaunchRequest) -> Iterator[Choice]:
    spec, name = request.kv_cache, "tiers"
    if spec.is_empty:
        return
    tiers = ", ".join(tier for tier in ("cpu", "disk", "remote") if getattr(spec, tier) is not None)
    if request.kv_transfer.connector is Connector.NIXL_WITH_LMCACHE:
        yield Choice(name, tiers, "kept by LMCache's server, next to the engine")
    elif request.started_for_prefill:
        yield Choice(name, tiers, f"each of {request.tensor} ranks has an equal share")
    else:
        yield Choice(name, "none", "an LMCache receiver reads only KV that a sender pushes")
